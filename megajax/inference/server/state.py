"""Whether the server answers requests, and what its engines do."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

from megajax.inference.server.calls import Worker
from megajax.inference.server.metrics import gauge

type Status = Literal["ok", "draining", "stalled", "failed"]


class WatchedWorker(Worker, Protocol):
    """An engine's thread: `megajax.inference.worker.Worker`."""

    failure: BaseException | None
    """The error by which it has ended. It does not start again."""

    def healthy(self) -> bool:
        """Whether its loop advances, and the last step gave finite numbers."""
        ...

    def statistics(self) -> Any:
        """Counts: `megajax.inference.engine.Statistics`."""
        ...

    def close(self) -> None:
        """Ends what runs and waits, as cancelled, and then the thread."""
        ...


TEXTS: Mapping[str, str] = {
    "running": "Answers that are being generated.",
    "waiting": "Answers that wait for a row or for blocks.",
    "requests": "Requests of the engine that are not finished; each prompt is one.",
    "blocks_used": "Blocks of the cache in use.",
    "blocks": "Blocks of the cache.",
    "last_step_seconds": "Duration of the last step.",
    "steps_total": "Steps of the device.",
    "tokens_total": "Tokens of answers.",
    "prompt_tokens_total": "Tokens of prompts that were computed.",
    "shared_tokens_total": "Tokens of prompts that were in the cache already.",
    "preemptions_total": "Rows that gave up their blocks and were computed again.",
    "errors_total": "Requests that ended by a fault of their own.",
    "scheduler_seconds_total": "Time of the host: scheduling, text and delivery.",
    "device_seconds_total": "Time of the device.",
}
"""Of the fields of the engine's Statistics. Those that end in _total only grow."""


class Readiness:
    """What /health says."""

    def __init__(self, workers: Mapping[str, WatchedWorker]):
        """workers: by the name of the first model of each."""
        self._workers = workers
        self.draining = False
        self.active = 0
        """Requests that are being answered, but those that only read."""

    def status(self) -> Status:
        """The worst of all engines."""
        if self.failed():
            return "failed"
        if self.draining:
            return "draining"
        return "ok" if all(worker.healthy() for worker in self._workers.values()) else "stalled"

    def failed(self) -> bool:
        """Whether an engine has ended by an error."""
        return any(worker.failure is not None for worker in self._workers.values())

    def close(self) -> None:
        """Ends all engines."""
        for worker in self._workers.values():
            worker.close()

    def lines(self) -> Iterator[str]:
        """Statistics of the engines in the text format of Prometheus."""
        statistics = {name: worker.statistics() for name, worker in self._workers.items()}
        for name, text in TEXTS.items():
            values = {model: getattr(each, name) for model, each in statistics.items()}
            yield from gauge(name, text, values)
