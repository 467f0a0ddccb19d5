"""Serve a model over HTTP: `python -m megajax.serve --run=RUN`."""

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from megajax.command_line.parser import PROCESS_FLAGS, Flag, front_door, parse
from megajax.config.class_references import resolve
from megajax.config.config_files import Source
from megajax.config.optional_packages import require
from megajax.interop.weights.formats import split_name
from megajax.interop.weights.origin import MODEL_FLAGS, folder_pooling, folder_sampling, generation_config, origin_of
from megajax.processes.identity import find_identity
from megajax.processes.xla_options import set_process
from megajax.server.config import Access, Port, ServingConfig, named_folders, with_slots

DESCRIPTION = """Serve the model of a run or of a Hugging Face folder over HTTP: OpenAI's routes, Megatron-LM's route,
and a web page to try prompts.

  python -m megajax.serve --run=runs/a
  python -m megajax.serve --hf=DIR --adapter=DIR --port=8000 --inference.rows=64
  python -m megajax.serve --hf=DIR --adapters=law=DIR,code=DIR --inference.adapter_rank=32
  python -m megajax.serve --run=runs/a --host=0.0.0.0 --api-key-file=keys.txt

A model larger than one machine is served by several processes, which are started with the same command each: by srun,
mpirun, a Kubernetes job, `python -m megajax.launch`, or by hand with the flags below. Process 0 has the address.

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
    Flag("port", Port, 5000, help="0: any free port"),
    Flag("api-key-file", Path | None, help="file with one key per line, required by all routes but /health"),
    Flag("insecure", help="listen on any address without keys"),
    Flag("log-prompts", help="log prompts and answers too; by default neither is logged"),
    *PROCESS_FLAGS,
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
    for package in ("starlette", "uvicorn", "prometheus_client"):
        require(package, "The server")
    set_process(config.xla)
    start, finish = (resolve(f"megajax.processes.start:{name}") for name in ("start", "finish"))
    equal = {name: flags[name] for name in ("run", "hf", "adapter", "ignore")}
    start(patience=flags["init_timeout"], identity=partial(find_identity, config, equal))
    # Compiled programs that the log does not record are deleted at the next start.
    with (
        resolve("megajax.inference.processes.group:Processes")() as processes,
        resolve("megajax.job.compile_log:CompileLog")(lambda message: None),
    ):
        code = serve(config, flags, adapters, processes)
    if code == 0:
        processes.close()
        finish()
    return code


def serve(config: ServingConfig, flags: Mapping[str, Any], adapters: Mapping[str, Path], processes: Any) -> int:
    """Load the model and serve it, or follow process 0 -> exit code. processes: a `Processes`."""
    access = Access(**{field.name: flags[field.name] for field in fields(Access)})
    open_serving = resolve("megajax.server.server:ReadyServer")
    serving = open_serving(config.server, access) if processes.first else None
    resolve("megajax.job.start.compile_cache:use_cache")(config.xla)
    name, reading = origin_of(flags)
    library, folder = split_name(name)
    hf = folder if library else None
    loaded = resolve("megajax.interop.loading:load")(config, name, reading)
    engine = resolve("megajax.interop.loading:start_engine")(
        loaded, queue=config.server.queue, guide_limits=config.server.guide_limits()
    )
    if serving is None:
        return processes.follow(engine.device)
    processes.lead(engine.device, config.server.stall_seconds)
    adapter_reader, weight_reader = (
        resolve(f"megajax.interop.loading:{kind}_reader") for kind in ("adapter", "weight")
    )
    read_adapter = adapter_reader(loaded, name, reading) if config.inference.adapters else None
    read_weights = weight_reader(loaded, reading) if config.server.control else None
    # The engine may release its weights.
    loaded = loaded.without_weights()
    return serving.run(
        engine,
        engine.device,
        loaded.tokenizer,
        loaded.conversation,
        name=config.server.name or (reading.adapter or folder).resolve().name,
        where=loaded.where,
        sampling=folder_sampling(hf if config.server.generation_config else None),
        warm_up=config.inference.warm_up,
        image_fit=config.inference.image_fit,
        pooling=folder_pooling(hf),
        adapters=adapters,
        read_adapter=read_adapter,
        read_weights=read_weights,
        stop_asked=processes.stop_asked.is_set,
    )


def base(flags: Mapping[str, Any]) -> Source:
    """The settings of the model. Raises ConfigError if the flags name no model, or two."""
    name, reading = origin_of(flags)
    return generation_config(name, ServingConfig, reading)


if __name__ == "__main__":
    front_door(main)
