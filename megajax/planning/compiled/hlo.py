"""The text of a compiled program (scheduled HLO): its instructions, loops and collectives.

Of each collective: kind, mesh axes, bytes, the loops around it, and whether matmuls overlap with it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from math import prod

import numpy as np

MATMULS = ("dot", "convolution", "ragged-dot", "scaled-dot")
MATMUL_KERNELS = re.compile(r"gemm|matmul|blas|fmha|cudnn|conv|triton|mosaic|_dot", re.IGNORECASE)
"""Targets of custom calls that do a layer's arithmetic rather than bookkeeping."""
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
START, FINISH = "-start", "-done"
"""Suffixes of the two halves of an asynchronous operation."""

_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_LINE = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = ")
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\]")
_OPCODE = re.compile(r"\s*([\w-]+)\(")
_NAME = re.compile(r"%([\w.-]+)")
_CALLEES = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{(.*?)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ORIGIN = re.compile(r'op_name="([^"]*)"')
_RUNS = re.compile(r"\bruns_(\d+)_of_(\d+)/(?:while|cond)$")
"""Written by pipeline.executor into the name of what runs in some ticks only."""
_TARGET = re.compile(r'custom_call_target="([^"]*)"')

_TILES = re.compile(r"\[((?:\d+,)*)(\d+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_TILED = re.compile(rf"replica_groups={_TILES.pattern}")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\((.*?)\))? ?\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_AXIS = re.compile(r"'?([\w.-]+)'?=(\d+)")
_USED = re.compile(r"'([\w.-]+)'(?::\((\d+)\)(\d+))?")


def shapes(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(type, sizes) of each array of a shape: "(f32[2,3]{1,0}, s8[4])" -> [("f32", (2, 3)), ("s8", (4,))]."""
    return [
        (kind, tuple(int(size) for size in dims.replace("<=", "").split(",") if size))
        for kind, dims in _ARRAY.findall(shape)
    ]


def arrays(shape: str) -> list[tuple[str, int]]:
    """(type, number of elements) of each array of a shape: "(f32[2,3]{1,0}, s8[4])" -> [("f32", 6), ("s8", 4)]."""
    return [(kind, prod(sizes)) for kind, sizes in shapes(shape)]


def elements(shape: str) -> int:
    """Elements of all arrays of a shape."""
    return sum(count for _, count in arrays(shape))


def size(shape: str) -> int:
    """Bytes of all arrays of a shape."""
    total = 0
    for kind, elements in arrays(shape):
        # f32 -> 32 bits, f8e4m3fn -> 8, pred -> 8; tokens and other opaque types have none.
        width = re.match(r"[a-z]+(\d+)", kind)
        total += -(-elements * (int(width[1]) if width else 8 * (kind == "pred")) // 8)
    return total


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    """Names of instructions of the same computation."""
    attributes: str
    """The text after the operands."""

    @property
    def callees(self) -> dict[str, list[str]]:
        """Names of computations by role: calls, to_apply, body, condition, branches."""
        callees: dict[str, list[str]] = {}
        for role, name in _CALLEES.findall(self.attributes):
            callees.setdefault("branches" if role.endswith("_computation") else role, []).append(name)
        for names in _BRANCHES.findall(self.attributes):
            callees.setdefault("branches", []).extend(name.strip(" %") for name in names.split(","))
        return callees

    @property
    def trips(self) -> int | None:
        """Trip count of a while loop; None where the compiler does not know it."""
        count = _TRIPS.search(self.attributes)
        return int(count[1]) if count else None

    @property
    def share(self) -> float | None:
        """By its name, the share of ticks that a conditional runs in, or the mean trips of a loop; None without one."""
        ticks = _RUNS.search(self.origin)
        return int(ticks[1]) / int(ticks[2]) if ticks else None

    @property
    def origin(self) -> str:
        """Path of the operation in the traced program; may be empty."""
        path = _ORIGIN.search(self.attributes)
        return path[1] if path else ""

    @property
    def target(self) -> str | None:
        """Target of a custom call."""
        target = _TARGET.search(self.attributes) if self.opcode == "custom-call" else None
        return target[1] if target else None

    @property
    def asynchronous(self) -> bool:
        """Whether it starts an operation that ends in another instruction. A start with is_sync runs as one piece."""
        return self.opcode.endswith(START) and '"is_sync":true' not in self.attributes

    @property
    def is_matmul(self) -> bool:
        """Whether it is a matrix product itself; its callees do not count."""
        return self.opcode in MATMULS or bool(self.target and MATMUL_KERNELS.search(self.target))


type Computation = dict[str, Instruction]
"""Instructions by name, in execution order."""


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled program: what each device runs."""

    computations: dict[str, Computation]
    """Computations by name; callees come before their callers."""
    entry: str

    @classmethod
    def read(cls, text: str) -> "CompiledProgram":
        """Parse `compiled.as_text()`. Raises ValueError for other text."""
        computations: dict[str, Computation] = {}
        entry, current = "", None
        for line in text.splitlines():
            if current is not None and line.startswith("}"):
                current = None
            elif current is None and (head := _HEAD.match(line)):
                current = computations[head[2]] = {}
                entry = head[2] if head[1] else entry
            elif current is not None and (op := _instruction(line)):
                current[op.name] = op
        if not entry:
            raise ValueError("not the text of a compiled program: it has no ENTRY computation")
        return cls(computations, entry)

    def callees_of(self, op: Instruction, role: str | None = None) -> Iterator[str]:
        """Names of the computations that an instruction calls, in one role or in all."""
        callees = op.callees
        roles = callees.values() if role is None else [callees.get(role, [])]
        return (name for names in roles for name in names if name in self.computations)

    def matmuls(self, op: Instruction) -> int:
        """Matrix products in it and in all it calls; a loop's body counts once."""
        return op.is_matmul + sum(self._matmuls_of[name] for name in self.callees_of(op))

    def collective(self, op: Instruction, home: Computation) -> tuple[Instruction, Computation] | None:
        """The collective that an instruction is, starts or wraps (fusion, async-start), and its computation."""
        if op.opcode.removesuffix(START) in COLLECTIVES:
            return op, home
        if op.opcode == "fusion" or op.opcode.endswith(START):
            for name in self.callees_of(op, "calls"):
                inner = self.computations[name]
                for part in inner.values():
                    if (wrapped := self.collective(part, inner)) is not None:
                        return wrapped
        return None

    def inside(self, op: Instruction, home: Computation) -> Iterator[tuple[Instruction, Computation]]:
        """The instruction, or those of the computations that it calls, with the computation of each."""
        callees = [*self.callees_of(op, "calls")]
        if not callees:
            yield op, home
        for name in callees:
            inner = self.computations[name]
            for part in inner.values():
                yield from self.inside(part, inner)

    @cached_property
    def _matmuls_of(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for name, computation in self.computations.items():
            calls = (callee for op in computation.values() for callee in self.callees_of(op))
            products = sum(op.is_matmul for op in computation.values())
            counts[name] = products + sum(counts.get(callee, 0) for callee in calls)
        return counts


@dataclass(frozen=True, slots=True)
class LoopNest:
    """Where an instruction is: the loops around it, outermost first."""

    path: tuple[int, ...] = ()
    """Number of each loop among its siblings, from 1 in execution order; () is outside all loops."""
    trips: tuple[int | None, ...] = ()
    """Trip count of each loop, per run of the loop around it; None where the compiler does not know it."""
    conditional: bool = False
    """Whether it is in a branch of unknown frequency: `runs` is then an upper bound."""
    share: float = 1.0
    """Fraction of those runs that is not skipped, by the names of conditionals and loops."""

    def inside(self, loop: Instruction, number: int) -> "LoopNest":
        """The place inside the body of a while loop, the `number`th at this place."""
        counted = loop.trips is not None or loop.share is None
        trips, share = (loop.trips, 1.0) if counted else (1, loop.share or 1.0)
        return LoopNest((*self.path, number), (*self.trips, trips), self.conditional, self.share * share)

    def branch(self, op: Instruction) -> "LoopNest":
        """The place inside the branches of a conditional."""
        return LoopNest(self.path, self.trips, self.conditional or op.share is None, self.share * (op.share or 1.0))

    @property
    def name(self) -> str:
        """Such as "1.2": the second loop in the first; "" outside all loops."""
        return ".".join(map(str, self.path))

    def runs(self, unknown_trips: int | None = None) -> int | None:
        """Runs per step, without what is skipped; None if a trip count is unknown. unknown_trips: see `rounds`."""
        if unknown_trips is None and None in self.trips:
            return None
        return round(rounds(self.trips, unknown_trips or 1) * self.share)


def rounds(trips: Sequence[int | None], unknown_trips: int = 1) -> int:
    """Product of trip counts, outermost first.

    An outermost loop of unknown trip count (None) is taken to run `unknown_trips` times, inner ones once.
    """
    return prod((1 if depth else unknown_trips) if count is None else count for depth, count in enumerate(trips))


def _instruction(line: str) -> Instruction | None:
    name = _LINE.match(line)
    if not name:
        return None
    start = name.end()
    end = closing(line, start) if line[start] == "(" else line.find(" ", start)
    opcode = _OPCODE.match(line, end)
    if not opcode:
        return None
    last = closing(line, opcode.end() - 1)
    operands = tuple(_NAME.findall(line[opcode.end() : last]))
    return Instruction(name[1], line[start:end], opcode[1], operands, line[last:])


def closing(line: str, start: int) -> int:
    """The place after the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(line)):
        depth += (line[place] == "(") - (line[place] == ")")
        if depth == 0:
            return place + 1
    return len(line)


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
class Message:
    """What one collective moves."""

    kind: str
    groups: Groups
    bytes: int
    """Bytes of one device and one run: the result of an all-gather, the operands of other kinds."""
    arrays: int
    """Arrays it moves at once."""
    elements: int
    """Elements of its results on one device."""


def message(op: Instruction, home: Computation, mesh: Mapping[str, int]) -> Message | None:
    """What a collective moves; None if its groups are of one device. mesh: axis -> size, outermost first."""
    kind, groups = op.opcode.removesuffix(START), groups_of(op.attributes, mesh)
    if not groups.axes:
        return None
    parts = [home[name].shape for name in op.operands]
    if kind == "ragged-all-to-all":
        # Of rows, buffer, offsets and sizes: no more is sent than both of the first hold.
        parts = [min(parts[:2], key=size)]
    total, numbers = sum(map(size, parts)), sum(map(elements, parts))
    if kind == "all-gather":
        total, numbers = total * groups.size, numbers * groups.size
    elif kind == "reduce-scatter":
        numbers //= groups.size
    return Message(kind, groups, total, len(parts), numbers)


@dataclass(frozen=True, slots=True)
class Collective(Message):
    """One collective instruction; collectives that the compiler combined are one."""

    name: str
    """Name of the instruction, or of that which starts or wraps it."""
    place: LoopNest
    overlapped: bool
    """Whether matmuls, or a loop with matmuls, are scheduled between its start and its end."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop, or the program outside all loops."""

    place: LoopNest
    matmuls: int
    """Matrix products of one run of the body, without those of inner loops."""


@dataclass(frozen=True)
class Contents:
    """Collectives and loops of a program, in execution order."""

    collectives: tuple[Collective, ...]
    loops: tuple[Loop, ...]


def read(text: str, mesh: Mapping[str, int]) -> Contents:
    """Contents of a compiled program from `compiled.as_text()`; mesh: axis -> size, outermost first.

    Collectives over groups of one device, which move nothing, are left out. Raises ValueError for other text.
    """
    reader = _Reader(CompiledProgram.read(text), mesh)
    reader.body(LoopNest(), reader.program.entry)
    return Contents(tuple(reader.collectives), tuple(reader.loops))


class _Reader:
    """One walk over all computations that a program runs."""

    def __init__(self, program: CompiledProgram, mesh: Mapping[str, int]):
        self.program, self.mesh = program, mesh
        self.collectives: list[Collective] = []
        self.loops: list[Loop] = []

    def body(self, place: LoopNest, *names: str) -> None:
        """Read the whole program, or the body and the condition of a loop."""
        index, numbers = len(self.loops), count(1)
        matmuls = sum(self.computation(name, place, numbers) for name in names)
        self.loops.insert(index, Loop(place, matmuls))

    def computation(self, name: str, place: LoopNest, numbers: Iterator[int]) -> int:
        """Read one computation; gives its number of matmuls outside inner loops."""
        computation = self.program.computations[name]
        ends = _end_indices(computation)
        work = [self.program.matmuls(op) for op in computation.values()]
        total = 0
        for index, op in enumerate(computation.values()):
            if (collective := self.program.collective(op, computation)) is not None:
                last = ends.get(op.name, len(work)) if op.asynchronous else index
                self.add(op.name, *collective, place, any(work[index + 1 : last]))
            elif op.opcode == "while":
                names = *op.callees["body"], *op.callees.get("condition", ())
                self.body(place.inside(op, next(numbers)), *names)
            elif op.opcode in ("conditional", "call") or op.opcode.endswith(START):
                inner = place.branch(op) if op.opcode == "conditional" else place
                total += sum(self.computation(callee, inner, numbers) for callee in self.program.callees_of(op))
            else:
                total += work[index]
        return total

    def add(self, name: str, op: Instruction, home: Computation, place: LoopNest, overlapped: bool) -> None:
        if (moved := message(op, home, self.mesh)) is not None:
            sizes = moved.bytes, moved.arrays, moved.elements
            self.collectives.append(Collective(moved.kind, moved.groups, *sizes, name, place, overlapped))


def _end_indices(computation: Computation) -> dict[str, int]:
    """Name of each asynchronous start -> index of its end in the computation."""
    started, indices = {}, {}
    for index, op in enumerate(computation.values()):
        origin = started.get(op.operands[0], op.operands[0]) if op.operands else ""
        if op.opcode == "async-update":
            started[op.name] = origin
        elif op.opcode.endswith(FINISH):
            indices[origin] = index
    return indices


def groups_of(attributes: str, mesh: Mapping[str, int]) -> Groups:
    """The groups that a collective's attributes give in one of several forms; mesh: axis -> size.

    The compiler numbers devices by their position in the mesh. Raises ValueError for an unknown form.
    """
    names, sizes = zip(*mesh.items(), strict=True)
    if pairs := _PAIRS.search(attributes):
        groups = _listed(pairs[1])
    elif listed := _LISTED.search(attributes):
        groups = _listed(listed[1]) if listed[1] else np.arange(prod(sizes))[None]
    elif tiled := _TILED.search(attributes):
        groups = _order(tiled).reshape(-1, int(tiled[2]))
    elif mesh_form := _NAMED.search(attributes):
        groups = _by_name(*mesh_form.groups())
    else:
        raise ValueError(f"a collective whose groups can't be read: {attributes[:300]}")
    places = np.stack(np.unravel_index(groups, sizes))  # [axes, groups, members]
    differing = (places != places[..., :1]).any((1, 2))
    along = prod(size for size, differs in zip(sizes, differing, strict=True) if differs)
    members = along if pairs else groups.shape[1]
    axes = tuple(name for name, differs in zip(names, differing, strict=True) if differs)
    return Groups(axes, members, members == along)


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in text.split(",")] if text else []


def _listed(text: str) -> np.ndarray:
    """ "{0,1},{2,3}" -> [[0, 1], [2, 3]]."""
    return np.array([_numbers(row) for row in re.findall(r"\{([\d,]+)\}", text)])


def _order(tiles: re.Match[str]) -> np.ndarray:
    """ "[2,4]<=[4,2]T(1,0)": the numbers of an array [4, 2], transposed."""
    shape, last, dims, axes = tiles.groups()
    sizes = _numbers(dims) or _numbers(f"{shape}{last}")
    return np.arange(prod(sizes)).reshape(sizes).transpose(_numbers(axes) or None).ravel()


def _by_name(axes: str, order: str | None, used: str) -> np.ndarray:
    """Groups along the used axes, or sub-axes 'name':(stride)size, of a mesh written out in the text."""
    split: list[tuple[int, bool]] = []
    for name, text in _AXIS.findall(axes):
        whole, stride = int(text), 1
        parts = [(int(before or 1), int(part or whole)) for axis, before, part in _USED.findall(used) if axis == name]
        for before, part in sorted(parts):
            split += [(before // stride, False), (part, True)]
            stride = before * part
        split.append((whole // stride, False))
    sizes, is_used = zip(*split, strict=True)
    # The used axes last: each group is a run of these.
    places = np.arange(prod(sizes)).reshape(sizes).transpose(np.argsort(is_used, kind="stable")).ravel()
    if order is not None and (tiles := _TILES.search(order)):
        places = _order(tiles)[places]
    return places.reshape(-1, prod(size for size, use in split if use))
