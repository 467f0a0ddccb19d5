"""Read a run folder, as far as it can be read.

N: steps in metrics.jsonl.
"""

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megajax.checkpoint.folder import step_name, steps_in
from megajax.config.errors import UserError
from megajax.metrics.layer_history import LayerColumns, LayerHistory
from megajax.metrics.record import parse
from megajax.metrics.runfolder import RunFolder


@dataclass(frozen=True, slots=True)
class Event:
    """A line of events.jsonl."""

    time: float
    """Seconds since 1970."""
    name: str
    step: int | None
    fields: Mapping[str, Any]
    """Everything else in the line."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Training steps in columns, ascending."""

    step: np.ndarray
    """int64 [N]."""
    columns: Mapping[str, np.ndarray]
    """Name -> float64 [N]; nan if the line has no number."""
    nonfinite: Mapping[int, str]
    """Step -> "nan", "inf" or "-inf", for losses that were not finite."""

    def __len__(self) -> int:
        return len(self.step)

    def column(self, name: str) -> np.ndarray:
        """float64 [N], all nan if no line has it."""
        return self.columns.get(name, np.full(len(self.step), np.nan))

    def total(self, name: str) -> float:
        """Sum of a column's numbers."""
        return float(np.nansum(self.column(name)))

    def median(self, name: str) -> float | None:
        """Median of a column's numbers; None if it has none."""
        column = self.column(name)
        return float(np.nanmedian(column)) if np.isfinite(column).any() else None


@dataclass(frozen=True, slots=True)
class History:
    """The contents of a run folder."""

    folder: Path
    steps: Steps
    superseded_seconds: tuple[float, ...]
    """step_seconds of each line of metrics.superseded.jsonl (steps that a later attempt ran again), in file order."""
    layers: LayerHistory
    """What layers reported."""
    evaluations: Mapping[str, tuple[np.ndarray, np.ndarray]]
    """Split -> steps int64 and losses float64, of the same length."""
    events: tuple[Event, ...]
    """In file order."""
    config: Mapping[str, Any]
    """config.yaml; {} if it is missing or damaged."""
    differences: tuple[tuple[str, str, str], ...]
    """Setting, default and value in this run: the lines of config.diff."""
    versions: Mapping[str, str]
    """Package -> version, from the newest checkpoint."""
    checkpoints: tuple[int, ...]
    """Steps with a committed checkpoint."""
    faults: tuple[str, ...]
    """What could not be read, a sentence each."""

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.folder.resolve().name


def read_history(run_dir: Path) -> History:
    """Read everything in `run_dir`. Missing files and torn lines are named in `faults` and raise nothing.

    Raises UserError if the folder does not exist or holds no run.
    """
    folder = RunFolder(run_dir.expanduser())
    _require_run(folder)
    faults: list[str] = []
    metrics = _read_metrics(folder.metrics, faults)
    superseded = _read_metrics(folder.superseded, faults) if folder.superseded.exists() else _Columns()
    checkpoints = tuple(steps_in(folder.checkpoints))
    return History(
        folder=folder.path,
        steps=metrics.steps(),
        layers=metrics.layers.history(folder.layers),
        superseded_seconds=tuple(np.nan_to_num(superseded.steps().column("step_seconds")).tolist()),
        evaluations={split: _curve(points) for split, points in metrics.splits.items()},
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
        raise UserError(f"there is no folder {path}: give the run_dir of a run")
    if not path.is_dir():
        raise UserError(f"{path} is a file: give the run_dir of a run, the folder that contains it")
    if any(file.exists() for file in (folder.metrics, folder.events, folder.config_yaml)):
        return
    below = sorted(file.parent.name for file in path.glob("*/metrics.jsonl"))
    hint = f" It contains runs: {', '.join(below[:5])}{', …' if len(below) > 5 else ''}." if below else ""
    raise UserError(
        f"{path} holds no run: it has no metrics.jsonl, events.jsonl or config.yaml.{hint} Give the run_dir of a run."
    )


def _lines(path: Path, faults: list[str]) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from file
    except FileNotFoundError:
        faults.append(f"{path.name} is missing")
    except OSError as error:
        faults.append(f"{path.name} cannot be read: {error.strerror or error}")


def _note_torn(path: Path, torn: int, faults: list[str]) -> None:
    if torn:
        faults.append(f"{path.name}: {torn} incomplete line{'s' * (torn > 1)} skipped")


@dataclass
class _Columns:
    """Collects the numbers of lines in arrays: a long run has millions."""

    step: array = field(default_factory=lambda: array("q"))
    columns: dict[str, array] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    """Those of columns that were missing in earlier lines are filled up with nan."""
    nonfinite: dict[int, str] = field(default_factory=dict)
    layers: LayerColumns = field(default_factory=LayerColumns)
    splits: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    """Split -> step -> loss."""

    def add(self, line: Mapping[str, Any]) -> None:
        if "split" in line:
            loss = line.get("loss")
            self.splits[str(line["split"])][line["step"]] = loss if isinstance(loss, int | float) else math.nan
            return
        self.layers.add(line)
        for name, value in line.items():
            if isinstance(value, int | float) and name != "step":
                self._fill(self.columns[name])
                self.columns[name].append(value)
        if line.get("loss") is None:
            self.nonfinite[line["step"]] = str(line.get("loss_hex") or "unknown")
        self.step.append(line["step"])

    def _fill(self, column: array) -> None:
        column.extend([math.nan] * (len(self.step) - len(column)))

    def steps(self) -> Steps:
        for column in self.columns.values():
            self._fill(column)
        step = np.asarray(self.step, np.int64)
        order = np.argsort(step, kind="stable")
        columns = {name: np.asarray(column)[order] for name, column in self.columns.items()}
        return Steps(step[order], columns, self.nonfinite)


def _read_metrics(path: Path, faults: list[str]) -> _Columns:
    columns, torn = _Columns(), 0
    for text in _lines(path, faults):
        line = parse(text)
        if line is None:
            torn += bool(text.strip())
        else:
            columns.add(line)
    _note_torn(path, torn, faults)
    return columns


def _curve(points: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    steps, losses = zip(*sorted(points.items()), strict=True)
    return np.asarray(steps, np.int64), np.asarray(losses, np.float64)


def _read_events(path: Path, faults: list[str]) -> Iterator[Event]:
    torn = 0
    for text in _lines(path, faults):
        try:
            line = json.loads(text)
            fields = {name: value for name, value in line.items() if name not in ("time", "event", "step")}
            step = line.get("step")
            yield Event(float(line["time"]), str(line["event"]), step if isinstance(step, int) else None, fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            torn += bool(text.strip())
    _note_torn(path, torn, faults)


def _read_config(path: Path, faults: list[str]) -> dict[str, Any]:
    try:
        values = yaml.safe_load("".join(_lines(path, faults)))
    except yaml.YAMLError:
        faults.append(f"{path.name} is not YAML")
        return {}
    return values if isinstance(values, dict) else {}


def _read_differences(path: Path, faults: list[str]) -> Iterator[tuple[str, str, str]]:
    for line in _lines(path, faults):
        name, colon, change = line.rstrip("\n").partition(": ")
        default, arrow, value = change.partition(" -> ")
        if colon and arrow:
            yield name, default, value


def _read_versions(folder: Path, steps: tuple[int, ...], faults: list[str]) -> dict[str, str]:
    if not steps:
        return {}
    path = folder / step_name(steps[-1]) / "meta.json"
    try:
        return dict(json.loads("".join(_lines(path, faults)))["meta"]["versions"])
    except (ValueError, TypeError, KeyError):
        faults.append(f"{path} is not the metadata of a checkpoint")
        return {}
