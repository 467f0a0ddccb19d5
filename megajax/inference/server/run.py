"""Run the server of a model until a signal stops it."""

import time
from collections.abc import Iterator
from math import prod

from megajax.config.errors import ConfigError
from megajax.display.banner import Section, plain
from megajax.display.text import count
from megajax.inference.device import ModelDevice
from megajax.inference.engine import Engine
from megajax.inference.programs import LoadedModel, Programs
from megajax.inference.server.application import build_application
from megajax.inference.server.config import Access, ServerConfig
from megajax.inference.server.models import ServedModel
from megajax.inference.server.server import Server, address, listening_socket
from megajax.inference.server.state import Readiness
from megajax.inference.worker import Worker
from megajax.models.facts import facts_of
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.conversation import Conversation


class Serving:
    """A server that is ready to run.

    The constructor binds the address, before a model is loaded, so that an address in use is an immediate error.
    """

    def __init__(self, config: ServerConfig, access: Access):
        """Raises UserError for an address that is not available or not safe, and for an invalid file of keys."""
        if problems := access.problems():
            raise ConfigError(problems, "command line")
        access.keys()
        self._config, self._access, self._socket = config, access, listening_socket(access)

    def run(
        self,
        engine: Engine,
        device: ModelDevice,
        tokenizer: Tokenizer,
        conversation: Conversation | None,
        *,
        name: str,
        where: str,
        warm_up: bool,
    ) -> int:
        """Run until the server ends -> exit code.

        device: device of the engine. name: name of the model in requests; where: path of the weights; warm_up: whether
        to compile all steps before the first request.
        """
        compiled = list(_compiled(device.programs)) if warm_up else []
        worker = Worker(engine, patience=self._config.stall_seconds)
        model = ServedModel(
            name=name, worker=worker, tokenizer=tokenizer, conversation=conversation, length=engine.length
        )
        readiness = Readiness(name, worker)
        app = build_application(model, self._config, self._access, readiness, _log)
        server = Server(app, self._config, readiness, _log)
        _log(plain("megajax serve", [*_banner(device.programs, model, where, compiled), self._section()]))
        worker.start()
        server.run([self._socket])
        worker.close()
        return server.exit_code

    def _section(self) -> Section:
        keys = len(self._access.keys())
        needed = f"one of {keys} keys, on all routes except /health" if keys else "no key required"
        logged = "with prompts and answers" if self._access.log_prompts else "without prompts"
        rows = [("address", address(self._socket)), ("access", needed), ("log", f"a line for each request, {logged}")]
        return ("server", [*rows, ("queue", f"{self._config.queue} requests")])


def _compiled(programs: Programs) -> Iterator[str]:
    began = time.monotonic()
    for number, (bucket, chooser) in enumerate(programs.compile(), 1):
        _log(f"compiled {number} of {len(programs.buckets) * len(programs.choosers)} steps: {bucket}, {chooser}")
        yield str(bucket)
    _log(f"compiled all steps in {time.monotonic() - began:.1f} s")


def _banner(programs: Programs, model: ServedModel, where: str, compiled: list[str]) -> list[Section]:
    loaded, size = programs.loaded, programs.size
    dtypes = ", ".join(sorted({array.dtype.name for array in loaded.weights.values()}))
    mesh = [f"{axis} {devices}" for axis, devices in loaded.mesh.shape.items() if devices > 1]
    devices = loaded.mesh.devices.size
    shapes = ", ".join(dict.fromkeys(compiled))
    steps = f"{len(compiled)} compiled: {shapes}" if compiled else "compiled when first needed"
    pool = f"{size.tokens():,} tokens, {size.blocks:,} blocks of {size.block}, on each of {programs.replicas} replicas"
    return [
        ("model", [("name", model.name), ("parameters", f"{count(parameter_count(loaded))} in {dtypes}, of {where}")]),
        (
            "engine",
            [
                ("devices", f"{devices} {loaded.mesh.devices.flat[0].device_kind}: {', '.join(mesh) or 'no mesh'}"),
                ("kernel", f"{programs.kernel}"),
                ("steps", steps),
                ("cache", pool),
                ("request", f"at most {model.length:,} tokens, prompt and answer"),
            ],
        ),
    ]


def parameter_count(loaded: LoadedModel) -> int:
    """Number of weights; without padding of the vocabulary if the model has facts, as in training."""
    facts = facts_of(loaded.cfg)
    stored = sum(prod(array.shape) for array in loaded.weights.values())
    return stored if facts is None else facts.parameter_count().total


def _log(line: str) -> None:
    print(line, flush=True)
