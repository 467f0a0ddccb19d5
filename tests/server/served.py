"""A server in this process: its event loop runs on its own thread, its engine runs on a device without a model."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from echo_device import EchoDevice, EchoWeights
from waiting import wait_until

from megajax.config.errors import UserError
from megajax.inference.admission import AdapterTable, AnswerRules
from megajax.inference.engine import Engine
from megajax.inference.images import ImageReader
from megajax.inference.sampling_settings import Sampling
from megajax.inference.worker import Worker
from megajax.server.application import build_application
from megajax.server.config import Access, ServerConfig
from megajax.server.metrics import Readiness
from megajax.server.model_list import ModelList
from megajax.server.models import ServedModel
from megajax.server.server import Server, address, listening_socket
from megajax.tokenizers.chat_template import ChatTemplate
from megajax.tokenizers.config import ByteTokenizerConfig
from megajax.tokenizers.conversation import Conversation


@dataclass
class Running:
    """A running server."""

    server: Server
    worker: Worker
    device: EchoDevice
    readiness: Readiness
    log: list[str]
    thread: threading.Thread
    url: str
    client: httpx2.Client

    def ask(self, path: str, body: Any = None, method: str = "POST", **more: Any) -> httpx2.Response:
        content = {} if body is None else {"content": body} if isinstance(body, bytes) else {"json": body}
        headers = {"content-type": "application/json"} | more.pop("headers", {})
        return self.client.request(method, self.url + path, headers=headers, **content, **more)

    def complete(self, **body: Any) -> httpx2.Response:
        return self.ask("/v1/completions", body)

    def refuses(self, path: str, body: Any, param: str | None, words: str = "", method: str = "POST") -> str:
        """Assert that the answer has status 400 and an error about this field with these words -> its message."""
        answer = self.ask(path, body, method)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), answer.text
        assert words in error["message"]
        return error["message"]

    def metrics(self) -> tuple[list[str], dict[str, float]]:
        """The lines of /metrics, and name with its labels -> value."""
        lines = self.ask("/metrics", method="GET").text.splitlines()
        return lines, {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def blocks_used(self) -> int:
        return self.worker.statistics().blocks_used

    def posts(self) -> list[str]:
        """Lines of the log, one for each POST request that has ended."""
        return [line for line in self.log if " POST " in line]

    def all_free(self, seconds: float = 5) -> bool:
        """Whether no request runs and all blocks are free within some time."""
        return wait_until(lambda: not (self.readiness.active or self._requests() or self.blocks_used()), seconds)

    def _requests(self) -> int:
        return self.worker.statistics().requests


def pieces(answer: httpx2.Response) -> list[Any]:
    """The answer itself, or the events of its stream without the last one, [DONE]."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [answer.json()]
    return [json.loads(event.removeprefix("data: ")) for event in answer.text.strip().split("\n\n")[:-1]]


def _guide(guide: Any) -> Future[None]:
    """No text is guided here, but one guide is invalid."""
    if guide == "((":
        raise UserError("regular expression: unclosed group")
    future = Future[None]()
    future.set_result(None)
    return future


def start(
    config: ServerConfig,
    device: EchoDevice | None = None,
    template: str | None = "plain",
    access: Access | None = None,
    sampling: Sampling | None = None,
    slots: int = 0,
    read_adapter: Callable[[Path], Any] | None = None,
    read_weights: Callable[[Path], Any] | None = None,
    prepare: Iterable[object] = (),
    guide: Callable[[Any], Future[Any]] | None = None,
) -> Running:
    device, tokenizer = device or EchoDevice(), ByteTokenizerConfig().build()
    rules = AnswerRules(tokenizer=tokenizer, guide=guide or _guide, answer_start=(0,) * (device.memory > 0))
    engine = Engine(device, rules, queue=config.queue, adapters=AdapterTable(slots), weights=EchoWeights(device))
    worker = Worker(engine, patience=config.stall_seconds, prepare=prepare)
    worker.start()
    conversation = Conversation(ChatTemplate(template), tokenizer) if template else None
    model = ServedModel(
        name="tiny",
        worker=worker,
        tokenizer=tokenizer,
        conversation=conversation,
        length=engine.admission.length,
        sampling=sampling or Sampling(),
        images=None if device.images is None else ImageReader(device.images, "crop", config.image_pixels),
        pooling=config.pooling or "last",
    )
    readiness, log = Readiness("tiny", worker), list[str]()
    models = ModelList(model, read_adapter, read_weights)
    server = Server(
        build_application(models, config, access or Access(), readiness, log.append), config, readiness, log.append
    )
    bound = listening_socket(Access(port=0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])), daemon=True)
    thread.start()
    assert wait_until(lambda: server.started or not thread.is_alive()) and thread.is_alive(), log
    # A connection that was idle for long may be closed by the server while it is used again.
    limits = httpx2.Limits(max_keepalive_connections=0)
    client = httpx2.Client(timeout=100, verify=False, limits=limits)
    return Running(server, worker, device, readiness, log, thread, address(bound), client)


@contextmanager
def serving(*settings: Any, **more: Any) -> Iterator[Running]:
    """A server with the settings of `start`, which ends with the block."""
    running = start(*settings, **more)
    try:
        yield running
    finally:
        running.client.close()
        running.server.should_exit = True
        running.thread.join(100)
        running.worker.close()
        assert not running.thread.is_alive()


def main() -> int:
    """A server in the main thread of its own process, as with `serve`. Returns its exit code."""
    engine = Engine(EchoDevice(seconds=0.003), AnswerRules(tokenizer=ByteTokenizerConfig().build()))
    worker = Worker(engine)
    model = ServedModel(
        name="tiny",
        worker=worker,
        tokenizer=ByteTokenizerConfig().build(),
        conversation=None,
        length=engine.admission.length,
    )
    config, readiness = ServerConfig(drain_seconds=20), Readiness("tiny", worker)
    bound = listening_socket(Access(port=0))
    server = Server(build_application(ModelList(model), config, Access(), readiness, print), config, readiness, print)
    worker.start()
    bound.listen()
    print(address(bound), flush=True)
    server.run([bound])
    worker.close()
    return server.exit_code


if __name__ == "__main__":
    sys.exit(main())
