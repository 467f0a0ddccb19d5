"""The server process: start, banner, sockets with limits, signals and shutdown."""

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from megajax.config.compose import problems_of
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.display.banner import Section, plain
from megajax.display.text import count
from megajax.inference.config import ImageFit
from megajax.inference.device import ModelDevice
from megajax.inference.encoder import EncoderDevice, EncoderPrograms
from megajax.inference.engine import Engine
from megajax.inference.images import ImageReader
from megajax.inference.programs import Programs
from megajax.inference.request import Pooling
from megajax.inference.sampling_settings import Sampling
from megajax.inference.worker import Worker
from megajax.server.application import Gate, build_application
from megajax.server.body import RequestError, large_head
from megajax.server.config import Access, ServerConfig
from megajax.server.metrics import Readiness
from megajax.server.model_list import ModelList
from megajax.server.models import ServedModel
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.conversation import Conversation

CLOSING_SECONDS = 5
"""Time limit for sending the last bytes of responses."""

UNSENT = 128 * 1024
"""Size of the kernel's send buffer for a client that does not read; Linux doubles it."""


class ReadyServer:
    """A server that is ready to run.

    The constructor binds the address, before a model is loaded, so that an address in use is an immediate error.
    """

    def __init__(self, config: ServerConfig, access: Access):
        """Raises UserError for an address that is not available or not safe, and for an invalid file of keys."""
        if problems := problems_of(access):
            raise ConfigError(problems, "command line")
        if not access.keys() and config.cache_per_key:
            raise ConfigError([Problem("server.cache_per_key", "needs keys", "give --api-key-file")], "command line")
        self._config, self._access, self._socket = config, access, listening_socket(access)

    def run(
        self,
        engine: Engine,
        device: ModelDevice | EncoderDevice,
        tokenizer: Tokenizer,
        conversation: Conversation | None,
        *,
        name: str,
        where: str,
        sampling: Sampling,
        warm_up: bool,
        image_fit: ImageFit,
        pooling: Pooling | None,
        adapters: Mapping[str, Path],
        read_adapter: Callable[[Path], Any] | None,
        stop_asked: Callable[[], bool],
        read_weights: Callable[[Path], Callable[[], Any]] | None,
    ) -> int:
        """Run until the server ends -> exit code.

        device: device of the engine. name: name of the model in requests; where: path of the weights; sampling:
        settings that requests do not name; warm_up: whether to compile all steps before the first request, while
        /health answers "starting"; image_fit: as in `InferenceConfig`; pooling: of the model's folder; adapters:
        folders by name, loaded first; read_adapter, read_weights: as in `ModelList`; stop_asked: whether another
        process was asked to stop, which has the effect of a signal.
        """
        prepare = _compile(device.programs) if warm_up else ()
        worker = Worker(engine, patience=self._config.stall_seconds, prepare=prepare)
        model = ServedModel(
            name=name,
            worker=worker,
            tokenizer=tokenizer,
            conversation=conversation,
            length=engine.admission.length,
            sampling=sampling,
            images=None if device.images is None else ImageReader(device.images, image_fit, self._config.image_pixels),
            pooling=self._config.pooling or pooling or ("last" if device.generates else "mean"),
        )
        readiness = Readiness(name, worker)
        models = ModelList(model, read_adapter, read_weights)
        for adapter, folder in adapters.items():
            engine.load_adapter(adapter, models.read(adapter, folder))
            models.add(adapter)
        app = build_application(models, self._config, self._access, readiness, _log)
        server = Server(app, self._config, readiness, _log, stop_asked)
        _log(plain("megajax serve", [*_banner(device.programs, model, where, warm_up), self._section(sampling)]))
        worker.start()
        server.run([self._socket])
        worker.close()
        if isinstance(worker.failure, UserError):
            raise worker.failure
        return server.exit_code

    def _section(self, sampling: Sampling) -> Section:
        keys = len(self._access.keys())
        needed = f"one of {keys} keys, on all routes but /health" if keys else "no key required"
        logged = "with prompts and answers" if self._access.log_prompts else "without prompts"
        rows = [("address", address(self._socket)), ("access", needed), ("log", f"a line for each request, {logged}")]
        rows += [("queue", f"{self._config.queue} requests"), ("sampling", described(sampling))]
        return ("server", rows)


def described(sampling: Sampling) -> str:
    """The settings of a model's generation_config.json, for the banner."""
    usual = asdict(Sampling())
    values = [f"{name} {value:g}" for name, value in asdict(sampling).items() if value != usual[name]]
    return f"{', '.join(values)} by generation_config.json" if values else "OpenAI's defaults"


def _compile(programs: Programs | EncoderPrograms) -> Iterator[None]:
    """Compiles a program at each step."""
    began = time.monotonic()
    for number, name in enumerate(programs.compile(), 1):
        _log(f"compiled {number} of {programs.count} programs: {name}")
        yield
    _log(f"compiled all programs in {time.monotonic() - began:.1f} s")


def _banner(programs: Programs | EncoderPrograms, model: ServedModel, where: str, compiled: bool) -> list[Section]:
    loaded = programs.loaded
    dtypes = ", ".join(sorted({array.dtype.name for array in jax.tree.leaves(loaded.weights)}))
    mesh = [f"{axis} {devices}" for axis, devices in loaded.mesh.shape.items() if devices > 1]
    devices = loaded.mesh.devices.size
    when = f"{programs.count} programs, compiled before the first request" if compiled else "compiled when first needed"
    if isinstance(programs, Programs):
        rows = _engine_rows(programs, model, when)
    else:
        shapes = f"{', '.join(map(str, programs.counts))} texts of {', '.join(map(str, programs.lengths))} tokens"
        rows = [("steps", f"{shapes}; {when}"), ("embeddings", f"{model.pooling}, of at most {model.length:,} tokens")]
    return [
        ("model", [("name", model.name), ("parameters", f"{count(loaded.parameter_count())} in {dtypes}, of {where}")]),
        (
            "engine",
            [
                ("devices", f"{devices} {loaded.mesh.devices.flat[0].device_kind}: {', '.join(mesh) or 'no mesh'}"),
                *rows,
            ],
        ),
    ]


def _engine_rows(programs: Programs, model: ServedModel, when: str) -> list[tuple[str, str]]:
    """Lines about steps and cache. when: when they are compiled."""
    size, slots = programs.size, programs.loaded.adapters
    names = ", ".join(model.worker.engine.adapters.names()) or "none"
    pool = f"{size.tokens():,} tokens, {size.blocks:,} blocks of {size.block}, on each of {programs.replicas} replicas"
    return [
        ("kernel", f"{programs.kernel}{', equal to training' if programs.kernel == 'fixed' else ''}"),
        ("steps", f"{', '.join(map(str, programs.buckets))}; {when}"),
        ("cache", pool),
        ("drafts", _drafts(programs)),
        ("request", f"at most {model.length:,} tokens, prompt and answer"),
        *([] if slots is None else [("adapters", f"{names}; {slots.count} slots of rank {slots.rank}")]),
    ]


def _drafts(programs: Programs) -> str:
    """Which drafts steps verify."""
    if programs.heads is None:
        return f"up to {programs.drafts} tokens of earlier text in a step" if programs.drafts else "none"
    heads = f"{programs.heads.count} of the model's heads of multi-token prediction"
    return f"{programs.drafts} tokens in a step, by {heads}"


def _log(line: str) -> None:
    print(line, flush=True)


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, or until the engine ends.

    After the first signal, /health and new requests get status 503, and the server ends when the running requests have
    ended. At the second signal, the process exits immediately. `exit_code` is 0 after a signal, else 1.
    """

    def __init__(
        self,
        app: Gate,
        config: ServerConfig,
        readiness: Readiness,
        log: Callable[[str], None],
        stop_asked: Callable[[], bool] = lambda: False,
    ):
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=bounded_protocol(config),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                h11_max_incomplete_event_size=config.header_bytes,
                timeout_keep_alive=max(1, round(config.header_seconds)),
                timeout_graceful_shutdown=CLOSING_SECONDS,
            )
        )
        self._limits, self._readiness, self._log, self._stop_asked = config, readiness, log, stop_asked
        self._deadline = float("inf")
        self.exit_code = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to shut down. uvicorn's handler would raise the signal again at the end and kill the process."""
        del frame
        if self._readiness.draining:
            os._exit(128 + sig)
        self._drain()

    def _drain(self) -> None:
        self._readiness.draining = True
        self._deadline = time.monotonic() + self._limits.drain_seconds

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if not self._readiness.draining and self._stop_asked():
            self._drain()
        if self._readiness.failed() and self._deadline == float("inf"):
            self._log("the engine has failed: the server ends")
            self.exit_code, self._deadline = 1, time.monotonic() + CLOSING_SECONDS
        deadline_passed = time.monotonic() > self._deadline
        if deadline_passed and self._readiness.active:
            self._log(f"{self._readiness.active} requests are cancelled")
            await asyncio.to_thread(self._readiness.close)
        if self._deadline < float("inf") and (deadline_passed or not self._readiness.active):
            self.should_exit = True
        return await super().on_tick(counter)


def listening_socket(access: Access) -> socket.socket:
    """A socket bound to the address. Raises UserError if the address is not available."""
    family = socket.AF_INET6 if ":" in access.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((access.host, access.port))
    except OSError as error:
        listener.close()
        flags = f"--host={access.host} --port={access.port}"
        raise UserError(
            f"{flags}: cannot listen on this address: {error.strerror or error}. Choose another port."
        ) from error
    return listener


def address(bound: socket.socket) -> str:
    """URL of a server on this socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class BoundedProtocol(H11Protocol):
    """A connection with time limits for receiving requests and sending responses, among a limited number.

    uvicorn limits only the time between two requests: a connection that sends nothing, sends headers byte by byte, or
    reads nothing would stay open.
    """

    limits: ServerConfig
    _timer: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A small buffer, so that a slow reader is detected before the kernel has buffered megabytes.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT)
        if len(self.connections) > self.limits.connections:
            self._end(RequestError(503, f"all {self.limits.connections} connections are in use"))
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)
        if self._writing is not None:
            self._writing.cancel()

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        # Drops unsent data and closes the connection, which cancels the request.
        self._writing = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    def send_400_response(self, msg: str) -> None:
        most = self.limits.header_bytes
        self._end(large_head(most) if len(self.conn.trailing_data[0]) > most else RequestError(400, msg))

    def _watch(self) -> None:
        """Start the time limit for the next request's headers, unless it runs or a request is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.limits.header_seconds, self._header_timeout)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _header_timeout(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            if self.conn.trailing_data[0]:  # Incomplete headers.
                message = f"the headers must arrive within {self.limits.header_seconds:g} seconds"
                self._end(RequestError(408, message))
            else:
                self.transport.close()

    def _end(self, error: RequestError) -> None:
        """Answer with an error, without the application, and close the connection."""
        body = json.dumps(error.body()).encode()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
        more = "".join(f"{name}: {value}\r\n" for name, value in error.headers().items())
        self.transport.write(f"{head}{more}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


def bounded_protocol(limits: ServerConfig) -> type[BoundedProtocol]:
    """A protocol class with these limits; uvicorn creates an instance for each connection."""
    return type("Connection", (BoundedProtocol,), {"limits": limits})
