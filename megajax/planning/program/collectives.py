"""The collectives of a compiled program: kind, mesh axes, bytes, the loops around them, and what runs beside them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, groupby
from math import prod
from typing import Any

from megajax.planning.program.groups import Groups, groups_of
from megajax.planning.program.hlo import Computation, Instruction, Program, arrays, size
from megajax.planning.program.trip_counts import StepCounts

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
START, DONE = "-start", "-done"


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a program something is: the loops around it, outermost first."""

    path: tuple[int, ...] = ()
    """Number of each loop among its siblings, counted from 1 in the order they run; () is outside all loops."""
    trips: tuple[int | None, ...] = ()
    """How often each loop runs for one run of the one around it; None where the compiler doesn't know."""
    conditional: bool = False
    """Whether it is in a branch: then it runs at most `times` times."""
    share: float = 1.0
    """Of the runs that trips make, the part that is not skipped, as the program says itself."""

    def inside(self, one: Instruction, number: int) -> "Place":
        """Within the body of a while loop, the `number`th one here."""
        known = one.trips is not None or one.share is None
        trips, share = (one.trips, 1.0) if known else (1, one.share or 1.0)
        return Place((*self.path, number), (*self.trips, trips), self.conditional, self.share * share)

    def branch(self, one: Instruction) -> "Place":
        """Within the branches of a conditional."""
        return Place(self.path, self.trips, self.conditional or one.share is None, self.share * (one.share or 1.0))

    @property
    def name(self) -> str:
        """Such as "1.2": the second loop in the first; "" outside all loops."""
        return ".".join(map(str, self.path))

    @property
    def times(self) -> int | None:
        """Runs per step: the product of the trips, without what is skipped."""
        known = [trips for trips in self.trips if trips is not None]
        return round(prod(known) * self.share) if len(known) == len(self.trips) else None


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective at one place of a program; neighbours that the compiler joined are one."""

    kind: str
    groups: Groups
    place: Place
    bytes: int
    """Of one device and one run: the whole (gathered, unreduced) side, which is the result of an all-gather and the
    operands of all others."""
    arrays: int
    """How many it moves at once."""
    elements: int
    """Numbers in its results on one device."""
    overlapped: bool
    """Whether matmuls, or a loop with matmuls, are scheduled between its start and its end."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One custom call at one place of a program."""

    target: str
    place: Place


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop, or the program outside of all loops."""

    place: Place
    matmuls: int
    """Matrix products of one run of the body, without those of loops inside."""


@dataclass(frozen=True)
class Contents:
    """What a program holds, in the order it runs."""

    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]
    loops: tuple[Loop, ...]


def read(text: str, mesh: Mapping[str, int]) -> Contents:
    """Contents of a compiled program from `compiled.as_text()`; mesh: axis -> size, outermost first.

    Collectives of a single device, which move nothing, are left out. Raises ValueError for text that can't be read.
    """
    reader = _Reader(Program.read(text), mesh)
    reader.body(reader.program.entry, Place())
    return Contents(tuple(reader.collectives), tuple(reader.kernels), tuple(reader.loops))


class _Reader:
    """One walk through a program along everything that it runs."""

    def __init__(self, program: Program, mesh: Mapping[str, int]):
        self.program, self.mesh = program, mesh
        self.collectives: list[Collective] = []
        self.kernels: list[Kernel] = []
        self.loops: list[Loop] = []

    def body(self, name: str, place: Place, *more: str) -> None:
        """The body of a loop, or the whole program; `more` runs with it, as a loop's condition does."""
        index = len(self.loops)
        self.loops.append(Loop(place, 0))
        numbers = count(1)
        matmuls = sum(self.computation(each, place, numbers) for each in (name, *more))
        self.loops[index] = Loop(place, matmuls)

    def computation(self, name: str, place: Place, numbers: Iterator[int]) -> int:
        """Note what is in it; the matmuls outside of inner loops."""
        computation = self.program.computations[name]
        done = _ends(computation)
        work = [self.program.matmuls(one) for one in computation.values()]
        total = 0
        for index, one in enumerate(computation.values()):
            found = self.collective(one, computation)
            if found is not None:
                last = done.get(one.name, len(work)) if one.opcode.endswith(START) else index
                # Two halves that the compiler runs as one are no start and end.
                overlapped = any(work[index + 1 : last]) and '"is_sync":true' not in one.attributes
                self.note(*found, place, overlapped)
            elif one.opcode == "while":
                inner = place.inside(one, next(numbers))
                self.body(one.callees["body"][0], inner, *one.callees.get("condition", ()))
            elif one.opcode == "conditional":
                branch = place.branch(one)
                total += sum(self.computation(each, branch, numbers) for each in self.program.called(one, "branches"))
            elif one.opcode == "call" or one.opcode.endswith(START):
                total += sum(self.computation(each, place, numbers) for each in self.program.called(one))
            else:
                total += work[index]
                self.kernels += [Kernel(target, place) for target in self.targets(one)]
        return total

    def targets(self, one: Instruction) -> Iterator[str]:
        """Of custom calls, those inside a fusion too."""
        if one.target is not None:
            yield one.target
        for name in self.program.called(one, "calls"):
            for inner in self.program.computations[name].values():
                yield from self.targets(inner)

    def collective(self, one: Instruction, home: Computation) -> tuple[Instruction, Computation] | None:
        """The collective that an instruction is, starts or wraps (in a fusion, in an async-start), and where it is."""
        if one.opcode.removesuffix(START) in KINDS:
            return one, home
        if one.opcode == "fusion" or one.opcode.endswith(START):
            for name in self.program.called(one, "calls"):
                inner = self.program.computations[name]
                for each in inner.values():
                    if (found := self.collective(each, inner)) is not None:
                        return found
        return None

    def note(self, one: Instruction, home: Computation, place: Place, overlapped: bool) -> None:
        kind = one.opcode.removesuffix(START)
        groups = groups_of(one.attributes, self.mesh)
        if not groups.axes:
            return
        # Of a ragged exchange the operands after the first are where to write and how much.
        operands = one.operands[:1] if kind == "ragged-all-to-all" else one.operands
        shapes = [home[name].shape for name in operands]
        held = sum(size(shape) for shape in shapes)
        numbers = sum(elements for shape in shapes for _, elements in arrays(shape))
        if kind == "all-gather":
            held, numbers = held * groups.size, numbers * groups.size
        elif kind == "reduce-scatter":
            numbers //= groups.size
        self.collectives.append(Collective(kind, groups, place, held, len(operands), numbers, overlapped))


def _ends(computation: Computation) -> dict[str, int]:
    """Name of what starts something -> where in the computation it ends."""
    started = {}
    ends = {}
    for index, one in enumerate(computation.values()):
        origin = started.get(one.operands[0], one.operands[0]) if one.operands else ""
        if one.opcode == "async-update":
            started[one.name] = origin
        elif one.opcode.endswith(DONE):
            ends[origin] = index
    return ends


def runs(place: Place, counts: StepCounts | None) -> int | None:
    """Runs per step; where the compiler does not know, as `counts` has it, None without."""
    if place.times is not None or counts is None:
        return place.times
    return round(counts.rounds(place.trips) * place.share)


def grouped(found: Iterable[Collective], counts: StepCounts | None = None) -> list[dict[str, Any]]:
    """Collectives alike in place, kind, axes and overlap, summed: rows of a table, in the order of places.

    counts: what is known of trip counts beside the program.

    kind; axis: "tensor", "data+context"; loop: "1.2" is the second loop in the first, "" outside all loops; trips: of
    the loops around, outermost first; inside_loop; conditional; share: of the runs, the part that is not skipped;
    overlapped; instructions: how many they are in the program; arrays: how many these move, as the compiler joins
    neighbours; count: runs per step, null where nothing is known of a loop's trips; bytes_once: of one device, each run
    once; bytes: of one device per step, or null.
    """

    def key(one: Collective) -> tuple:
        place = one.place
        return place.path, one.kind, one.groups.name, not one.overlapped, place.conditional, place.share

    rows = []
    for _, group in groupby(sorted(found, key=key), key):
        same = list(group)
        place, once = same[0].place, sum(one.bytes for one in same)
        times = runs(place, counts)
        rows.append(
            {
                "kind": same[0].kind,
                "axis": same[0].groups.name,
                "loop": place.name,
                "trips": list(place.trips),
                "inside_loop": bool(place.path),
                "conditional": place.conditional,
                "share": place.share,
                "overlapped": same[0].overlapped,
                "instructions": len(same),
                "arrays": sum(one.arrays for one in same),
                "count": None if times is None else times * len(same),
                "bytes_once": once,
                "bytes": None if times is None else times * once,
            }
        )
    return rows


def kernel_rows(found: Iterable[Kernel], counts: StepCounts | None = None) -> list[dict[str, Any]]:
    """Custom calls by target: instructions, runs per step (null where not known), whether some are in a branch.

    Those in a branch run at most so often: of attention's kernels for packed documents one branch runs.
    """

    def target(one: Kernel) -> str:
        return one.target

    rows = []
    for name, group in groupby(sorted(found, key=target), target):
        places = [one.place for one in group]
        known = [times for place in places if (times := runs(place, counts)) is not None]
        rows.append(
            {
                "target": name,
                "instructions": len(places),
                "count": sum(known) if len(known) == len(places) else None,
                "conditional": any(place.conditional for place in places),
            }
        )
    return rows
