"""The server's state, and its counts and times in Prometheus's text format."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Literal

from megajax.command_line.help import field_texts
from megajax.inference.server.body import SHUTTING_DOWN
from megajax.inference.statistics import Statistics
from megajax.inference.worker import Worker

type Status = Literal["ok", "starting", "draining", "stalled", "failed"]

PREFIX, VLLM = "megajax_", "vllm:"
"""Of names: ours, and those by which dashboards for vLLM find the same values."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the histograms of request times."""
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds of the histogram of times between tokens."""


VLLM_STATISTICS: Mapping[str, tuple[str, Callable[[Statistics], float]]] = {
    "num_requests_running": ("Answers that are generated.", lambda counts: counts.running),
    "num_requests_waiting": ("Answers that wait.", lambda counts: counts.waiting),
    "kv_cache_usage_perc": ("Share of the cache's blocks in use, 0 to 1.", lambda counts: counts.used_share()),
    "prompt_tokens_total": (
        "Tokens of prompts, computed or in the cache.",
        lambda counts: counts.prompt_tokens_total + counts.shared_tokens_total,
    ),
    "generation_tokens_total": ("Tokens of answers.", lambda counts: counts.tokens_total),
    "num_preemptions_total": ("Rows that are computed again.", lambda counts: counts.preemptions_total),
    "prefix_cache_queries_total": (
        "Tokens of prompts that were looked up in the cache.",
        lambda counts: counts.prompt_tokens_total + counts.shared_tokens_total,
    ),
    "spec_decode_num_draft_tokens_total": (
        "Tokens of drafts that steps verified.",
        lambda counts: counts.drafted_tokens_total,
    ),
    "spec_decode_num_accepted_tokens_total": (
        "Tokens of drafts that became tokens of answers.",
        lambda counts: counts.accepted_tokens_total,
    ),
    "spec_decode_num_drafts_total": ("Drafts that steps verified.", lambda counts: counts.drafts_total),
    "prefix_cache_hits_total": ("Tokens of prompts found in the cache.", lambda counts: counts.shared_tokens_total),
}
"""Name after `vllm:` -> what it counts, and its value."""
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
"""vLLM's name of the accepted tokens by their position."""
VLLM_FINISHES: Mapping[str, str] = {"cancelled": "abort"}
"""Reason for which an answer ended -> vLLM's name, where it is another."""


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
            yield f"{self.name}{_labels(labels)} {_number(value)}"


class Histogram:
    """Counts of values by upper bound."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]):
        self.name, self._text, self._bounds = name, text, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str = "", **labels: str) -> Iterator[str]:
        """name: another name than its own."""
        name, total = name or self.name, 0
        yield from _head(name, self._text, "histogram")
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            bound_text = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f"{name}_bucket{_labels([*labels.items(), ('le', bound_text)])} {total}"
        yield f"{name}_sum{_labels(labels.items())} {self._sum!r}"
        yield f"{name}_count{_labels(labels.items())} {total}"


class ServerMetrics:
    """Metrics of the server; those of the engine are `Statistics`."""

    def __init__(self, model: str) -> None:
        """model: its name, for labels of vLLM's names."""
        self._model = model
        self.requests = Counter(f"{PREFIX}requests_total", "HTTP requests by route and status.")
        self.answers = Counter(f"{PREFIX}answers_total", "Answers by the reason for which they ended.")
        self.successes = Counter(f"{VLLM}request_success_total", "Answers by the reason for which they ended.")
        self.first_token_seconds = _times("time_to_first_token_seconds", "From request to first token.")
        self.token_seconds = _times("time_per_token_seconds", "Between two tokens of an answer.", TOKEN_SECONDS)
        self.seconds = _times("request_seconds", "From request to last token.")
        self.queue_seconds = _times("queue_seconds", "From request to the first step of an answer.")
        self.prefill_seconds = _times("prefill_seconds", "From the first step of an answer to its first token.")
        self.decode_seconds = _times("decode_seconds", "From the first token of an answer to its last.")

    def end(self, finish: str) -> None:
        """Count the end of an answer."""
        self.answers.add(1, finish=finish)
        self.successes.add(1, model_name=self._model, finished_reason=VLLM_FINISHES.get(finish, finish))

    def lines(self) -> Iterator[str]:
        times = {
            "time_to_first_token_seconds": self.first_token_seconds,
            "inter_token_latency_seconds": self.token_seconds,
            "e2e_request_latency_seconds": self.seconds,
            "request_queue_time_seconds": self.queue_seconds,
            "request_prefill_time_seconds": self.prefill_seconds,
            "request_decode_time_seconds": self.decode_seconds,
        }
        for metric in (self.requests, self.answers, self.successes, *times.values()):
            yield from metric.lines()
        for name, histogram in times.items():
            yield from histogram.lines(VLLM + name, model_name=self._model)


def _times(name: str, text: str, bounds: Sequence[float] = SECONDS) -> Histogram:
    return Histogram(PREFIX + name, text, bounds)


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
        if not self._worker.ready:
            return "starting"
        return "ok" if self._worker.healthy() else "stalled"

    def refusal(self) -> str | None:
        """Why no request is accepted now; None if requests are."""
        starting = "the server is starting: it compiles its programs"
        reasons: dict[Status, str] = {"failed": SHUTTING_DOWN, "draining": SHUTTING_DOWN, "starting": starting}
        return reasons.get(self.status())

    def failed(self) -> bool:
        """Whether the engine has failed."""
        return self._worker.failure is not None

    def close(self) -> None:
        """Stop the engine."""
        self._worker.close()

    def lines(self) -> Iterator[str]:
        """Statistics of the engine in Prometheus's text format."""
        statistics = self._worker.statistics()
        for name, value in asdict(statistics).items():
            if not isinstance(value, tuple):
                yield from gauge(PREFIX + name, self._texts[name], value, model=self._name)
        accepted, text = statistics.accepted_at_total, self._texts["accepted_at_total"]
        for name, label in ((f"{PREFIX}accepted_at_total", "model"), (f"{VLLM}{PER_POSITION}", "model_name")):
            counter = Counter(name, text)
            for position, value in enumerate(accepted):
                counter.add(value, **{label: self._name}, position=str(position))
            yield from counter.lines() if accepted else ()
        for name, (text, value_of) in VLLM_STATISTICS.items():
            yield from gauge(VLLM + name, text, value_of(statistics), model_name=self._name)


def gauge(name: str, text: str, value: float, **labels: str) -> Iterator[str]:
    """Lines of a gauge, or of a counter if its name ends in _total."""
    yield from _head(name, text, "counter" if name.endswith("_total") else "gauge")
    yield f"{name}{_labels(labels.items())} {_number(value)}"


def _head(name: str, text: str, kind: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _labels(labels: Iterable[tuple[str, str]]) -> str:
    escaped = {name: value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for name, value in labels}
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}" if escaped else ""


def _number(value: float) -> str:
    """All digits: %g has six, too few for a count."""
    return str(value) if isinstance(value, int) else repr(float(value))
