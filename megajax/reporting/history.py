"""Read a run folder, skipping missing and damaged parts.

N: steps in metrics.jsonl.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.checkpoint.step_folders import recorded_store, step_name, steps_in
from megajax.config.errors import UserError
from megajax.config.read_limits import DOCUMENT, read_json
from megajax.config.yaml_and_json import read_yaml
from megajax.metrics.plots import LayerColumns, LayerHistory
from megajax.metrics.record import EVENTS, METRICS, is_step, is_time, read_lines, read_texts
from megajax.metrics.run_folder import RunFolder

LARGEST_EXPONENT = 700.0
"""exp of more is no float: the perplexity of such a loss is infinite."""


class Stamp(NamedTuple):
    """The time of a line."""

    time: float
    """Wall-clock time, in seconds since 1970."""
    boot: str | None = None
    """ID of the machine's boot; None if unknown."""
    seconds: float = 0.0
    """Time of that boot's monotonic clock, in seconds."""

    @classmethod
    def of(cls, line: dict[str, Any]) -> "Stamp":
        """The stamp of a line with a valid time."""
        time = float(line["time"])
        match line.get("clock"):
            case [str() as boot, int() | float() as seconds] if math.isfinite(seconds):
                return cls(time, boot, float(seconds))
        return cls(time)


@dataclass
class _Reference:
    """A line of a boot, and its time on the common axis."""

    seconds: float
    at: float
    certain: bool
    """Whether the offset of the machine's clock to the axis is known."""


def common_times(stamps: Sequence[Stamp], attempt_starts: Sequence[bool]) -> list[float]:
    """Seconds since 1970 by the clock of the first line, for each line in file order.

    attempt_starts: whether a line starts an attempt, possibly on another machine.
    """
    references: dict[str, _Reference] = {}
    times: list[float] = []
    certainties: list[bool] = []
    latest, offset = -math.inf, 0.0
    for stamp, first in zip(stamps, attempt_starts, strict=True):
        reference = references.get(stamp.boot or "")
        if reference is not None:
            at, certain = reference.at + (stamp.seconds - reference.seconds), reference.certain
        else:
            at, certain = max(stamp.time + (0.0 if first else offset), latest), first
        if stamp.boot is not None:
            references.setdefault(stamp.boot, _Reference(stamp.seconds, at, first))
        if certain or stamp.boot is None:
            latest, offset = max(latest, at), at - stamp.time
        times.append(at)
        certainties.append(certain)
    # An uncertain line is no later than the next line with a certain time.
    known_times = [at if certain else math.inf for at, certain in zip(times, certainties, strict=True)]
    bounds = reversed(list(accumulate(reversed(known_times), min)))
    return [at if certain else min(at, bound) for at, certain, bound in zip(times, certainties, bounds, strict=True)]


START, RESTART = "start", "restart"
"""The first events of an attempt: of its processes, and of the launcher."""

BEGINNINGS = frozenset((START, RESTART, "metrics_superseded"))
"""Events that start an attempt, possibly on another machine than the previous one."""


ROUTINE = frozenset(
    {
        *("save_begun", "save_committed", "evaluate", "first_step", "compile", "compiled", "metrics_superseded"),
        *("rows_skipped", "restored", "goodput", "state_hash", "start_source"),
    }
)
"""Events of a run without incidents. There may be thousands."""

STATUS = {
    **dict.fromkeys(("persistent_fault", "numeric_fault", "evaluation_broken_off"), "bad"),
    **dict.fromkeys(("replica_mismatch", "recompute_mismatch"), "bad"),
    **dict.fromkeys(("crash", "hang", "lost", "supervisor_stop", "save_failed", "checkpoint_damaged"), "bad"),
    **dict.fromkeys(("transient_fault", "update_skipped", "layer_warning", "stopped", "signal", "restart"), "warning"),
    **dict.fromkeys(("save_retried", "checkpoint_fallback", "checkpoint_abandoned", "straggler", "health"), "warning"),
}
"""Event -> "bad" or "warning"; all other events are "plain"."""


@dataclass(frozen=True, slots=True)
class Event:
    """A line of events.jsonl."""

    stamp: Stamp
    at: float
    """The time on the common axis of all lines, for durations; see `common_times`."""
    attempt: int
    """Number of its attempt, from 1."""
    name: str
    step: int | None
    fields: Mapping[str, Any]
    """Everything else in the line."""

    @property
    def time(self) -> float:
        """Seconds since 1970, as written."""
        return self.stamp.time

    def at_of(self, stamp: Stamp) -> float:
        """The time on the common axis of another line by the same process."""
        same_boot = self.stamp.boot is not None and self.stamp.boot == stamp.boot
        return self.at + (stamp.seconds - self.stamp.seconds if same_boot else stamp.time - self.stamp.time)

    def integer(self, name: str) -> int | None:
        """An integer field; None if it is missing or of another type."""
        value = self.fields.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def seconds(self, name: str) -> float:
        """A field with a duration; 0 if it is missing or not positive."""
        value = number_of(self.fields.get(name))
        return value if value > 0 else 0.0

    def text(self, name: str) -> str:
        """A field as text; "" if it is missing."""
        value = self.fields.get(name)
        return "" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class StepColumns:
    """Training steps as columns, in order of steps."""

    step: np.ndarray
    """int64 [N]."""
    columns: Mapping[str, np.ndarray]
    """Name -> float64 [N]; nan where a line has no number."""
    nonfinite: Mapping[int, str]
    """Step -> "nan", "inf" or "-inf", for non-finite losses."""

    def __len__(self) -> int:
        return len(self.step)

    def column(self, name: str) -> np.ndarray:
        """float64 [N]; all nan if no line has the column."""
        return self.columns.get(name, np.full(len(self.step), np.nan))

    def total(self, name: str) -> float:
        """Sum of a column, without nan."""
        return float(np.nansum(self.column(name)))

    def median(self, name: str) -> float | None:
        """Median of a column, without nan; None if all are nan."""
        column = self.column(name)
        return float(np.nanmedian(column)) if np.isfinite(column).any() else None


@dataclass(slots=True)
class LoggedLines:
    """The lines of metrics of an attempt, with those that a later attempt has repeated."""

    last_step: int = 0
    last: Stamp | None = None
    """When the last line of that step was written."""
    rerun: list[float] = field(default_factory=list)
    """Seconds of the steps that a later attempt repeated."""

    def add(self, line: dict[str, Any], *, superseded: bool) -> None:
        """Count a line."""
        if line["step"] >= self.last_step:
            self.last_step = line["step"]
            self.last = Stamp.of(line) if is_time(line.get("time")) else self.last
        if superseded and "split" not in line:
            seconds = number_of(line.get("step_seconds"))
            self.rerun.append(seconds if seconds > 0 else 0.0)


@dataclass(frozen=True, slots=True)
class History:
    """The contents of a run folder."""

    folder: Path
    steps: StepColumns
    logged: Mapping[int, "LoggedLines"]
    """Attempt -> its lines of metrics."""
    layers: LayerHistory
    evaluations: Mapping[str, tuple[np.ndarray, np.ndarray]]
    """Split -> steps int64 and losses float64, of the same length."""
    other_losses: frozenset[str]
    """Splits whose loss is no mean of -log p, and has no perplexity."""
    tasks: Mapping[str, tuple[int, Mapping[str, float]]]
    """Task without a loss -> step of its last evaluation, and its metrics."""
    events: tuple[Event, ...]
    """Events in file order."""
    config: Mapping[str, Any]
    """config.yaml; {} if it is missing or damaged."""
    differences: tuple[tuple[str, str, str], ...]
    """Setting, default and value in this run, from config.diff."""
    versions: Mapping[str, str]
    """Package -> version, from the newest checkpoint."""
    checkpoints: tuple[int, ...]
    """Steps with a committed checkpoint."""
    faults: tuple[str, ...]
    """A sentence for each file or part that could not be read."""

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    @property
    def shows_flops(self) -> bool:
        """Whether FLOP/s are shown: not for runs on CPUs, where they are close to 0."""
        return {event.fields.get("device_kind") for event in self.events if event.name == "start"} != {"cpu"}


def read_history(run_dir: Path) -> History:
    """Read the run in `run_dir`. Missing files and incomplete lines are listed in `faults`.

    Raises UserError if the folder does not exist or contains no run.
    """
    folder = RunFolder(run_dir.expanduser())
    _require_run(folder)
    faults: list[str] = []
    metrics, logged = _Columns(), defaultdict[int, LoggedLines](LoggedLines)
    for line in read_lines(folder.metrics, METRICS, faults):
        logged[_attempt_of(line, 1)].add(line, superseded=False)
        for name in ("attempt", "time", "clock"):
            line.pop(name, None)
        metrics.add(line)
    for line in read_lines(folder.superseded, METRICS, faults) if folder.superseded.exists() else ():
        logged[_attempt_of(line, 1)].add(line, superseded=True)
    checkpoints = tuple(steps_in(folder.checkpoints))
    return History(
        folder=folder.path,
        steps=metrics.steps(),
        layers=metrics.layers.history(folder.layers),
        logged=logged,
        evaluations={split: _curve(points) for split, points in metrics.splits.items()},
        other_losses=frozenset(metrics.other_losses),
        tasks=metrics.tasks,
        events=tuple(_read_events(folder.events, faults)),
        config=_read_config(folder.config_yaml, faults),
        differences=tuple(_read_differences(folder.config_diff, faults)),
        versions=_read_versions(folder.checkpoints, checkpoints, faults),
        checkpoints=checkpoints,
        faults=tuple(faults),
    )


def _require_run(folder: RunFolder) -> None:
    path = folder.path
    if not path.exists():
        raise UserError(f"{path} does not exist: give the run_dir of a run")
    if not path.is_dir():
        raise UserError(f"{path} is a file: give the run_dir of a run, the folder that contains it")
    if any(file.exists() for file in (folder.metrics, folder.events, folder.config_yaml)):
        return
    below = sorted(file.parent.name for file in path.glob("*/metrics.jsonl"))
    hint = f" It contains runs: {', '.join(below[:5])}{', …' if len(below) > 5 else ''}." if below else ""
    raise UserError(
        f"{path} is not a run: it has no metrics.jsonl, events.jsonl or config.yaml.{hint} Give the run_dir of a run."
    )


@dataclass
class _Columns:
    """Collects the numbers of lines in compact arrays: a long run has millions of lines."""

    step: array = field(default_factory=lambda: array("q"))
    columns: dict[str, array] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    """Name -> numbers so far; missing numbers are filled with nan."""
    nonfinite: dict[int, str] = field(default_factory=dict)
    layers: LayerColumns = field(default_factory=LayerColumns)
    splits: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    """Split -> step -> loss."""
    other_losses: set[str] = field(default_factory=set)
    tasks: dict[str, tuple[int, dict[str, float]]] = field(default_factory=dict)

    def add(self, line: Mapping[str, Any]) -> None:
        if "split" in line:
            if line.get("loss") is None and line.get("loss_hex") is None:
                numbers = ((name, number_of(value)) for name, value in line.items() if name != "step")
                metrics = {name: number for name, number in numbers if math.isfinite(number)}
                self.tasks[str(line["split"])] = line["step"], metrics
            else:
                loss, split = number_of(line.get("loss")), str(line["split"])
                self.splits[split][line["step"]] = loss
                # A perplexity beyond the range of floats is null too.
                if line.get("perplexity") is None and loss < LARGEST_EXPONENT:
                    self.other_losses.add(split)
            return
        self.layers.add(line)
        for name, value in line.items():
            if isinstance(value, int | float) and name != "step":
                self._fill(self.columns[name])
                self.columns[name].append(number_of(value))
        if line.get("loss") is None:
            self.nonfinite[line["step"]] = str(line.get("loss_hex") or "unknown")
        self.step.append(line["step"])

    def _fill(self, column: array) -> None:
        column.extend([math.nan] * (len(self.step) - len(column)))

    def steps(self) -> StepColumns:
        for column in self.columns.values():
            self._fill(column)
        step = np.asarray(self.step, np.int64)
        order = np.argsort(step, kind="stable")
        columns = {name: np.asarray(column)[order] for name, column in self.columns.items()}
        return StepColumns(step[order], columns, self.nonfinite)


def number_of(value: object) -> float:
    """A value of a file as a float; nan if it is not a finite number."""
    if not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _curve(points: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    steps, losses = zip(*sorted(points.items()), strict=True)
    return np.asarray(steps, np.int64), np.asarray(losses, np.float64)


def _read_events(path: Path, faults: list[str]) -> Iterator[Event]:
    lines = [(Stamp.of(line), str(line["event"]), line) for line in read_lines(path, EVENTS, faults)]
    times = common_times([stamp for stamp, *_ in lines], [name in BEGINNINGS for _, name, _ in lines])
    attempt = 1
    for at, (stamp, name, line) in zip(times, lines, strict=True):
        attempt = _attempt_of(line, attempt)
        hidden = ("time", "clock", "event", "step", *["attempt"] * (name != RESTART))
        fields = {key: value for key, value in line.items() if key not in hidden}
        step = line.get("step")
        yield Event(stamp, at, attempt, name, step if is_step(step) else None, fields)


def _attempt_of(line: Mapping[str, Any], otherwise: int) -> int:
    attempt = line.get("attempt")
    return attempt if isinstance(attempt, int) and attempt > 0 else otherwise


def _read_config(path: Path, faults: list[str]) -> dict[str, Any]:
    try:
        values = read_yaml("".join(read_texts(path, faults)))
    except ValueError:
        faults.append(f"{path.name} is not YAML")
        return {}
    return values if isinstance(values, dict) else {}


def _read_differences(path: Path, faults: list[str]) -> Iterator[tuple[str, str, str]]:
    for line in read_texts(path, faults):
        name, colon, change = line.rstrip("\n").partition(": ")
        default, arrow, value = change.partition(" -> ")
        if colon and arrow:
            yield name, default, value


def _read_versions(folder: Path, steps: tuple[int, ...], faults: list[str]) -> dict[str, str]:
    if not steps or recorded_store(folder) is not None:
        return {}
    path = folder / step_name(steps[-1]) / "meta.json"
    try:
        return dict(read_json(path, DOCUMENT)["meta"]["versions"])
    except (OSError, ValueError, TypeError, KeyError):
        faults.append(f"{path} is not the metadata of a checkpoint")
        return {}
