"""The fastest layout of a config on a cluster, by formulas: every combination, less what rules and memory forbid.

Groups of (tensor, pipeline, data) are looked at one after another, so that a search can show where it is, stop, and go
on. Of each layout what is computed again is tried from the least on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megajax.config.errors import UserError
from megajax.planning.cost.costs import Device
from megajax.planning.cost.description import Description, describe
from megajax.planning.cost.estimate import Estimate, estimate, footprint
from megajax.planning.program.devices import GIB
from megajax.planning.search.candidates import Choice, Space, apply, problems

HEADROOM = 0.05
"""Share of usable memory that a layout must leave by formula: compiled plans are up to 3 % larger, and above 95 % of
the memory the compiler's scheduler hides less and less."""
KEPT = 12
"""Layouts remembered of each group."""
AWAY = (0.5, 1.0)
"""Shares of the moments in host memory that are tried, where nothing fits without."""
PLAIN = ("selective", "full")
"""What some layers may do while the others do one step less."""


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
        """Raises nothing for choices that the config's rules refuse: ask `problems` first."""
        cfg = apply(choice, self.space.cfg)
        return describe(cfg, self.device, self.space.devices, self.space.per_node)

    def estimated(self, choice: Choice) -> Estimate:
        """The whole estimate of a choice."""
        return estimate(self.described(choice))

    def refusal(self, choice: Choice) -> str:
        """What the config's own rules say against it, in one line; empty where nothing."""
        found = problems(apply(choice, self.space.cfg), self.space.devices)
        return f"{found[0].where}: {found[0].what}" if found else ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A layout with its two figures."""

    choice: Choice
    step_seconds: float
    """By formula; 0 where it was not asked for."""
    peak: float
    """Bytes of a device, by formula."""


@dataclass(slots=True)
class Tally:
    """What became of the layouts and their ways of computing again."""

    refused: int = 0
    too_large: int = 0
    estimated: int = 0

    def add(self, other: "Tally") -> None:
        self.refused += other.refused
        self.too_large += other.too_large
        self.estimated += other.estimated

    @property
    def total(self) -> int:
        return self.refused + self.too_large + self.estimated


@dataclass(slots=True)
class Group:
    """What was found of one (tensor, pipeline, data)."""

    place: tuple[int, int, int]
    best: list[Entry] = field(default_factory=list)
    """That fit, fastest first; layouts of one kind once."""
    fastest: dict[str, Entry] = field(default_factory=dict)
    """By data sharding, that fits."""
    smallest: dict[str, Entry] = field(default_factory=dict)
    """By data sharding, whether or not it fits."""
    refusals: dict[str, str] = field(default_factory=dict)
    """By data sharding, the first."""
    tally: Tally = field(default_factory=Tally)


def groups(task: Task, known: Mapping[tuple[int, int, int], Group]) -> Iterator[tuple[Group, bool]]:
    """All groups, one after another, and whether each is new; those known from an earlier search are not made again.

    Raises UserError where the fixed settings leave none.
    """
    places = task.space.groups()
    if not places:
        raise UserError(_nothing_divides(task.space))
    for place in places:
        if place in known:
            yield known[place], False
        else:
            yield explore(task, place), True


def _nothing_divides(space: Space) -> str:
    given = ", ".join(f"{name}={value}" for name, value in space.fixed.items())
    return (
        f"nothing to search: no layout of {space.devices} devices has {given}.\n"
        f"tensor x pipeline x data must be {space.devices}; give other values, or fewer of them."
    )


def explore(task: Task, place: tuple[int, int, int]) -> Group:
    """One group. Moments wait in host memory only where nothing of it fits otherwise."""
    group = Group(place)
    _explore(task, group, task.space.fixed.get("offload", 0.0))
    if not group.fastest and "offload" not in task.space.fixed and group.smallest:
        for share in AWAY:
            _explore(task, group, share)
    kinds: dict[tuple, Entry] = {}
    for entry in sorted(group.best, key=rank):
        kinds.setdefault(entry.choice.kind, entry)
    group.best = list(kinds.values())[:KEPT]
    return group


def rank(entry: Entry) -> tuple[float, int, float]:
    """What to sort by: speed to three digits, as the model knows no more; then the shorter pipeline, then memory."""
    return rounded(entry.step_seconds), entry.choice.pipeline * entry.choice.virtual_stages, entry.peak


def rounded(seconds: float) -> float:
    """To three digits."""
    return float(f"{seconds:.2e}")


def _explore(task: Task, group: Group, offload: float) -> None:
    for layout in task.space.layouts(group.place):
        layout = replace(layout, offload=offload)
        sharding = layout.data_sharding
        refusal = task.refusal(layout)
        if refusal:
            group.tally.refused += 1
            group.refusals.setdefault(sharding, refusal)
            continue
        least = Entry(layout, 0.0, footprint(task.described(layout)).peak)
        if sharding not in group.smallest or least.peak < group.smallest[sharding].peak:
            group.smallest[sharding] = least
        if least.peak > task.limit:
            group.tally.too_large += 1
            continue
        for entry in _ladder(task, layout, group.tally):
            group.best.append(entry)
            if sharding not in group.fastest or rank(entry) < rank(group.fastest[sharding]):
                group.fastest[sharding] = entry


def _ladder(task: Task, layout: Choice, tally: Tally) -> Iterator[Entry]:
    """A layout with all that it may compute again, as far as it fits; nothing is faster than computing nothing."""
    for again in task.space.recomputes():
        choice = replace(layout, recompute=again)
        refused = again != layout.recompute and task.refusal(choice)
        if refused:
            tally.refused += 1
            continue
        described = task.described(choice)
        peak = footprint(described).peak
        if peak > task.limit:
            tally.too_large += 1
            continue
        tally.estimated += 1
        yield Entry(choice, estimate(described).step_seconds, peak)
        if again == "none":
            return
        if again in PLAIN and not {"recompute", "recompute_layers"} & set(task.space.fixed):
            yield from _some_layers(task, choice, described, tally)


def _some_layers(task: Task, choice: Choice, whole: Description, tally: Tally) -> Iterator[Entry]:
    """The fewest layers of each chunk that have to do it for the rest to fit."""
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


def merged(found: Mapping[Any, Group]) -> tuple[list[Entry], Tally]:
    """The best of all groups, fastest first, and what was tried altogether."""
    tally = Tally()
    for group in found.values():
        tally.add(group.tally)
    return sorted((entry for group in found.values() for entry in group.best), key=rank), tally
