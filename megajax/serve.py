"""Serve a model over HTTP: `python -m megajax.serve --run=RUN`."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megajax.command_line.parser import Flag, front_door, parse
from megajax.config.class_references import resolve
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.files import Source
from megajax.config.optional_packages import require
from megajax.inference.server.config import Access, ServingConfig
from megajax.interop.origin import MODEL_FLAGS, folder_sampling, generation_config, origin_of
from megajax.mesh.processes.world import find_world
from megajax.mesh.xla_options import set_process

DESCRIPTION = """Serve the model of a run or of a Hugging Face folder over HTTP: OpenAI's routes, Megatron-LM's route,
and a web page to try prompts.

  python -m megajax.serve --run=runs/a
  python -m megajax.serve --hf=DIR --adapter=DIR --port=8000 --inference.rows=64
  python -m megajax.serve --hf=DIR --adapters=law=DIR,code=DIR --inference.adapter_rank=32
  python -m megajax.serve --run=runs/a --host=0.0.0.0 --api-key-file=keys.txt

On SIGTERM, the server finishes running requests first. docs/serving.md describes routes, limits and metrics."""
FLAGS = (
    *MODEL_FLAGS,
    Flag(
        "adapters",
        tuple[str, ...],
        (),
        help="NAME=DIR,NAME=DIR: adapters that requests choose with their field model; DIR as with --adapter",
    ),
    Flag("host", str, "127.0.0.1", help="address to listen on; other than loopback addresses need --api-key-file"),
    Flag("port", int, 5000, help="0: any free port"),
    Flag("api-key-file", Path | None, help="file with one key per line, required by all routes but /health and /ping"),
    Flag("insecure", help="listen on any address without keys"),
    Flag("log-prompts", help="log prompts and answers too; by default neither is logged"),
)
COMMON = ("inference.rows", "inference.length", "inference.cache_tokens", "inference.template", "parallel.tensor",
          "server.name", "server.queue", "server.drain_seconds")  # fmt: skip
"""Settings that --help shows."""


def main(argv: list[str]) -> int:
    """Parse the command line, bind the address, then import jax, load the model and serve."""
    command = parse(
        argv, verb="serve", flags=FLAGS, description=DESCRIPTION, root=ServingConfig, common=COMMON, base=base
    )
    flags, adapters = command.flags, named_folders(command.flags["adapters"])
    config = with_slots(command.config, len(adapters))
    world = find_world()
    if world is not None and world.count > 1:
        raise UserError(f"serve runs in one process, but this is one of {world.count}: start it without a launcher")
    for package in ("starlette", "uvicorn"):
        require(package, "The server")
    set_process(config.xla)
    resolve("megajax.mesh.processes.agreement:start")()
    access = Access(**{field.name: flags[field.name] for field in fields(Access)})
    serving = resolve("megajax.inference.server.server:Serving")(config.server, access)
    resolve("megajax.job.start.compile_cache:use_cache")(config.xla)
    # Compiled programs that the log does not record are deleted at the next start.
    with resolve("megajax.job.compile_log:CompileLog")(lambda message: None):
        origin = origin_of(flags)
        sampling = folder_sampling(origin.hf if config.server.generation_config else None)
        loaded = resolve("megajax.interop.loading:load")(config, origin)
        engine = resolve("megajax.interop.loading:start_engine")(loaded, queue=config.server.queue)
        reader = (
            resolve("megajax.interop.loading:adapter_reader")(loaded, origin) if config.inference.adapters else None
        )
        folder = next(path for path in (origin.adapter, origin.hf, origin.run) if path is not None)
        return serving.run(
            engine,
            engine.device,
            loaded.tokenizer,
            loaded.conversation,
            name=config.server.name or folder.resolve().name,
            where=loaded.where,
            sampling=sampling,
            warm_up=config.inference.warm_up,
            adapters=adapters,
            read_adapter=reader,
        )


def named_folders(flag: Sequence[str]) -> dict[str, Path]:
    """The folders of --adapters, by name. Raises ConfigError."""
    folders = {}
    for text in flag:
        name, _, folder = text.partition("=")
        if not (name and folder) or name in folders:
            problem = "a name twice" if name in folders else f"{text!r}"
            raise ConfigError([Problem("--adapters", f"has {problem}", "give NAME=DIR,NAME=DIR")], "command line")
        folders[name] = Path(folder).expanduser()
    return folders


def with_slots(config: ServingConfig, adapters: int) -> ServingConfig:
    """The settings with a slot for each adapter of the command line. Raises ConfigError for a server that could load
    adapters but has no slots."""
    slots = max(config.inference.adapters, adapters)
    if config.server.load_adapters and not slots:
        problem = Problem("server.load_adapters", "needs slots for adapters", "set inference.adapters=4, for example")
        raise ConfigError([problem], "command line")
    return replace(config, inference=replace(config.inference, adapters=slots))


def base(flags: Mapping[str, Any]) -> Source:
    """The settings of the model. Raises ConfigError if the flags name no model, or two."""
    return generation_config(origin_of(flags), ServingConfig)


if __name__ == "__main__":
    front_door(main)
