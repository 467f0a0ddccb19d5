"""Lines of metrics.jsonl: contents, writing and reading."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.mesh.layer_metrics import Measured, layer_values
from megajax.metrics.throughput import Rates
from megajax.storage.disk import open_regular

type Record = StepRecord | EvaluationRecord

LARGEST_INTEGER = 2**63 - 1


def loss_hex(loss: float) -> str:
    """The float32 value of `loss`, exactly, as a hexadecimal literal; "nan", "inf" or "-inf" if it is not finite."""
    return float(np.float32(loss)).hex()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """A training step, in plain numbers. `step` counts completed steps: the first is 1."""

    step: int
    loss: float
    """Mean over the weighted labels of the global batch, nats per token."""
    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    """Learning rate of this step."""
    consumed_samples: int
    """Samples seen by the run, including this step."""
    consumed_tokens: int
    rates: Rates
    loss_scale: float | None = None
    skipped: bool = False
    """The update was skipped because the gradients were not finite."""
    global_batch_size: int
    """Samples in this step. Printed at the terminal, not written to metrics.jsonl."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other metrics of the model (name -> mean), written after the fixed keys. Their names must differ from those."""

    measured: Mapping[str, Measured] = field(default_factory=dict)
    """Metrics of layers, by name. Each is written after `metrics`, reduced over layers, and its number per layer in
    `by_layer`; lists per layer are written to layers.jsonl."""
    detailed: bool = False
    """Whether layers.jsonl and dashboards get the metrics of each layer in this step."""

    phases: Mapping[str, float] = field(default_factory=dict)
    """Phase -> seconds before this step, written as seconds_PHASE: data_wait; evaluation and save if they ran; with
    several processes, at intervals, the extremes over processes as data_wait_min and data_wait_max."""

    save_failed: bool = False
    """The last save failed, and none has succeeded since. Written only if true."""

    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes in use after this step, if known, written as memory_NAME (see device_memory.memory_in_use)."""

    def line(self) -> dict[str, Any]:
        """The keys and values of the step's line, in order; floats may be nan or infinite."""
        fixed = {
            "step": self.step,
            "loss": self.loss,
            "loss_hex": loss_hex(self.loss),
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
            **asdict(self.rates),
            "loss_scale": self.loss_scale,
            "skipped": self.skipped,
            **({"save_failed": True} if self.save_failed else {}),
            **{f"seconds_{name}": seconds for name, seconds in self.phases.items()},
            **{f"memory_{name}": size for name, size in self.memory.items()},
        }
        scalars = {name: report for name, report in self.measured.items() if report.values.ndim == 1}
        by_layer = {"by_layer": layer_values(scalars.values())} if scalars else {}
        reduced = {name: report.overall for name, report in scalars.items()}
        if clash := (fixed.keys() | by_layer.keys()) & (self.metrics.keys() | reduced.keys()):
            raise ValueError(f"metrics {sorted(clash)} are fixed keys of metrics.jsonl; rename them")
        if clash := self.metrics.keys() & reduced.keys():
            raise ValueError(f"the model and its layers both report {sorted(clash)}; rename one")
        return {**fixed, **self.metrics, **reduced, **by_layer}

    def lists(self) -> dict[str, Any]:
        """The keys and values of the step's line of layers.jsonl; {} if no layer reports a list."""
        lists = [report for report in self.measured.values() if report.values.ndim > 1]
        return {"step": self.step, **layer_values(lists)} if lists else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord:
    """The loss on held-out data after `step` training steps."""

    step: int
    split: str
    """For example "validation" or "test"."""
    loss: float | None
    """Mean over the weighted labels, nats per token; None for a task without a loss."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other metrics of the model or the task, for example accuracy, written after the fixed keys. A perplexity among
    them replaces exp(loss)."""

    likelihood: bool = True
    """Whether the loss is a mean of -log p, so that its exponential is a perplexity."""

    @property
    def perplexity(self) -> float | None:
        """exp(loss); inf if that overflows; None for another loss."""
        if self.loss is None or not self.likelihood:
            return None
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def line(self) -> dict[str, Any]:
        """The keys and values of this evaluation's line, in order; floats may be nan or infinite."""
        return {
            "step": self.step,
            "split": self.split,
            "loss": self.loss,
            "loss_hex": None if self.loss is None else loss_hex(self.loss),
            "perplexity": self.perplexity,
            **self.metrics,
        }


def to_json(line: Mapping[str, Any]) -> str:
    """`line` as one line of strict JSON, with a newline: non-finite numbers become null, paths become strings."""
    return json.dumps(_finite(line), allow_nan=False, default=_plain) + "\n"


def _finite(value: object) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case Mapping():
            return {str(key): _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value


def _plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} {value!r} is not a plain number, text, list or mapping")


def read_line(line: str) -> Any:
    """Parse a line of strict JSON. Raises ValueError, also for numbers beyond 64 bits, which no run writes."""
    try:
        return json.loads(line, parse_int=_integer, parse_float=_number, parse_constant=_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _integer(text: str) -> int:
    number = int(text)
    if not -LARGEST_INTEGER <= number <= LARGEST_INTEGER:
        raise ValueError(f"{text[:20]} exceeds 64 bits")
    return number


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} exceeds 64 bits")
    return number


LATEST = 253_402_300_800.0
"""Seconds from 1970 to the year 10000: later times are invalid."""
MOST_STEPS = 2**53
"""A larger number of steps is invalid."""
LONGEST_LINE = 2**24
"""Maximum characters of a line."""


class LineFormat(NamedTuple):
    """What a line of a file has."""

    begins: str
    """Its first characters."""
    valid: Callable[[dict[str, Any]], bool]

    def parse(self, text: str) -> dict[str, Any] | None:
        """The line, or None for an incomplete or damaged one."""
        try:
            value = read_line(text)
            return value if isinstance(value, dict) and self.valid(value) else None
        except ValueError:
            return None

    def complete(self, text: str) -> str:
        """The line; if a writer was killed within it and another continued behind it, the line of the other."""
        text = text.strip()
        start = text.rfind(self.begins)
        return text[start:] if start > 0 and not text.startswith("[") else text


def is_step(value: object) -> bool:
    """Whether a value of a file counts steps."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_STEPS


def is_time(value: object) -> bool:
    """Whether a value of a file is a time in seconds since 1970."""
    return isinstance(value, int | float) and 0 <= value < LATEST


METRICS = LineFormat('{"step":', lambda line: is_step(line.get("step")))
"""Lines of metrics.jsonl, metrics.superseded.jsonl and layers.jsonl."""
EVENTS = LineFormat('{"time":', lambda line: "event" in line and is_time(line.get("time")))
"""Lines of events.jsonl."""


def read_texts(path: Path, faults: list[str] | None = None) -> Iterator[str]:
    """Lines of a file of a run folder. faults: gets a sentence if the file can't be read; None: raises OSError."""
    try:
        with open(open_regular(path), encoding="utf-8", errors="replace") as file:
            while line := file.readline(LONGEST_LINE):  # a longer one comes in pieces, which are no JSON
                yield line
    except OSError as error:
        if faults is None:
            raise
        missing = isinstance(error, FileNotFoundError)
        faults.append(
            f"{path.name} is missing" if missing else f"{path.name} cannot be read: {error.strerror or error}"
        )


def read_lines(path: Path, form: LineFormat, faults: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The lines of a file of a run, in file order. Incomplete ones are skipped, and counted in `faults`."""
    incomplete = 0
    for text in read_texts(path, faults):
        complete = form.complete(text)
        line = form.parse(complete)
        incomplete += bool(complete) and (line is None or complete != text.strip())
        if line is not None:
            yield line
    if incomplete and faults is not None:
        faults.append(f"{path.name}: {incomplete} incomplete line{'s' * (incomplete > 1)} skipped")


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The training lines and the evaluation lines of a metrics.jsonl, in order. Raises OSError if there is none."""
    lines = list(read_lines(path, METRICS))
    return [line for line in lines if "split" not in line], [line for line in lines if "split" in line]
