"""The text of a compiled program (scheduled HLO): computations made of instructions, in execution order."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

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
START, DONE = "-start", "-done"
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


def arrays(shape: str) -> list[tuple[str, int]]:
    """(type, number of elements) of each array of a shape: "(f32[2,3]{1,0}, s8[4])" -> [("f32", 6), ("s8", 4)]."""
    return [
        (kind, prod(int(size) for size in dims.replace("<=", "").split(",") if size))
        for kind, dims in _ARRAY.findall(shape)
    ]


def size(shape: str) -> int:
    """Bytes of all arrays of a shape."""
    return sum(-(-elements * _bits(kind) // 8) for kind, elements in arrays(shape))


def _bits(kind: str) -> int:
    """f32 -> 32, f8e4m3fn -> 8, pred -> 8; tokens and other opaque types have none."""
    width = re.match(r"[a-z]+(\d+)", kind)
    return int(width[1]) if width else 8 * (kind == "pred")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    """Names of instructions of the same computation."""
    attributes: str
    """What follows the operands."""

    @property
    def callees(self) -> dict[str, list[str]]:
        """Computations it runs: under calls, to_apply, body, condition, branches."""
        callees: dict[str, list[str]] = {}
        for role, name in _CALLEES.findall(self.attributes):
            callees.setdefault("branches" if role.endswith("_computation") else role, []).append(name)
        for names in _BRANCHES.findall(self.attributes):
            callees.setdefault("branches", []).extend(name.strip(" %") for name in names.split(","))
        return callees

    @property
    def trips(self) -> int | None:
        """Trip count of a while loop; None where the compiler does not know it."""
        known = _TRIPS.search(self.attributes)
        return int(known[1]) if known else None

    @property
    def share(self) -> float | None:
        """Share of the ticks in which a conditional or a loop of at most one trip runs; None if its name has none."""
        named = _RUNS.search(self.origin)
        return int(named[1]) / int(named[2]) if named else None

    @property
    def origin(self) -> str:
        """Path of the operation in the traced program; may be empty."""
        named = _ORIGIN.search(self.attributes)
        return named[1] if named else ""

    @property
    def target(self) -> str | None:
        """Target of a custom call."""
        named = _TARGET.search(self.attributes) if self.opcode == "custom-call" else None
        return named[1] if named else None

    @property
    def is_matmul(self) -> bool:
        """Whether it is a matrix product, without what it calls."""
        return self.opcode in MATMULS or bool(self.target and MATMUL_KERNELS.search(self.target))


type Computation = dict[str, Instruction]
"""Instructions by name, in execution order."""


@dataclass(frozen=True)
class Program:
    """A compiled program: what each device runs."""

    computations: dict[str, Computation]
    """By name; callees come before their callers."""
    entry: str

    @classmethod
    def read(cls, text: str) -> "Program":
        """Parse `compiled.as_text()`. Raises ValueError for other text."""
        computations: dict[str, Computation] = {}
        entry, current = "", None
        for line in text.splitlines():
            if current is not None and line.startswith("}"):
                current = None
            elif current is None and (head := _HEAD.match(line)):
                current = computations[head[2]] = {}
                entry = head[2] if head[1] else entry
            elif current is not None and (instruction := _instruction(line)):
                current[instruction.name] = instruction
        if not entry:
            raise ValueError("not the text of a compiled program: it has no ENTRY computation")
        return cls(computations, entry)

    def called(self, instruction: Instruction, *roles: str) -> Iterator[str]:
        """Names of the computations an instruction calls, in the given roles (default: all)."""
        for role, names in instruction.callees.items():
            if not roles or role in roles:
                yield from (name for name in names if name in self.computations)

    def matmuls(self, instruction: Instruction) -> int:
        """Matrix products in it and in all it calls; a loop's body counts once."""
        return instruction.is_matmul + sum(self._matmuls_of[name] for name in self.called(instruction))

    @cached_property
    def _matmuls_of(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for name, computation in self.computations.items():
            counts[name] = sum(
                one.is_matmul + sum(counts.get(callee, 0) for callee in self.called(one))
                for one in computation.values()
            )
        return counts


@dataclass(frozen=True, slots=True)
class Place:
    """Where an instruction is: the loops around it, outermost first."""

    path: tuple[int, ...] = ()
    """Number of each loop among its siblings, from 1 in execution order; () is outside all loops."""
    trips: tuple[int | None, ...] = ()
    """Trip count of each loop, per run of the loop around it; None where the compiler does not know it."""
    conditional: bool = False
    """Whether it is in a branch of unknown frequency: it then runs at most `times` times."""
    share: float = 1.0
    """Fraction of those runs that is not skipped, as the names of conditionals and loops say."""

    def inside(self, loop: Instruction, number: int) -> "Place":
        """In the body of a while loop, the `number`th one here."""
        known = loop.trips is not None or loop.share is None
        trips, share = (loop.trips, 1.0) if known else (1, loop.share or 1.0)
        return Place((*self.path, number), (*self.trips, trips), self.conditional, self.share * share)

    def branch(self, one: Instruction) -> "Place":
        """In the branches of a conditional."""
        return Place(self.path, self.trips, self.conditional or one.share is None, self.share * (one.share or 1.0))

    @property
    def name(self) -> str:
        """Such as "1.2": the second loop in the first; "" outside all loops."""
        return ".".join(map(str, self.path))

    @property
    def times(self) -> int | None:
        """Runs per step: the product of the trip counts, without what is skipped; None if one is unknown."""
        return None if None in self.trips else self.times_given(1)

    def times_given(self, unknown_trips: int) -> int:
        """Runs per step if an outermost loop of unknown trip count runs so often; see `rounds`."""
        return round(rounds(self.trips, unknown_trips) * self.share)


def rounds(trips: Sequence[int | None], unknown_trips: int = 1) -> int:
    """Product of trip counts, outermost first.

    An outermost loop of unknown trip count (None) is taken to run `unknown_trips` times, inner ones once.
    """
    return prod((1 if depth else unknown_trips) if count is None else count for depth, count in enumerate(trips))


def _instruction(line: str) -> Instruction | None:
    named = _LINE.match(line)
    if not named:
        return None
    start = named.end()
    end = _closing(line, start) if line[start] == "(" else line.find(" ", start)
    opcode = _OPCODE.match(line, end)
    if not opcode:
        return None
    last = _closing(line, opcode.end() - 1)
    operands = tuple(_NAME.findall(line[opcode.end() : last]))
    return Instruction(named[1], line[start:end], opcode[1], operands, line[last:])


def _closing(line: str, start: int) -> int:
    """The place after the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(line)):
        depth += (line[place] == "(") - (line[place] == ")")
        if depth == 0:
            return place + 1
    return len(line)
