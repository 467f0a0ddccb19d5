"""Memory traffic of a compiled program, kernel by kernel, and its largest arrays.

Bytes are the least that a kernel needs: each operand is read once; of a sliced operand only the slice counts, of an
in-place update only the part that is updated. A kernel counts as often as it runs: by the trip counts of its loops and,
in a conditional, by the fraction of the runs that take its branch (see `_shares`). Grouped matmuls skip rows of experts
without tokens: of rows, only those that a balanced router fills count.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal, NamedTuple

from megajax.display.banner import Table
from megajax.planning.compiled import hlo
from megajax.planning.compiled.devices import GIB

type Work = Literal["matmul", "attention", "collective", "fill", "move", "cast", "compute"]
"""matmul, attention: kernels on tensor cores, with all that is fused into them; fill: writes a constant; move: slices,
updates, copies, transposes, concatenations, without arithmetic; cast: between dtypes; compute: the rest."""

CLASSES: dict[str, tuple[Work, ...]] = {"copies": ("fill", "move"), "elementwise": ("cast", "compute")}
CLASSES |= {"matmul": ("matmul",), "attention": ("attention",), "collective": ("collective",)}
"""Kinds of work by the class under which plans report them."""
COMMON_SCOPES = {"while", "body", "cond", "closed_call", "eval_jaxpr", "shard_map", "checkpoint"}
"""Parts of an operation's path that are not shown."""
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id"}
"""Opcodes that run no kernel."""
SLICING = {"slice", "dynamic-slice", "gather"}
MOVING = {"slice", "dynamic-slice", "copy", "transpose", "dynamic-update-slice", "concatenate", "reshape", "broadcast",
          "pad", "reverse", "iota"}  # fmt: skip
UPDATING = {"dynamic-update-slice": 1, "scatter": -1}
"""Opcodes that update a part of their first operand -> which operand is the part."""
THROUGH = {"bitcast", "convert", "reshape", "copy", "transpose"}
"""Opcodes for which a part of the result needs only the same part of the operand."""
OFFSETS = {"s32", "u32", "s64", "u64", "pred"}
"""Types of slice indices."""

_ONE_ARRAY = re.compile(r"(\w+\[[\d,]+\])")
_FUSED = re.compile(r"fused|wrapped")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel of a program."""

    name: str
    work: Work
    place: hlo.LoopNest
    shape: str
    """Shape of the result."""
    bytes_read: int
    """Bytes, of one device and one run."""
    bytes_written: int
    origin: str
    """Path of the operation in the traced program; may be empty."""
    target: str | None
    """Target of a custom call."""
    opcodes: frozenset[str]
    """Opcodes of all instructions fused into it, without FREE ones."""
    rounds: int
    """Runs per step of the loops around it, before skipping."""
    share: float = 1.0
    """Fraction of these runs that is not skipped and takes the branches it is in."""

    @property
    def bytes(self) -> int:
        """Read and written, by one device in one run."""
        return self.bytes_read + self.bytes_written

    @property
    def workspace(self) -> int:
        """Bytes of scratch arrays of a cuBLAS call, which count as written and are hardly used."""
        if self.work != "matmul" or "cublas" not in (self.target or "") or not self.shape.startswith("("):
            return 0
        return sum(size for kind, size in hlo.arrays(self.shape) if kind in ("s8", "u8"))

    @property
    def total(self) -> int:
        """Bytes of one device and step."""
        return round(self.bytes * self.rounds * self.share)


@dataclass(frozen=True)
class Audit:
    """A program's kernels in execution order."""

    kernels: tuple[CompiledKernel, ...]

    def by_work(self) -> dict[str, int]:
        """Bytes per step and device by kind of work."""
        sums = Counter[str]()
        for kernel in self.kernels:
            sums[kernel.work] += kernel.total
        return dict(sums)

    def by_class(self) -> dict[str, int]:
        """Bytes per step and device by class of work, with their sum as `total`."""
        totals = self.by_work()
        sums = {name: sum(totals.get(work, 0) for work in works) for name, works in CLASSES.items()}
        return {"total": sum(sums.values()), **sums}

    def workspace(self) -> int:
        """Bytes per step of the scratch arrays of cuBLAS calls."""
        return sum(round(kernel.rounds * kernel.share * kernel.workspace) for kernel in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        """Bytes of one device and step, under the names of a plan's JSON."""
        return {"bytes_per_step": self.by_class(), "bytes_of_workspace": self.workspace()}


class InstructionContext(NamedTuple):
    """What the bytes and the runs of an instruction depend on beside its text."""

    place: hlo.LoopNest = hlo.LoopNest()
    unknown_trips: int = 1
    """See `hlo.rounds`."""
    over_mean: float = 1.0
    """Rows that experts have room for over those that a balanced router fills."""


def audit(text: str, unknown_trips: int = 1, over_mean: float = 1.0) -> Audit:
    """Read `compiled.as_text()`. Raises ValueError for other text.

    unknown_trips, over_mean: see `InstructionContext`. Conditionals of unknown frequency that have an idle branch count
    as always working.
    """
    program = hlo.CompiledProgram.read(text)
    return Audit(
        tuple(_kernels(program, program.entry, InstructionContext(hlo.LoopNest(), unknown_trips, over_mean), count(1)))
    )


def _kernels(
    program: hlo.CompiledProgram, name: str, context: InstructionContext, numbers: Iterator[int]
) -> Iterator[CompiledKernel]:
    """Kernels of a computation and of all it calls."""
    computation, place = program.computations[name], context.place
    for op in computation.values():
        if op.opcode == "while":
            inner = context._replace(place=place.inside(op, next(numbers)))
            yield from _kernels(program, op.callees["body"][0], inner, count(1))
        elif op.opcode == "conditional":
            inside = context._replace(place=replace(place, conditional=True))
            names = program.callees_of(op, "branches")
            branches = [[*_kernels(program, branch, inside, numbers)] for branch in names]
            for branch, share in zip(branches, _shares(branches, op.share), strict=True):
                yield from (replace(kernel, share=share * kernel.share) for kernel in branch)
        elif op.opcode == "call":
            for callee in program.callees_of(op):
                yield from _kernels(program, callee, context, numbers)
        elif op.opcode not in FREE and not op.opcode.endswith(hlo.FINISH):
            yield kernel_of(program, op, computation, context)


def branch_shares(program: hlo.CompiledProgram, op: hlo.Instruction) -> list[tuple[str, float]]:
    """(computation, share of the runs) of each branch of a conditional, see `_shares`."""
    names = [*program.callees_of(op, "branches")]
    branches = [[*_kernels(program, name, InstructionContext(), count(1))] for name in names]
    return [*zip(names, _shares(branches, op.share), strict=True)]


def _shares(branches: Sequence[Sequence[CompiledKernel]], busy: float | None) -> list[float]:
    """Fraction of the runs in each branch of a conditional; busy: the share in its name, see `Instruction.share`.

    Where all branches compute attention and some call cuDNN, those are always taken: the others are for rows with more
    documents than cuDNN's layout has room for. Branches that only copy or fill are those of idle pipeline ticks; the
    others are taken in the `busy` share of the runs. Equal branches are taken equally often, as those of a switch over
    the chunks of a stage.
    """
    fused = [any("fmha" in (kernel.target or "") for kernel in branch) for branch in branches]
    attention = all(any(kernel.work == "attention" for kernel in branch) for branch in branches)
    idle = [all(kernel.work in CLASSES["copies"] for kernel in branch) for branch in branches]
    if attention and any(fused):
        return [is_fused / sum(fused) for is_fused in fused]
    if all(idle) or not any(idle):
        return [1 / len(branches)] * len(branches)
    busy = 1.0 if busy is None else busy
    return [(1 - busy) / sum(idle) if is_idle else busy / (len(idle) - sum(idle)) for is_idle in idle]


def kernel_of(
    program: hlo.CompiledProgram, root: hlo.Instruction, home: hlo.Computation, context: InstructionContext
) -> CompiledKernel:
    """The kernel of an instruction."""
    place, unknown_trips, over_mean = context
    inner = [program.computations[name] for name in program.callees_of(root, "calls")]
    body = inner[0] if inner else {root.name: root}
    if inner:
        bytes_read, bytes_written = _bytes_read(body), _bytes_written(next(reversed(body.values())), body)
    else:
        bytes_read, bytes_written = _unfused(root, home, over_mean if _is_grouped(root) else 1)
    return CompiledKernel(
        name=root.name,
        work=_work(program, root, body),
        place=place,
        shape=_result(root),
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        origin=root.origin,
        target=next((op.target for op in body.values() if op.target is not None), None),
        opcodes=frozenset(op.opcode for op in body.values()) - FREE,
        share=place.share,
        rounds=hlo.rounds(place.trips, unknown_trips),
    )


def _result(op: hlo.Instruction) -> str:
    """Shape of the result, also of an asynchronous start, whose shape is ((operands), result, context)."""
    if not op.opcode.endswith(hlo.START) or not op.shape.startswith("(("):
        return op.shape
    rest = op.shape[hlo.closing(op.shape, 1) :].lstrip(", ")
    return rest.rpartition(", u32[]")[0] or rest


def _work(program: hlo.CompiledProgram, root: hlo.Instruction, body: hlo.Computation) -> Work:
    opcodes = {op.opcode for op in body.values()} - FREE
    targets = [op.target or "" for op in body.values()]
    if any(opcode.removesuffix(hlo.START) in hlo.COLLECTIVES for opcode in opcodes | {root.opcode}):
        return "collective"
    of_pallas = "pallas_call" in root.attributes and not _is_grouped(root)
    if any("fmha" in target for target in targets) or of_pallas:
        return "attention"
    if program.matmuls(root):
        return "matmul"
    # Without the instructions that compute an index into an array: one integer.
    arrays = [(op.opcode, hlo.arrays(op.shape)) for op in body.values()]
    numbers = {op for op, parts in arrays if not all(kind in OFFSETS and n == 1 for kind, n in parts)} - FREE
    if numbers <= {"broadcast", "iota", "copy"} and not any(op.opcode == "parameter" for op in body.values()):
        return "fill" if len(body) > 1 or root.opcode in ("broadcast", "iota") else "move"
    if numbers <= MOVING:
        return "move"
    return "cast" if numbers <= MOVING | {"convert"} else "compute"


def _is_grouped(op: hlo.Instruction) -> bool:
    """Whether it is a grouped matmul, as Pallas kernels in Mosaic are."""
    return op.opcode == "ragged-dot" or "mosaic" in (op.target or "")


def _unfused(op: hlo.Instruction, home: hlo.Computation, over_mean: float) -> tuple[int, int]:
    """(read, written) of an instruction that is a kernel by itself; over_mean: see `_skipping`."""
    if op.opcode in SLICING or op.opcode == "dynamic-update-slice":
        part = hlo.size(op.shape if op.opcode in SLICING else home[op.operands[1]].shape)
        return part, part
    operands = (home[name].shape for name in op.operands if name in home)
    return sum(_skipping(shape, over_mean) for shape in operands), _skipping(_result(op), over_mean)


def _skipping(shape: str, over_mean: float) -> int:
    """Bytes of arrays: of those of two dimensions, without the rows that no token fills."""
    parts = _ONE_ARRAY.findall(shape)
    return sum(round(hlo.size(part) / (over_mean if part.count(",") == 1 else 1)) for part in parts)


def _bytes_read(body: hlo.Computation) -> int:
    """Bytes that a fusion reads of its parameters."""
    users: dict[str, list[hlo.Instruction]] = {}
    for op in body.values():
        for name in op.operands:
            users.setdefault(name, []).append(op)

    def elements(name: str) -> int:
        """Elements that are needed of an instruction's result."""
        total, needed = hlo.elements(body[name].shape), 0
        for user in users.get(name, []):
            target = user.operands[0] == name
            if user.opcode in SLICING and target:
                needed += hlo.elements(user.shape)
            elif user.opcode == "scatter" and target:
                needed += hlo.elements(body[user.operands[-1]].shape)
            elif user.opcode in THROUGH:
                needed += elements(user.name)
            elif not (user.opcode == "dynamic-update-slice" and target):
                return total
        # A result without users is the fusion's own.
        return min(total, needed) if name in users else total

    parameters = [op for op in body.values() if op.opcode == "parameter" and hlo.elements(op.shape)]
    return sum(hlo.size(op.shape) * elements(op.name) // hlo.elements(op.shape) for op in parameters)


def _bytes_written(root: hlo.Instruction, body: hlo.Computation) -> int:
    """Bytes that a fusion writes: of its root, or of each part of a tuple."""
    if root.opcode == "tuple":
        return sum(_bytes_written(body[name], body) for name in root.operands)
    if root.opcode == "bitcast" and body[root.operands[0]].opcode in UPDATING:
        root = body[root.operands[0]]
    part = UPDATING.get(root.opcode)
    return hlo.size(root.shape if part is None else body[root.operands[part]].shape)


def largest_arrays(text: str, most: int = 5) -> Table:
    """The largest arrays in memory of a program's text, by shape. Arrays inside fusions are never in memory.

    in program: number of instructions that create such an array, not all alive at once; made by: the first of them.
    """
    makers: dict[str, list[str]] = {}
    for name, computation in hlo.CompiledProgram.read(text).computations.items():
        for op in () if _FUSED.match(name) else computation.values():
            shape = _ONE_ARRAY.match(op.shape)
            if shape is not None and op.opcode not in ("parameter", "get-tuple-element", "bitcast"):
                makers.setdefault(shape[1], []).append(op.origin or op.opcode)

    def made_by(origin: str) -> str:
        return "/".join([part for part in origin.split("/") if part not in COMMON_SCOPES][-3:])

    largest = sorted(makers.items(), key=lambda item: -hlo.size(item[0]))[:most]
    rows = [(shape, f"{hlo.size(shape) / GIB:.2f}", str(len(names)), made_by(names[0])) for shape, names in largest]
    return Table("largest arrays of the program", ("shape", "GiB", "in program", "made by"), rows, (0, 3))
