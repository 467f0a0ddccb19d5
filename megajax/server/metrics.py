"""The server's state, and its counts and times for Prometheus."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from megajax.command_line.help import field_texts
from megajax.inference.statistics import Statistics
from megajax.inference.worker import Worker
from megajax.server.body import SHUTTING_DOWN

type Status = Literal["ok", "starting", "draining", "stalled", "failed"]

PREFIX, VLLM = "megajax_", "vllm:"
"""Of names: ours, and those by which dashboards for vLLM find the same values."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the histograms of request times."""
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds of the histogram of times between tokens."""
TIMES: Mapping[str, tuple[str, str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("time_to_first_token_seconds", "From request to first token.", SECONDS),
    "time_per_token_seconds": ("inter_token_latency_seconds", "Between two tokens of an answer.", TOKEN_SECONDS),
    "request_seconds": ("e2e_request_latency_seconds", "From request to last token.", SECONDS),
    "queue_seconds": ("request_queue_time_seconds", "From request to the first step of an answer.", SECONDS),
    "prefill_seconds": (
        "request_prefill_time_seconds",
        "From the first step of an answer to its first token.",
        SECONDS,
    ),
    "decode_seconds": ("request_decode_time_seconds", "From the first token of an answer to its last.", SECONDS),
}
"""Name after `megajax_` -> name after `vllm:`, what it measures, and the bounds of its histogram."""
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


class Histogram:
    """Counts of values by upper bound."""

    def __init__(self, bounds: Sequence[float]):
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str, **labels: str) -> Metric:
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        family = HistogramMetricFamily(name, text, labels=[*labels])
        family.add_metric([*labels.values()], [*zip(bounds, accumulate(self._counts), strict=True)], self._sum)
        return family


class ServerMetrics:
    """Metrics of the server, as a collector of prometheus_client; those of the engine are `Statistics`.

    Not thread-safe: requests are counted and metrics are read on the event loop's thread.
    """

    def __init__(self, model: str) -> None:
        """model: its name, for labels of vLLM's names."""
        self._model = model
        self.requests: Counter[tuple[str, ...]] = Counter()
        """HTTP requests by route and status."""
        self.answers: Counter[tuple[str, ...]] = Counter()
        """Answers by the reason for which they ended."""
        self._times = {name: Histogram(bounds) for name, (_, _, bounds) in TIMES.items()}

    def observe(self, name: str, seconds: float) -> None:
        """Count a time. name: in `TIMES`."""
        self._times[name].observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        yield counts(f"{PREFIX}requests_total", "HTTP requests by route and status.", self.requests, "route", "code")
        text, successes = "Answers by the reason for which they ended.", Counter[tuple[str, ...]]()
        for (finish,), number in self.answers.items():
            successes[self._model, VLLM_FINISHES.get(finish, finish)] += number
        yield counts(f"{PREFIX}answers_total", text, self.answers, "finish")
        yield counts(f"{VLLM}request_success_total", text, successes, "model_name", "finished_reason")
        for name, (vllm, text, _) in TIMES.items():
            yield self._times[name].family(PREFIX + name, text)
            yield self._times[name].family(VLLM + vllm, text, model_name=self._model)


class Readiness:
    """The state reported by /health, and the statistics of the engine."""

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

    def collect(self) -> Iterator[Metric]:
        """Statistics of the engine, as a collector of prometheus_client."""
        statistics = self._worker.statistics()
        for name, value in asdict(statistics).items():
            if not isinstance(value, tuple):
                yield counts(PREFIX + name, self._texts[name], {(self._name,): value}, "model")
        accepted, text = statistics.accepted_at_total, self._texts["accepted_at_total"]
        by_position = Counter[tuple[str, ...]]({(self._name, str(at)): count for at, count in enumerate(accepted)})
        for name, label in ((f"{PREFIX}accepted_at_total", "model"), (f"{VLLM}{PER_POSITION}", "model_name")):
            if by_position:
                yield counts(name, text, by_position, label, "position")
        for name, (text, value_of) in VLLM_STATISTICS.items():
            yield counts(VLLM + name, text, {(self._name,): value_of(statistics)}, "model_name")


def counts(name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
    """A gauge, or a counter if its name ends in _total. values: by the values of the labels."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
