"""The text of a compiled program (scheduled HLO) as computations made of instructions, in the order they run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

MATMULS = ("dot", "convolution", "ragged-dot", "scaled-dot")
MATMUL_KERNELS = re.compile(r"gemm|matmul|blas|fmha|cudnn|conv|triton|mosaic|_dot", re.IGNORECASE)
"""Targets of custom calls that do a layer's arithmetic rather than bookkeeping."""

_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_LINE = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = ")
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\]")
_OPCODE = re.compile(r"\s*([\w-]+)\(")
_NAME = re.compile(r"%([\w.-]+)")
_CALLEES = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{(.*?)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_RUNS = re.compile(r'op_name="[^"]*\bruns_(\d+)_of_(\d+)/(?:while|cond)"')
"""Written by pipeline.executor on what it does in some ticks only."""
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


def arrays(shape: str) -> list[tuple[str, int]]:
    """(type, number of elements) of each array of a shape: "(f32[2,3]{1,0}, s8[4])" -> [("f32", 6), ("s8", 4)]."""
    found = []
    for kind, dims in _ARRAY.findall(shape):
        elements = 1
        for size in dims.replace("<=", "").split(","):
            elements *= int(size) if size else 1
        found.append((kind, elements))
    return found


def size(shape: str) -> int:
    """Bytes of all arrays of a shape."""
    return sum(-(-elements * _bits(kind) // 8) for kind, elements in arrays(shape))


def _bits(kind: str) -> int:
    """f32 -> 32, f8e4m3fn -> 8, pred -> 8; tokens and other opaque things have none."""
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
        found: dict[str, list[str]] = {}
        for role, name in _CALLEES.findall(self.attributes):
            found.setdefault("branches" if role.endswith("_computation") else role, []).append(name)
        for names in _BRANCHES.findall(self.attributes):
            found.setdefault("branches", []).extend(name.strip(" %") for name in names.split(","))
        return found

    @property
    def trips(self) -> int | None:
        """How many times a while loop runs, where the compiler knows."""
        known = _TRIPS.search(self.attributes)
        return int(known[1]) if known else None

    @property
    def share(self) -> float | None:
        """Of a loop that runs once or not at all, or of a branch: how often it runs, if it says so."""
        told = _RUNS.search(self.attributes)
        return int(told[1]) / int(told[2]) if told else None

    @property
    def target(self) -> str | None:
        """What a custom call calls."""
        found = _TARGET.search(self.attributes) if self.opcode == "custom-call" else None
        return found[1] if found else None

    @property
    def is_matmul(self) -> bool:
        """Whether it is a matrix product by itself."""
        return self.opcode in MATMULS or bool(self.target and MATMUL_KERNELS.search(self.target))


type Computation = dict[str, Instruction]
"""Instructions by name, in the order they run."""


@dataclass(frozen=True)
class Program:
    """A compiled program: what each device runs."""

    computations: dict[str, Computation]
    """By name; callees come before their callers."""
    entry: str

    @classmethod
    def read(cls, text: str) -> "Program":
        """From the text of `compiled.as_text()`. Raises ValueError where it is not that."""
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
        """Names of the computations an instruction runs, of the given roles (default: all)."""
        for role, names in instruction.callees.items():
            if not roles or role in roles:
                yield from (name for name in names if name in self.computations)

    def matmuls(self, instruction: Instruction) -> int:
        """Matrix products in it and in all it runs once: a loop's body counts once."""
        return instruction.is_matmul + sum(self._matmuls_of[name] for name in self.called(instruction))

    @cached_property
    def _matmuls_of(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, computation in self.computations.items():
            found[name] = sum(
                one.is_matmul + sum(found.get(callee, 0) for callee in self.called(one)) for one in computation.values()
            )
        return found


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
