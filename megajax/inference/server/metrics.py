"""The server's state, and its counts and times in Prometheus's text format."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Literal

from megajax.command_line.help import field_texts
from megajax.inference.engine import Statistics
from megajax.inference.worker import Worker

type Status = Literal["ok", "draining", "stalled", "failed"]

PREFIX = "megajax_"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the histograms of request times."""
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds of the histogram of times between tokens."""


class Counter:
    """A sum for each set of labels. Not thread-safe, like the histograms."""

    def __init__(self, name: str, text: str):
        self.name, self.text = name, text
        self._sums: dict[tuple[tuple[str, str], ...], float] = {}

    def add(self, value: float, **labels: str) -> None:
        key = tuple(labels.items())
        self._sums[key] = self._sums.get(key, 0) + value

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.text, "counter")
        for labels, value in sorted(self._sums.items()):
            yield f"{PREFIX}{self.name}{_labels(labels)} {_number(value)}"


class Histogram:
    """Counts of values by upper bound."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]):
        self.name, self.text, self._bounds = name, text, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.text, "histogram")
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            bound_text = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'{PREFIX}{self.name}_bucket{{le="{bound_text}"}} {total}'
        yield f"{PREFIX}{self.name}_sum {self._sum!r}"
        yield f"{PREFIX}{self.name}_count {total}"


class ServerMetrics:
    """Metrics of the server; those of the engine are `Statistics`."""

    def __init__(self) -> None:
        self.requests = Counter("requests_total", "HTTP requests by route and status.")
        self.answers = Counter("answers_total", "Answers by the reason for which they ended.")
        self.first_token_seconds = Histogram("time_to_first_token_seconds", "From request to first token.", SECONDS)
        self.token_seconds = Histogram("time_per_token_seconds", "Between two tokens of an answer.", TOKEN_SECONDS)
        self.seconds = Histogram("request_seconds", "From request to last token.", SECONDS)

    def lines(self) -> Iterator[str]:
        for metric in (self.requests, self.answers, self.first_token_seconds, self.token_seconds, self.seconds):
            yield from metric.lines()


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


def gauge(name: str, text: str, value: float, **labels: str) -> Iterator[str]:
    """Lines of a gauge, or of a counter if its name ends in _total."""
    yield from _head(name, text, "counter" if name.endswith("_total") else "gauge")
    yield f"{PREFIX}{name}{_labels(labels.items())} {_number(value)}"


def _head(name: str, text: str, kind: str) -> tuple[str, str]:
    return f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}"


def _labels(labels: Iterable[tuple[str, str]]) -> str:
    escaped = {name: value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for name, value in labels}
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}" if escaped else ""


def _number(value: float) -> str:
    """All digits: %g has six, too few for a count."""
    return str(value) if isinstance(value, int) else repr(float(value))
