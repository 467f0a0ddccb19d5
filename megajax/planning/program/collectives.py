"""The collectives of a compiled program: kind, mesh axes, bytes, the loops around them, and what hides them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, groupby
from math import prod
from typing import Any

import numpy as np

from megajax.planning.program.hlo import (
    COLLECTIVES,
    DONE,
    START,
    Computation,
    Instruction,
    Place,
    Program,
    arrays,
    size,
)

_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_TILED = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\((.*?)\))? ?\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_TILES = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'?([\w.-]+)'?=(\d+)")
_USED = re.compile(r"'([\w.-]+)'(?::\((\d+)\)(\d+))?")


@dataclass(frozen=True, slots=True)
class Groups:
    """The device groups of one collective."""

    axes: tuple[str, ...]
    """Mesh axes along which the members of a group differ, outermost first."""
    size: int
    """Devices in a group; of a permute, the product of its axes."""
    whole: bool = True
    """False if a group holds only some of the devices along its axes."""

    @property
    def name(self) -> str:
        """Such as "tensor", "data+context", or "tensor (part)"."""
        return "+".join(self.axes) + ("" if self.whole else " (part)")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective instruction; collectives that the compiler combined are one."""

    kind: str
    groups: Groups
    place: Place
    bytes: int
    """Of one device and one run, on the full (gathered, unreduced) side: the result of an all-gather, the operands of
    all others."""
    arrays: int
    """Arrays it moves at once."""
    elements: int
    """Elements of its results on one device."""
    overlapped: bool
    """Whether matmuls, or a loop with matmuls, are scheduled between its start and its end."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One custom call."""

    target: str
    place: Place


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop, or the program outside all loops."""

    place: Place
    matmuls: int
    """Matrix products of one run of the body, without those of inner loops."""


@dataclass(frozen=True)
class Contents:
    """What a program runs, in execution order."""

    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]
    loops: tuple[Loop, ...]


def read(text: str, mesh: Mapping[str, int]) -> Contents:
    """Contents of a compiled program from `compiled.as_text()`; mesh: axis -> size, outermost first.

    Collectives over groups of one device, which move nothing, are left out. Raises ValueError for other text.
    """
    reader = _Reader(Program.read(text), mesh)
    reader.body(reader.program.entry, Place())
    return Contents(tuple(reader.collectives), tuple(reader.kernels), tuple(reader.loops))


class _Reader:
    """One walk over all computations that a program runs."""

    def __init__(self, program: Program, mesh: Mapping[str, int]):
        self.program, self.mesh = program, mesh
        self.collectives: list[Collective] = []
        self.kernels: list[Kernel] = []
        self.loops: list[Loop] = []

    def body(self, name: str, place: Place, *more: str) -> None:
        """Read the body of a loop, or the whole program; more: computations that run with it (a loop's condition)."""
        index = len(self.loops)
        self.loops.append(Loop(place, 0))
        numbers = count(1)
        matmuls = sum(self.computation(each, place, numbers) for each in (name, *more))
        self.loops[index] = Loop(place, matmuls)

    def computation(self, name: str, place: Place, numbers: Iterator[int]) -> int:
        """Read one computation; gives its number of matmuls outside inner loops."""
        computation = self.program.computations[name]
        done = _ends(computation)
        work = [self.program.matmuls(one) for one in computation.values()]
        total = 0
        for index, one in enumerate(computation.values()):
            collective = self.collective(one, computation)
            if collective is not None:
                last = done.get(one.name, len(work)) if one.opcode.endswith(START) else index
                # A start and end with is_sync run as one blocking operation.
                overlapped = any(work[index + 1 : last]) and '"is_sync":true' not in one.attributes
                self.add(*collective, place, overlapped)
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
        """Targets of custom calls, also of those inside a fusion."""
        if one.target is not None:
            yield one.target
        for name in self.program.called(one, "calls"):
            for inner in self.program.computations[name].values():
                yield from self.targets(inner)

    def collective(self, one: Instruction, home: Computation) -> tuple[Instruction, Computation] | None:
        """The collective that an instruction is, starts or wraps (fusion, async-start), and its computation."""
        if one.opcode.removesuffix(START) in COLLECTIVES:
            return one, home
        if one.opcode == "fusion" or one.opcode.endswith(START):
            for name in self.program.called(one, "calls"):
                inner = self.program.computations[name]
                for each in inner.values():
                    if (wrapped := self.collective(each, inner)) is not None:
                        return wrapped
        return None

    def add(self, one: Instruction, home: Computation, place: Place, overlapped: bool) -> None:
        kind = one.opcode.removesuffix(START)
        groups = groups_of(one.attributes, self.mesh)
        if not groups.axes:
            return
        # The further operands of a ragged exchange are offsets and sizes.
        operands = one.operands[:1] if kind == "ragged-all-to-all" else one.operands
        shapes = [home[name].shape for name in operands]
        total = sum(size(shape) for shape in shapes)
        elements = sum(number for shape in shapes for _, number in arrays(shape))
        if kind == "all-gather":
            total, elements = total * groups.size, elements * groups.size
        elif kind == "reduce-scatter":
            elements //= groups.size
        self.collectives.append(Collective(kind, groups, place, total, len(operands), elements, overlapped))


def _ends(computation: Computation) -> dict[str, int]:
    """Name of each asynchronous start -> index of its end in the computation."""
    started = {}
    ends = {}
    for index, one in enumerate(computation.values()):
        origin = started.get(one.operands[0], one.operands[0]) if one.operands else ""
        if one.opcode == "async-update":
            started[one.name] = origin
        elif one.opcode.endswith(DONE):
            ends[origin] = index
    return ends


def runs(place: Place, unknown_trips: int | None) -> int | None:
    """Runs per step. unknown_trips: see `hlo.rounds`; None: the result is None where a trip count is unknown."""
    return place.times if unknown_trips is None else place.times_given(unknown_trips)


def grouped(collectives: Iterable[Collective], unknown_trips: int | None = None) -> list[dict[str, Any]]:
    """Collectives with the same place, kind, axes and overlap, summed: rows of a table, in the order of places.

    kind; axis: "tensor", "data+context"; loop: "1.2" is the second loop in the first, "" outside all loops; trips: of
    the loops around, outermost first; inside_loop; conditional; share: fraction of the runs that is not skipped;
    overlapped; instructions: their number in the program; arrays: how many these move; count: runs per step;
    bytes_once: of one device, each run once; bytes: of one device per step. count and bytes are None as in `runs`.
    """

    def key(one: Collective) -> tuple:
        place = one.place
        return place.path, one.kind, one.groups.name, not one.overlapped, place.conditional, place.share

    rows = []
    for _, group in groupby(sorted(collectives, key=key), key):
        same = list(group)
        place, once = same[0].place, sum(one.bytes for one in same)
        times = runs(place, unknown_trips)
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


def kernel_rows(kernels: Iterable[Kernel], unknown_trips: int | None = None) -> list[dict[str, Any]]:
    """Custom calls by target: instructions, count (runs per step, None as in `runs`), conditional.

    Calls in a branch run at most `count` times: of the attention kernels for packed documents one branch runs.
    """
    places: dict[str, list[Place]] = {}
    for one in kernels:
        places.setdefault(one.target, []).append(one.place)
    rows = []
    for target, where in sorted(places.items()):
        counts = [runs(place, unknown_trips) for place in where]
        rows.append(
            {
                "target": target,
                "instructions": len(where),
                "count": None if None in counts else sum(n for n in counts if n is not None),
                "conditional": any(place.conditional for place in where),
            }
        )
    return rows


def groups_of(attributes: str, mesh: Mapping[str, int]) -> Groups:
    """The groups that a collective's attributes give in one of several forms; mesh: axis -> size.

    The compiler numbers devices by their position in the mesh. Raises ValueError for an unknown form.
    """
    return _groups_of(attributes, tuple(mesh.items()))


@lru_cache(maxsize=1024)
def _groups_of(attributes: str, mesh: tuple[tuple[str, int], ...]) -> Groups:
    sizes = dict(mesh)
    devices = prod(sizes.values())
    if pairs := _PAIRS.search(attributes):
        return _moved(_rows(pairs[1]), sizes)
    if listed := _LISTED.search(attributes):
        return _along(_rows(listed[1]) or [list(range(devices))], sizes)
    if tiled := _TILED.search(attributes):
        return _along(_order(tiled[1]).tolist(), sizes)
    if named := _NAMED.search(attributes):
        return _along(_by_name(*named.groups()), sizes)
    raise ValueError(f"a collective whose groups can't be read: {attributes[:300]}")


def _rows(text: str) -> list[list[int]]:
    return [[int(place) for place in row.split(",")] for row in re.findall(r"\{([\d,]+)\}", text)]


def _order(text: str) -> np.ndarray:
    """ "[2,4]<=[4,2]T(1,0)" -> the numbers of [4, 2], transposed, as an array [2, 4]."""
    tiles = _TILES.match(text)
    if tiles is None:
        raise ValueError(f"not an order of devices: {text}")
    shape, dims, turned = ([int(n) for n in part.split(",")] if part else [] for part in tiles.groups())
    order = np.arange(prod(shape)).reshape(dims or shape)
    return order.transpose(turned or range(order.ndim)).reshape(shape)


def _by_name(axes: str, order: str | None, used: str) -> list[list[int]]:
    """Groups along the used axes, or sub-axes 'name':(stride)size, of a mesh written out in the text."""
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    places = np.arange(prod(sizes.values())) if order is None else _order(order).ravel()
    split: list[tuple[int, bool]] = []
    for name, whole in sizes.items():
        parts = [
            (int(before or 1), int(part or whole)) for part_of, before, part in _USED.findall(used) if part_of == name
        ]
        done = 1
        for before, part in sorted(parts):
            split += [(before // done, False), (part, True)]
            done = before * part
        split.append((whole // done, False))
    grid = places.reshape([length for length, _ in split])
    chosen = [dim for dim, (_, taken) in enumerate(split) if taken]
    last = np.moveaxis(grid, chosen, range(grid.ndim - len(chosen), grid.ndim))
    return last.reshape(-1, prod(split[dim][0] for dim in chosen)).tolist()


def _coordinates(places: list[int], sizes: dict[str, int]) -> np.ndarray:
    """[axes, places]."""
    return np.array(np.unravel_index(np.array(places), tuple(sizes.values())))


def _along(groups: list[list[int]], sizes: dict[str, int]) -> Groups:
    differing = np.zeros(len(sizes), bool)
    for group in groups:
        coordinates = _coordinates(group, sizes)
        differing |= (coordinates != coordinates[:, :1]).any(axis=1)
    axes = tuple(name for name, differs in zip(sizes, differing, strict=True) if differs)
    members = max(len(group) for group in groups)
    return Groups(axes, members, members == prod(sizes[name] for name in axes))


def _moved(pairs: list[list[int]], sizes: dict[str, int]) -> Groups:
    """Groups of a permute: the axes along which any pair differs."""
    if not pairs:
        return Groups((), 1)
    ends = np.array(pairs).T
    differing = (_coordinates(ends[0], sizes) != _coordinates(ends[1], sizes)).any(axis=1)
    axes = tuple(name for name, differs in zip(sizes, differing, strict=True) if differs)
    return Groups(axes, prod(sizes[name] for name in axes))
