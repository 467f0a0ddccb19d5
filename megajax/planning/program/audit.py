"""What a compiled program moves through memory, kernel by kernel, and its largest arrays.

Bytes are the least that a kernel needs: each operand is read once; of a sliced operand only the slice counts, of an
in-place update only the part that is updated. A kernel counts as often as it runs: by the trip counts of its loops and,
in a conditional, by the fraction of the runs that take its branch (see `_branch_shares`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

from megajax.metrics.banner import Table
from megajax.planning.program import hlo
from megajax.planning.program.devices import GIB

type Work = Literal["matmul", "attention", "collective", "fill", "move", "cast", "compute"]
"""matmul, attention: kernels on tensor cores, with all that is fused into them; fill: writes a constant; move: slices,
updates, copies, transposes, concatenations, without arithmetic; cast: between dtypes; compute: the rest."""

CLASSES: dict[str, tuple[Work, ...]] = {"copies": ("fill", "move"), "elementwise": ("cast", "compute")}
CLASSES |= {"matmul": ("matmul",), "attention": ("attention",), "collective": ("collective",)}
"""Kinds of work by the class under which plans report them."""
COMMON_SCOPES = frozenset(("while", "body", "cond", "closed_call", "eval_jaxpr", "shard_map", "checkpoint"))
"""Parts of an operation's path that are not shown."""
FREE = frozenset(
    ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id")
)
"""Opcodes that run no kernel."""
SLICING = frozenset(("slice", "dynamic-slice", "gather"))
MOVING = SLICING - {"gather"} | frozenset(
    ("copy", "transpose", "dynamic-update-slice", "concatenate", "reshape", "broadcast", "pad", "reverse", "iota")
)
UPDATING = {"dynamic-update-slice": 1, "scatter": -1}
"""Opcodes that update a part of their first operand -> which operand is the part."""
THROUGH = frozenset(("bitcast", "convert", "reshape", "copy", "transpose"))
"""Opcodes for which a part of the result needs only the same part of the operand."""
OFFSETS = frozenset(("s32", "u32", "s64", "u64", "pred"))
"""Types of slice indices."""

_ONE_ARRAY = re.compile(r"(\w+\[[\d,]+\])")
_FUSED = re.compile(r"fused|wrapped")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a program."""

    name: str
    work: Work
    place: hlo.Place
    shape: str
    """Of its result."""
    read: int
    """Bytes, of one device and one run."""
    written: int
    origin: str
    """Path of the operation in the traced program; may be empty."""
    target: str | None
    """Of a custom call."""
    opcodes: frozenset[str]
    """Of all instructions fused into it, without FREE ones."""
    rounds: int
    """Runs per step of the loops around it, before skipping."""
    share: float = 1.0
    """Fraction of these runs that is not skipped and takes the branches it is in."""

    @property
    def bytes(self) -> int:
        """Read and written, by one device in one run."""
        return self.read + self.written

    @property
    def total(self) -> int:
        """Bytes of one device and step."""
        return round(self.bytes * self.rounds * self.share)


@dataclass(frozen=True)
class Audit:
    """A program's kernels in execution order."""

    kernels: tuple[Kernel, ...]

    def by_work(self) -> dict[str, int]:
        """Bytes per step and device by kind of work."""
        sums: dict[str, int] = {}
        for one in self.kernels:
            sums[one.work] = sums.get(one.work, 0) + one.total
        return sums

    def by_class(self) -> dict[str, int]:
        """Bytes per step and device by class of work, with their sum as `total`."""
        works = self.by_work()
        sums = {name: sum(works.get(work, 0) for work in among) for name, among in CLASSES.items()}
        return {"total": sum(sums.values()), **sums}

    def workspace(self) -> int:
        """Bytes per step of the scratch arrays of cuBLAS calls, which count as written and are hardly used."""
        calls = (one for one in self.kernels if one.work == "matmul" and "cublas" in (one.target or ""))
        return sum(round(one.rounds * one.share * _scratch(one.shape)) for one in calls)

    def to_dict(self) -> dict[str, Any]:
        """Bytes of one device and step, under the names of a plan's JSON."""
        return {"bytes_per_step": self.by_class(), "bytes_of_workspace": self.workspace()}


def _scratch(shape: str) -> int:
    """Bytes of the byte arrays in a tuple result."""
    return sum(elements for kind, elements in hlo.arrays(shape) if kind in ("s8", "u8") and shape.startswith("("))


def audit(text: str, unknown_trips: int = 1) -> Audit:
    """Read `compiled.as_text()`. Raises ValueError for other text.

    unknown_trips: see `hlo.rounds`. Conditionals that don't say how often they run and have an idle branch count as
    always working.
    """
    program = hlo.Program.read(text)
    return Audit(tuple(_kernels(program, program.entry, (hlo.Place(), unknown_trips), count(1))))


def _kernels(program: hlo.Program, name: str, where: tuple[hlo.Place, int], numbers: Iterator[int]) -> Iterator[Kernel]:
    """Kernels of a computation and of all it calls; where: its place, and `unknown_trips`."""
    computation, (place, unknown_trips) = program.computations[name], where
    for one in computation.values():
        if one.opcode == "while":
            inner = place.inside(one, next(numbers))
            yield from _kernels(program, one.callees["body"][0], (inner, unknown_trips), count(1))
        elif one.opcode == "conditional":
            inside = hlo.Place(place.path, place.trips, True, place.share), unknown_trips
            names = program.called(one, "branches")
            branches = [[*_kernels(program, branch, inside, numbers)] for branch in names]
            for branch, share in zip(branches, _branch_shares(branches, one.share), strict=True):
                yield from (replace(each, share=share * each.share) for each in branch)
        elif one.opcode == "call":
            for callee in program.called(one):
                yield from _kernels(program, callee, where, numbers)
        elif one.opcode not in FREE and not one.opcode.endswith(hlo.DONE):
            yield _kernel(program, one, computation, where)


def _branch_shares(branches: Sequence[Sequence[Kernel]], busy: float | None) -> list[float]:
    """Fraction of the runs that takes each branch of a conditional; busy: what its name says, see `Instruction.share`.

    Where all branches compute attention and some call cuDNN, those are always taken: the others are for rows with more
    documents than cuDNN's layout has room for. Branches that only copy or fill are those of idle pipeline ticks; the
    others are taken in the `busy` share of the runs. Equal branches are taken equally often, as those of a switch over
    the chunks of a stage.
    """
    fused = [any("fmha" in (one.target or "") for one in branch) for branch in branches]
    attention = all(any(one.work == "attention" for one in branch) for branch in branches)
    idle = [all(one.work in CLASSES["copies"] for one in branch) for branch in branches]
    if attention and any(fused):
        return [is_fused / sum(fused) for is_fused in fused]
    if all(idle) or not any(idle):
        return [1 / len(branches)] * len(branches)
    busy = 1.0 if busy is None else busy
    return [(1 - busy) / sum(idle) if is_idle else busy / (len(idle) - sum(idle)) for is_idle in idle]


def _kernel(program: hlo.Program, one: hlo.Instruction, home: hlo.Computation, where: tuple[hlo.Place, int]) -> Kernel:
    place, unknown_trips = where
    inner = [program.computations[name] for name in program.called(one, "calls")]
    body = inner[0] if inner else {one.name: one}
    if inner:
        read, written = _read(body), _written(next(reversed(body.values())), body)
    else:
        read, written = _unfused(one, home)
    return Kernel(
        name=one.name,
        work=_work(program, one, body),
        place=place,
        shape=_result(one),
        read=read,
        written=written,
        origin=one.origin,
        target=next((each.target for each in body.values() if each.target is not None), None),
        opcodes=frozenset(each.opcode for each in body.values()) - FREE,
        share=place.share,
        rounds=hlo.rounds(place.trips, unknown_trips),
    )


def _result(one: hlo.Instruction) -> str:
    """Shape of the result, also of an asynchronous start, whose shape is ((operands), result, context)."""
    if not one.opcode.endswith(hlo.START) or not one.shape.startswith("(("):
        return one.shape
    rest = one.shape[hlo.closing(one.shape, 1) :].lstrip(", ")
    return rest.rpartition(", u32[]")[0] or rest


def _work(program: hlo.Program, one: hlo.Instruction, body: hlo.Computation) -> Work:
    opcodes = {each.opcode for each in body.values()} - FREE
    targets = [each.target or "" for each in body.values()]
    if any(opcode.removesuffix(hlo.START) in hlo.COLLECTIVES for opcode in opcodes | {one.opcode}):
        return "collective"
    if any("fmha" in target for target in targets) or ("pallas_call" in one.attributes and not _is_grouped(one)):
        return "attention"
    if program.matmuls(one):
        return "matmul"
    numbers = {each.opcode for each in body.values() if not _is_index(each)} - FREE
    if numbers <= {"broadcast", "iota", "copy"} and not any(each.opcode == "parameter" for each in body.values()):
        return "fill" if len(body) > 1 or one.opcode in ("broadcast", "iota") else "move"
    if numbers <= MOVING:
        return "move"
    return "cast" if numbers <= MOVING | {"convert"} else "compute"


def _is_grouped(one: hlo.Instruction) -> bool:
    """Whether a Pallas kernel is a grouped matmul: all in Mosaic are, those in Triton have a name."""
    return "mosaic" in (one.target or "") or "grouped_" in one.attributes


def _is_index(one: hlo.Instruction) -> bool:
    """Whether it computes an index into an array: one integer."""
    return all(kind in OFFSETS and elements == 1 for kind, elements in hlo.arrays(one.shape))


def _unfused(one: hlo.Instruction, home: hlo.Computation) -> tuple[int, int]:
    """(read, written) of an instruction that is a kernel by itself."""
    if one.opcode in SLICING or one.opcode == "dynamic-update-slice":
        part = hlo.size(one.shape if one.opcode in SLICING else home[one.operands[1]].shape)
        return part, part
    return sum(hlo.size(home[name].shape) for name in one.operands if name in home), hlo.size(_result(one))


def _read(body: hlo.Computation) -> int:
    """Bytes that a fusion reads of its parameters."""
    users: dict[str, list[hlo.Instruction]] = {}
    for one in body.values():
        for name in one.operands:
            users.setdefault(name, []).append(one)

    def elements(name: str) -> int:
        """Elements that are needed of an instruction's result."""
        whole, needed = hlo.elements(body[name].shape), 0
        for user in users.get(name, []):
            target = user.operands[0] == name
            if user.opcode in SLICING and target:
                needed += hlo.elements(user.shape)
            elif user.opcode == "scatter" and target:
                needed += hlo.elements(body[user.operands[-1]].shape)
            elif user.opcode in THROUGH:
                needed += elements(user.name)
            elif not (user.opcode == "dynamic-update-slice" and target):
                return whole
        # What nothing uses is the fusion's own result.
        return min(whole, needed) if name in users else whole

    parameters = [one for one in body.values() if one.opcode == "parameter" and hlo.elements(one.shape)]
    return sum(hlo.size(one.shape) * elements(one.name) // hlo.elements(one.shape) for one in parameters)


def _written(root: hlo.Instruction, body: hlo.Computation) -> int:
    """Bytes that a fusion writes: of its root, or of each part of a tuple."""
    if root.opcode == "tuple":
        return sum(_written(body[name], body) for name in root.operands)
    if root.opcode in UPDATING:
        return hlo.size(body[root.operands[UPDATING[root.opcode]]].shape)
    if root.opcode == "bitcast" and body[root.operands[0]].opcode in UPDATING:
        return _written(body[root.operands[0]], body)
    return hlo.size(root.shape)


def largest_arrays(text: str, most: int = 5) -> Table:
    """The largest arrays in memory of a program's text, by shape; arrays inside of fusions are never in memory.

    in program: instructions that make one, not all of which are alive at once; made by: the first of them.
    """
    makers: dict[str, list[str]] = {}
    for name, computation in hlo.Program.read(text).computations.items():
        for one in () if _FUSED.match(name) else computation.values():
            shape = _ONE_ARRAY.match(one.shape)
            if shape is not None and one.opcode not in ("parameter", "get-tuple-element", "bitcast"):
                makers.setdefault(shape[1], []).append(one.origin or one.opcode)

    def made_by(origin: str) -> str:
        return "/".join([part for part in origin.split("/") if part not in COMMON_SCOPES][-3:])

    largest = sorted(makers.items(), key=lambda item: -hlo.size(item[0]))[:most]
    rows = [(shape, f"{hlo.size(shape) / GIB:.2f}", str(len(names)), made_by(names[0])) for shape, names in largest]
    return Table("largest arrays of the program", ("shape", "GiB", "in program", "made by"), rows, (0, 3))
