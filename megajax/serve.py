"""Serve a model over HTTP: `python -m megajax.serve --run=RUN`."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megajax.command_line import Flag, front_door, parse
from megajax.config.builds import resolve
from megajax.config.errors import UserError
from megajax.config.files import Source
from megajax.config.missing import require
from megajax.inference.server.config import Access, ServingConfig
from megajax.job.origin import MODEL_FLAGS, generation_config, origin_of
from megajax.mesh.world import find_world
from megajax.mesh.xla import set_process

DESCRIPTION = """Answer requests over HTTP with the model of a run or of a Hugging Face folder: OpenAI's routes, the
route of Megatron-LM, and a page to try prompts at the address itself.

  python -m megajax.serve --run=runs/a
  python -m megajax.serve --hf=DIR --adapter=DIR --port=8000 --inference.rows=64
  python -m megajax.serve --run=runs/a --host=0.0.0.0 --api-key-file=keys.txt

SIGTERM lets running requests end. docs/serving.md has the routes, the limits and what is measured."""
FLAGS = (
    *MODEL_FLAGS,
    Flag("host", str, "127.0.0.1", help="address to listen on; others than this machine's need --api-key-file"),
    Flag("port", int, 5000, help="0: any that is free"),
    Flag("api-key-file", Path | None, help="file with a key in each line, which every route but /health asks for"),
    Flag("insecure", help="listen on any address without keys"),
    Flag("log-prompts", help="log prompts and answers too; without it, neither is written anywhere"),
)
COMMON = ("inference.rows", "inference.length", "inference.cache_tokens", "inference.template", "parallel.tensor",
          "server.name", "server.queue", "server.drain_seconds")  # fmt: skip
"""Settings that --help shows."""


def main(argv: list[str]) -> int:
    """Read the command line, take the address, then (and only then) import jax, load the model and serve."""
    command = parse(
        argv, verb="serve", flags=FLAGS, description=DESCRIPTION, root=ServingConfig, common=COMMON, base=base
    )
    flags, config = command.flags, command.config
    world = find_world()
    if world is not None and world.count > 1:
        raise UserError(f"serve runs in one process, and this is one of {world.count}: start it without a launcher")
    for package in ("starlette", "uvicorn"):
        require(package, "The server")
    set_process(config.xla)
    access = Access(**{each.name: flags[each.name] for each in fields(Access)})
    serving = resolve("megajax.inference.server.run:Serving")(config.server, access)
    resolve("megajax.job.compile_cache:use_cache")(config.xla)
    # Programs that it does not record are deleted by the next start.
    with resolve("megajax.job.compile_log:CompileLog")(lambda sentence: None):
        origin = origin_of(flags)
        loaded = resolve("megajax.job.inference:load")(config, origin)
        engine = resolve("megajax.job.inference:start_engine")(loaded, queue=config.server.queue)
        folder = next(path for path in (origin.adapter, origin.hf, origin.run) if path is not None)
        return serving.run(
            engine,
            engine.device,
            loaded.tokenizer,
            loaded.conversation,
            name=config.server.name or folder.resolve().name,
            where=loaded.where,
            warm_up=config.inference.warm_up,
        )


def base(flags: Mapping[str, Any]) -> Source:
    """The settings of the model. Raises ConfigError where the flags name none, or two."""
    return generation_config(origin_of(flags), ServingConfig)


if __name__ == "__main__":
    front_door(main)
