"""Whether the server answers requests, and what its engine does."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Literal

from megajax.config.help import field_texts
from megajax.inference.engine import Statistics
from megajax.inference.server.metrics import gauge
from megajax.inference.worker import Worker

type Status = Literal["ok", "draining", "stalled", "failed"]


class Readiness:
    """What /health says."""

    def __init__(self, name: str, worker: Worker):
        """name: of the model."""
        self._name, self._worker, self._texts = name, worker, field_texts(Statistics)
        self.draining = False
        self.active = 0
        """Requests that are being answered, but those that only read."""

    def status(self) -> Status:
        if self.failed():
            return "failed"
        if self.draining:
            return "draining"
        return "ok" if self._worker.healthy() else "stalled"

    def failed(self) -> bool:
        """Whether the engine has ended by an error."""
        return self._worker.failure is not None

    def close(self) -> None:
        """Ends the engine."""
        self._worker.close()

    def lines(self) -> Iterator[str]:
        """Statistics of the engine in the text format of Prometheus."""
        for name, value in asdict(self._worker.statistics()).items():
            yield from gauge(name, self._texts[name], value, model=self._name)
