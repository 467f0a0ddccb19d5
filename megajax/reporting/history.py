"""Read a run folder, as far as it can be read.

N: steps in metrics.jsonl.
"""

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megajax.checkpoint.folder import step_name, steps_in
from megajax.config.errors import UserError
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
    """Training steps in columns, ascending, each step once."""

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
    steps, evaluations, _ = _read_metrics(folder.metrics, faults, required=True)
    later = folder.metrics.with_name(f"{folder.metrics.stem}.superseded.jsonl")
    _, _, seconds = _read_metrics(later, faults, required=False)
    checkpoints = tuple(steps_in(folder.checkpoints))
    return History(
        folder=folder.path,
        steps=steps,
        superseded_seconds=seconds,
        evaluations=evaluations,
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


def _lines(path: Path, faults: list[str], *, required: bool) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from file
    except FileNotFoundError:
        if required:
            faults.append(f"{path.name} is missing")
    except OSError as error:
        faults.append(f"{path.name} cannot be read: {error.strerror or error}")


class _Columns:
    """Collects the numbers of lines, each with its place: some columns have a value in few lines."""

    def __init__(self) -> None:
        self.step = array("q")
        self.columns: dict[str, tuple[array, array]] = {}
        self.nonfinite: dict[int, str] = {}
        self.seconds = array("d")

    def add(self, line: Mapping[str, Any]) -> None:
        place = len(self.step)
        self.step.append(line["step"])
        for name, value in line.items():
            if isinstance(value, int | float) and name != "step":
                if name not in self.columns:
                    self.columns[name] = array("q"), array("d")
                places, values = self.columns[name]
                places.append(place)
                values.append(value)
        if line.get("loss") is None:
            self.nonfinite[line["step"]] = str(line.get("loss_hex") or "unknown")
        self.seconds.append(line.get("step_seconds") or 0.0)

    def steps(self) -> Steps:
        """Sorted by step; the last line of each step."""
        step = np.asarray(self.step, np.int64)
        order = np.argsort(step, kind="stable")
        last = np.append(np.diff(step[order]) > 0, True)[: len(step)]
        order = order[last]
        columns = {}
        for name, (places, values) in self.columns.items():
            column = np.full(len(step), np.nan)
            column[np.asarray(places, np.int64)] = np.asarray(values)
            columns[name] = column[order]
        return Steps(step[order], columns, self.nonfinite)


def _read_metrics(
    path: Path, faults: list[str], *, required: bool
) -> tuple[Steps, dict[str, tuple[np.ndarray, np.ndarray]], tuple[float, ...]]:
    columns, torn = _Columns(), 0
    splits: dict[str, list[tuple[int, float]]] = {}
    for text in _lines(path, faults, required=required):
        line = parse(text)
        if line is None:
            torn += bool(text.strip())
        elif "split" in line:
            splits.setdefault(str(line["split"]), []).append((line["step"], _number(line.get("loss"))))
        else:
            columns.add(line)
    if torn:
        faults.append(f"{path.name}: {torn} incomplete line{'s' * (torn > 1)} skipped")
    return columns.steps(), {name: _curve(points) for name, points in splits.items()}, tuple(columns.seconds)


def _curve(points: Iterable[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Sorted by step; the last value of each step."""
    steps, losses = zip(*sorted(dict(points).items()), strict=True)
    return np.asarray(steps, np.int64), np.asarray(losses, np.float64)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _read_events(path: Path, faults: list[str]) -> Iterator[Event]:
    torn = 0
    for text in _lines(path, faults, required=True):
        try:
            line = json.loads(text)
            fields = {name: value for name, value in line.items() if name not in ("time", "event", "step")}
            step = line.get("step")
            yield Event(float(line["time"]), str(line["event"]), step if isinstance(step, int) else None, fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            torn += bool(text.strip())
    if torn:
        faults.append(f"{path.name}: {torn} incomplete line{'s' * (torn > 1)} skipped")


def _read_config(path: Path, faults: list[str]) -> dict[str, Any]:
    text = "".join(_lines(path, faults, required=True))
    try:
        values = yaml.safe_load(text) if text else {}
    except yaml.YAMLError:
        faults.append(f"{path.name} is not YAML")
        return {}
    return values if isinstance(values, dict) else {}


def _read_differences(path: Path, faults: list[str]) -> Iterator[tuple[str, str, str]]:
    for line in _lines(path, faults, required=True):
        name, colon, change = line.rstrip("\n").partition(": ")
        default, arrow, value = change.partition(" -> ")
        if colon and arrow:
            yield name, default, value


def _read_versions(folder: Path, steps: tuple[int, ...], faults: list[str]) -> dict[str, str]:
    if not steps:
        return {}
    path = folder / step_name(steps[-1]) / "meta.json"
    try:
        text = "".join(_lines(path, faults, required=True)) or "{}"
        versions = json.loads(text).get("meta", {}).get("versions", {})
    except (ValueError, AttributeError):
        faults.append(f"{path} is not the metadata of a checkpoint")
        return {}
    return {str(name): str(version) for name, version in versions.items()}
