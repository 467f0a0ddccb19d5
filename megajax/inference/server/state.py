"""State of the server and its engine."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Literal

from megajax.command_line.help import field_texts
from megajax.inference.engine import Statistics
from megajax.inference.server.metrics import gauge
from megajax.inference.worker import Worker

type Status = Literal["ok", "draining", "stalled", "failed"]


class Readiness:
    """The state reported by /health."""

    def __init__(self, name: str, worker: Worker):
        """name: name of the model."""
        self._name, self._worker, self._texts = name, worker, field_texts(Statistics)
        self.draining = False
        self.active = 0
        """Number of requests being answered, without GET and HEAD."""

    def status(self) -> Status:
        if self.failed():
            return "failed"
        if self.draining:
            return "draining"
        return "ok" if self._worker.healthy() else "stalled"

    def failed(self) -> bool:
        """Whether the engine has failed."""
        return self._worker.failure is not None

    def close(self) -> None:
        """Stop the engine."""
        self._worker.close()

    def lines(self) -> Iterator[str]:
        """Statistics of the engine in Prometheus's text format."""
        for name, value in asdict(self._worker.statistics()).items():
            yield from gauge(name, self._texts[name], value, model=self._name)
