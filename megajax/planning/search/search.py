"""The fastest layout of a config on a cluster, by formulas: every combination that the rules and the memory allow.

Groups of (tensor, pipeline, data) are searched one after another, so that a search can report progress, stop, and go
on from its cache. Of each layout the recompute policies are tried from the cheapest on.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from megajax.config.dump import plain
from megajax.config.errors import UserError
from megajax.planning.cost.costs import Device
from megajax.planning.cost.description import Description, describe
from megajax.planning.cost.estimate import Estimate, estimate, footprint
from megajax.planning.program.devices import GIB
from megajax.planning.search.candidates import Choice, Space, apply, problems
from megajax.planning.search.compile_worker import Prediction

HEADROOM = 0.05
"""Fraction of usable memory that a layout must leave by formula: compiled plans are up to 3 % larger, and above 95 % of
the memory the compiler's scheduler hides less and less communication."""
KEPT = 12
"""Best layouts kept of each group."""
OFFLOADS = (0.5, 1.0)
"""Fractions of the moments in host memory that are tried where nothing fits without."""
SOME_LAYERS = ("selective", "full")
"""Policies that are also tried on some of the layers only."""
FORMAT = 2
"""Of the cache; increase it when formulas or the search change."""

type Place = tuple[int, int, int]
"""(tensor, pipeline, data) of a group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What to search."""

    space: Space
    device: Device

    @property
    def limit(self) -> float:
        """Bytes that a layout may take by formula."""
        return self.device.usable_gib * GIB * (1 - HEADROOM)

    def described(self, choice: Choice) -> Description:
        """For a choice that the config's rules allow; see `refusal`."""
        return describe(apply(choice, self.space.cfg), self.device, self.space.devices, self.space.per_node)

    def estimated(self, choice: Choice) -> Estimate:
        return estimate(self.described(choice))

    def refusal(self, choice: Choice) -> str:
        """Why the config's own rules refuse a choice, in one line; empty if they don't."""
        first = problems(apply(choice, self.space.cfg), self.space.devices)[:1]
        return "".join(f"{one.where}: {one.what}" for one in first)

    def fixed(self) -> str:
        """The settings that the user has given: "tensor=4, micro_size=2"."""
        return ", ".join(f"{name}={value}" for name, value in self.space.fixed.items())

    def fingerprint(self) -> str:
        """Hash of all that the result depends on: config, fixed settings, devices and their constants."""
        space = self.space
        parts = {
            "format": FORMAT,
            "headroom": HEADROOM,
            "config": plain(space.cfg),
            "fixed": dict(sorted(space.fixed.items())),
            "devices": space.devices,
            "per_node": space.per_node,
            "device": asdict(self.device),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Entry:
    """A layout with its two figures by formula."""

    choice: Choice
    step_seconds: float
    """0 if not estimated."""
    peak: float
    """Bytes of a device."""

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> "Entry":
        """From JSON of `asdict`."""
        return cls(Choice.read(written["choice"]), written["step_seconds"], written["peak"])


@dataclass(slots=True)
class Tally:
    """Numbers of layouts, each recompute policy counted, by outcome."""

    refused: int = 0
    too_large: int = 0
    estimated: int = 0

    @property
    def total(self) -> int:
        return self.refused + self.too_large + self.estimated


@dataclass(slots=True)
class Group:
    """Result of one (tensor, pipeline, data)."""

    place: Place
    best: list[Entry] = field(default_factory=list)
    """That fit, fastest first; layouts of one kind once."""
    smallest: Entry | None = None
    """Whether or not it fits."""
    refusals: dict[str, int] = field(default_factory=dict)
    """Reason -> number of layouts."""
    tally: Tally = field(default_factory=Tally)

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> "Group":
        """From JSON of `asdict`."""
        smallest = written["smallest"]
        return cls(
            place=tuple(written["place"]),
            best=[Entry.read(one) for one in written["best"]],
            smallest=None if smallest is None else Entry.read(smallest),
            refusals=written["refusals"],
            tally=Tally(**written["tally"]),
        )


def search(task: Task, known: Mapping[Place, Group]) -> Iterator[tuple[Group, bool]]:
    """All groups, and whether each is new; those known from an earlier search are not repeated.

    Raises UserError if the fixed settings leave no group.
    """
    places = task.space.groups()
    if not places:
        devices = task.space.devices
        raise UserError(
            f"nothing to search: no layout of {devices} devices has {task.fixed()}.\n"
            f"tensor x pipeline x data must be {devices}; give other values, or fewer of them."
        )
    for place in places:
        yield known.get(place) or explore(task, place), place not in known


def explore(task: Task, place: Place) -> Group:
    """Search one group. Moments are offloaded only if none of its layouts fits without."""
    group = Group(place)
    entries = [*_fitting(task, group, task.space.fixed.get("offload", 0.0))]
    if not entries and "offload" not in task.space.fixed and group.smallest is not None:
        for share in OFFLOADS:
            entries += _fitting(task, group, share)
    kinds: dict[tuple, Entry] = {}
    for entry in sorted(entries, key=rank):
        kinds.setdefault(entry.choice.kind, entry)
    group.best = list(kinds.values())[:KEPT]
    return group


def rank(entry: Entry) -> tuple[float, int, float]:
    """Sort key: step time in three digits, the model's precision; then the shorter pipeline; then less memory."""
    return rounded(entry.step_seconds), entry.choice.pipeline * entry.choice.virtual_stages, entry.peak


def rounded(seconds: float) -> float:
    """To three digits."""
    return float(f"{seconds:.2e}")


def _fitting(task: Task, group: Group, offload: float) -> Iterator[Entry]:
    """Layouts of a group that fit; counts the others."""
    for layout in task.space.layouts(group.place):
        layout = replace(layout, offload=offload)
        refusal = task.refusal(layout)
        if refusal:
            group.tally.refused += 1
            group.refusals[refusal] = group.refusals.get(refusal, 0) + 1
            continue
        least = Entry(layout, 0.0, footprint(task.described(layout)).peak)
        if group.smallest is None or least.peak < group.smallest.peak:
            group.smallest = least
        if least.peak > task.limit:
            group.tally.too_large += 1
            continue
        yield from _policies(task, layout, group.tally)


def _policies(task: Task, layout: Choice, tally: Tally) -> Iterator[Entry]:
    """A layout with each recompute policy that fits; nothing is faster than no recomputing."""
    for recompute in task.space.recomputes():
        choice = replace(layout, recompute=recompute)
        if recompute != layout.recompute and task.refusal(choice):
            tally.refused += 1
            continue
        described = task.described(choice)
        peak = footprint(described).peak
        if peak > task.limit:
            tally.too_large += 1
            continue
        tally.estimated += 1
        yield Entry(choice, estimate(described).step_seconds, peak)
        if recompute == "none":
            return
        if recompute in SOME_LAYERS and not {"recompute", "recompute_layers"} & set(task.space.fixed):
            yield from _some_layers(task, choice, described, tally)


def _some_layers(task: Task, choice: Choice, whole: Description, tally: Tally) -> Iterator[Entry]:
    """The policy on the fewest layers of each chunk with which it fits, by bisection."""
    size = len(whole.model.stack.pattern)
    few, enough = 0, whole.rows  # in repeats of the pattern
    while enough - few > 1:
        middle = (few + enough) // 2
        described = task.described(replace(choice, recompute_layers=middle * size))
        fits = footprint(described).peak <= task.limit
        few, enough = (few, middle) if fits else (middle, enough)
    if enough < whole.rows:
        some = replace(choice, recompute_layers=enough * size)
        if task.refusal(some):
            tally.refused += 1
            return
        described = task.described(some)
        tally.estimated += 1
        yield Entry(some, estimate(described).step_seconds, footprint(described).peak)


def merged(groups: Mapping[Place, Group]) -> tuple[list[Entry], Tally]:
    """The best layouts of all groups, fastest first, and the sums of their tallies."""
    tallies = [group.tally for group in groups.values()]
    names = ("refused", "too_large", "estimated")
    total = Tally(**{name: sum(getattr(one, name) for one in tallies) for name in names})
    return sorted((entry for group in groups.values() for entry in group.best), key=rank), total


class SearchCache:
    """Results of a search in a JSON-lines file, from which a search that was stopped goes on; no file without a path.

    The first line is the task's fingerprint; each further one a group, or the prediction of a compiled layout.
    """

    def __init__(self, path: Path | None, task: Task, *, insist: bool = False):
        """Read the file if there is one; insist: raise UserError for that of another search instead of replacing it."""
        self.path = path
        self.groups: dict[Place, Group] = {}
        self.compiled: dict[Choice, Prediction] = {}
        self._file: TextIO | None = None
        if path is None:
            return
        head = {"search": task.fingerprint()}
        lines = _lines(path)
        known = lines[:1] == [head]
        if lines and not known and insist:
            raise UserError(
                f"{path} is not of this search: config, overrides, devices or their constants differ.\n"
                "Give another file to --resume, or delete this one."
            )
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path} can't be written: {error.strerror}") from error
        # Rewritten from the start, as the last line may be incomplete.
        self._write(head)
        for line in lines[1:] if known else ():
            if "group" in line:
                self.add_group(Group.read(line["group"]))
            elif "compiled" in line:
                self.add_compiled(Choice.read(line["compiled"]), Prediction(**line["prediction"]))

    def add_group(self, group: Group) -> None:
        self.groups[group.place] = group
        self._write({"group": asdict(group)})

    def add_compiled(self, choice: Choice, prediction: Prediction) -> None:
        self.compiled[choice] = prediction
        self._write({"compiled": choice.plain(), "prediction": asdict(prediction)})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def _lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a cache; [] if there is no file. Raises UserError if it can't be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read: {error}") from error
    lines = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            break
        lines.append(value if isinstance(value, dict) else {})
    return lines or [{}] * bool(text.strip())
