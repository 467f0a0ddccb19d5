"""Memory traffic of a compiled program: every kernel, the loop it runs in, the bytes it moves, its place in the source.

Bytes are the least that a kernel needs: each operand is read once; of a sliced operand only the slice counts, of an
in-place update only the part that is updated. A kernel counts as often as it runs: by the trip counts of its loops, and
in a conditional by the share of the runs that take its branch (see `_shares`).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from typing import Any, Literal

from megajax.planning.program.collectives import DONE, KINDS, START, Place
from megajax.planning.program.hlo import Computation, Instruction, Program, arrays, size
from megajax.planning.program.trip_counts import StepCounts

type Work = Literal["matmul", "attention", "collective", "fill", "move", "cast", "compute"]
"""matmul, attention: kernels with tensor-core arithmetic and all that is fused into them; fill: writes a constant;
move: slices, updates, copies, transposes, joins, without arithmetic; cast: between dtypes; compute: the rest."""

CLASSES: dict[str, tuple[Work, ...]] = {
    "copies": ("fill", "move"),
    "elementwise": ("cast", "compute"),
    "matmul": ("matmul",),
    "attention": ("attention",),
    "collective": ("collective",),
}
"""Kinds of work as plans report them."""
FREE = frozenset(
    ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id")
)
"""Opcodes that run nothing."""
SLICING = frozenset(("slice", "dynamic-slice", "gather"))
MOVING = SLICING - {"gather"} | frozenset(
    ("copy", "transpose", "dynamic-update-slice", "concatenate", "reshape", "broadcast", "pad", "reverse", "iota")
)
THROUGH = frozenset(("bitcast", "convert", "reshape", "copy", "transpose"))
"""Opcodes of which a part can be had from the same part of what they are given."""
OFFSETS = frozenset(("s32", "u32", "s64", "u64", "pred"))
"""Types of what says which slice."""

_ORIGIN = re.compile(r'op_name="([^"]*)"')
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_RUNS = re.compile(r"runs_\d+_of_\d+/")
_SHAPE = re.compile(r"\w+\[[\d,]*\]")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel at one place of a program."""

    name: str
    work: Work
    place: Place
    shape: str
    """Of its result."""
    read: int
    """Bytes of one device and one run."""
    written: int
    origin: str
    """Path of the operation in the traced program, as the compiler kept it; may be empty."""
    target: str | None
    """Of a custom call."""
    opcodes: frozenset[str]
    """Of all that is fused in it, without what runs nothing."""
    rounds: int
    """Runs of the loops around it per step, if none is skipped."""
    share: float = 1.0
    """Of these, the share that is not skipped and takes the branches it is in."""

    @property
    def bytes(self) -> int:
        """Read and written, by one device in one run."""
        return self.read + self.written

    @property
    def total(self) -> int:
        """The same for all runs of a step."""
        return round(self.bytes * self.rounds * self.share)

    @property
    def most(self) -> int:
        """The same if every run took its branches; what loops skip stays out."""
        return round(self.bytes * self.rounds * self.place.share)


@dataclass(frozen=True)
class Audit:
    """A program's kernels in the order they run, and what of its arguments it overwrites."""

    kernels: tuple[Kernel, ...]
    aliased: int
    """Bytes of one device's arguments whose place results take."""
    donated: int
    """How many arguments these are."""

    def calls(self, text: str) -> list[Kernel]:
        """Custom calls whose target contains a text."""
        return [one for one in self.kernels if one.target is not None and text in one.target]

    def moved(self, least: int = 2**20) -> list[Kernel]:
        """Kernels without arithmetic that write at least so many bytes at once."""
        return [one for one in self.kernels if one.work in ("fill", "move") and one.written >= least]

    def writes(self, kind: str, least: int) -> list[Kernel]:
        """Kernels with a result of a dtype ("f32") that has at least so many elements."""
        return [one for one in self.kernels if any(k == kind and n >= least for k, n in arrays(one.shape))]

    def shapes(self, kind: str) -> set[tuple[int, ...]]:
        """Of all results of a dtype."""
        found = {text for one in self.kernels for text in _SHAPE.findall(one.shape)}
        return {dimensions(text) for text in found if text.startswith(f"{kind}[")}

    def largest(self, most: int = 10) -> list[Kernel]:
        """Those that write most at once."""
        return sorted(self.kernels, key=lambda one: -one.written)[:most]

    def by_work(self) -> dict[str, int]:
        """Bytes per step and device by kind of work."""
        sums: dict[str, int] = {}
        for one in self.kernels:
            sums[one.work] = sums.get(one.work, 0) + one.total
        return sums

    def workspace(self) -> int:
        """Bytes per step of the scratch arrays that cuBLAS calls get, which count as written and are hardly used."""
        calls = (one for one in self.kernels if one.work == "matmul" and "cublas" in (one.target or ""))
        return sum(round(one.rounds * one.share * _scratch(one.shape)) for one in calls)

    def by_class(self) -> dict[str, int]:
        """The same by class of work, with `total`, which is their sum."""
        works = self.by_work()
        sums = {name: sum(works.get(work, 0) for work in among) for name, among in CLASSES.items()}
        return {"total": sum(sums.values()), **sums}

    def unknown_loops(self) -> list[str]:
        """Names of the loops whose trip count the compiler does not say."""
        return list(dict.fromkeys(one.place.name for one in self.kernels if one.place.times is None))


def dimensions(shape: str) -> tuple[int, ...]:
    """ "f32[2,3]" -> (2, 3)."""
    return tuple(int(n) for n in shape.partition("[")[2].partition("]")[0].split(",") if n)


def _scratch(shape: str) -> int:
    """Bytes of the arrays of bytes in the result of a call."""
    return sum(elements for kind, elements in arrays(shape) if kind in ("s8", "u8") and shape.startswith("("))


def audit(text: str, counts: StepCounts | None = None) -> Audit:
    """From `compiled.as_text()`. Raises ValueError for text that can't be read.

    counts: what is known of the step beside its text; None: loops of unknown trip count run once, and conditionals
    with an idle branch always work.
    """
    program = Program.read(text)
    head = text.partition("\n")[0]
    aliases = _ALIAS.findall(head.partition("entry_computation_layout")[0])
    arguments = _SHAPE.findall(head.partition("entry_computation_layout={(")[2].partition(")->")[0])
    return Audit(
        kernels=tuple(_kernels(program, program.entry, (Place(), counts or StepCounts(1)), count(1))),
        aliased=sum(size(arguments[int(number)]) for _, number in aliases),
        donated=len(aliases),
    )


def rows(kernels: Iterable[Kernel]) -> list[dict[str, Any]]:
    """Kernels alike in kind of work, result, origin and trip counts of their loops, summed: rows of a table.

    Those with most bytes per step come first. loop: the first one's, as loops over a stage's chunks have the same
    kernels; runs: of all of them per step; instructions: how many they are in the program; bytes_once: each run once.
    """

    def key(one: Kernel) -> tuple:
        return tuple(-1 if trips is None else trips for trips in one.place.trips), one.work, one.shape, _where(one)

    found = []
    for (_, work, shape, origin), group in groupby(sorted(kernels, key=key), key):
        same = list(group)
        found.append(
            {
                "loop": same[0].place.name,
                "runs": round(sum(one.rounds * one.share for one in same)),
                "work": work,
                "result": shape,
                "instructions": len(same),
                "bytes_once": sum(one.bytes for one in same),
                "bytes": sum(one.total for one in same),
                "origin": origin,
            }
        )
    return sorted(found, key=lambda row: -row["bytes"])


def _where(one: Kernel) -> str:
    """Its origin, without how often it runs."""
    return _RUNS.sub("", one.origin)


def _kernels(program: Program, name: str, where: tuple[Place, StepCounts], numbers: Iterator[int]) -> Iterator[Kernel]:
    """Of a computation and all it runs."""
    computation, (place, counts) = program.computations[name], where
    for one in computation.values():
        if one.opcode == "while":
            inner = place.inside(one, next(numbers))
            yield from _kernels(program, one.callees["body"][0], (inner, counts), count(1))
        elif one.opcode == "conditional":
            inside = Place(place.path, place.trips, True, place.share), counts
            names = program.called(one, "branches")
            branches = [[*_kernels(program, branch, inside, numbers)] for branch in names]
            busy = counts.busy_share(place.trips) if one.share is None else one.share
            for branch, share in zip(branches, _shares(branches, busy), strict=True):
                yield from (replace(each, share=share * each.share) for each in branch)
        elif one.opcode == "call":
            for callee in program.called(one):
                yield from _kernels(program, callee, where, numbers)
        elif one.opcode not in FREE and not one.opcode.endswith(DONE):
            yield _kernel(program, one, computation, where)


def _shares(branches: Sequence[Sequence[Kernel]], busy: float) -> list[float]:
    """Share of the runs that take each branch of a conditional.

    Where all branches compute attention and some call cuDNN, those are always taken: the others are for rows of more
    documents than cuDNN is laid out for. Where some branches only copy or fill, they are those of idle pipeline ticks,
    and the others are taken in the `busy` share of the runs. Branches that are alike are taken equally often, as those
    of a switch over a stage's chunks.
    """
    fused = [any("fmha" in (one.target or "") for one in branch) for branch in branches]
    attention = all(any(one.work == "attention" for one in branch) for branch in branches)
    idle = [all(one.work in CLASSES["copies"] for one in branch) for branch in branches]
    if attention and any(fused):
        return [is_fused / sum(fused) for is_fused in fused]
    if all(idle) or not any(idle):
        return [1 / len(branches)] * len(branches)
    return [(1 - busy) / sum(idle) if is_idle else busy / (len(idle) - sum(idle)) for is_idle in idle]


def _kernel(program: Program, one: Instruction, home: Computation, where: tuple[Place, StepCounts]) -> Kernel:
    place, counts = where
    inner = [program.computations[name] for name in program.called(one, "calls")]
    body = inner[0] if inner else {one.name: one}
    if inner:
        read, written = _read(body), _written(next(reversed(body.values())), body)
    else:
        read, written = _plain(one, home)
    origin = _ORIGIN.search(one.attributes)
    target = next((each.target for each in body.values() if each.target is not None), None)
    return Kernel(
        name=one.name,
        work=_work(program, one, body),
        place=place,
        shape=_result(one),
        read=read,
        written=written,
        origin=origin[1] if origin else "",
        target=target,
        opcodes=frozenset(each.opcode for each in body.values()) - FREE,
        share=place.share,
        rounds=counts.rounds(place.trips),
    )


def _result(one: Instruction) -> str:
    """Shape of the result, also of what only starts: ((operands), result, context)."""
    if not one.opcode.endswith(START) or not one.shape.startswith("(("):
        return one.shape
    depth = 0
    for place, character in enumerate(one.shape[1:], 1):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            rest = one.shape[place + 1 :].lstrip(", ")
            return rest.rpartition(", u32[]")[0] or rest
    return one.shape


def _work(program: Program, one: Instruction, body: Computation) -> Work:
    opcodes = {each.opcode for each in body.values()} - FREE
    targets = [each.target or "" for each in body.values()]
    if any(opcode.removesuffix(START) in KINDS for opcode in opcodes | {one.opcode}):
        return "collective"
    if any("fmha" in target for target in targets) or "pallas_call" in one.attributes:
        return "attention"
    if program.matmuls(one):
        return "matmul"
    numbers = {each.opcode for each in body.values() if not _places(each)} - FREE
    if numbers <= {"broadcast", "iota", "copy"} and not any(each.opcode == "parameter" for each in body.values()):
        return "fill" if len(body) > 1 or one.opcode in ("broadcast", "iota") else "move"
    if numbers <= MOVING:
        return "move"
    return "cast" if numbers <= MOVING | {"convert"} else "compute"


def _places(one: Instruction) -> bool:
    """Whether it computes a place in an array: one integer."""
    return all(kind in OFFSETS and elements == 1 for kind, elements in arrays(one.shape))


def _plain(one: Instruction, home: Computation) -> tuple[int, int]:
    """(read, written) of an instruction that is a kernel by itself."""
    if one.opcode in SLICING:
        return size(one.shape), size(one.shape)
    if one.opcode == "dynamic-update-slice":
        return size(home[one.operands[1]].shape), size(home[one.operands[1]].shape)
    return sum(size(home[name].shape) for name in one.operands if name in home), size(_result(one))


def _read(body: Computation) -> int:
    """Bytes a fusion reads of its parameters."""
    users: dict[str, list[Instruction]] = {}
    for one in body.values():
        for name in one.operands:
            users.setdefault(name, []).append(one)

    def elements(name: str) -> int:
        """Of an instruction's result, how many are needed."""
        whole = sum(n for _, n in arrays(body[name].shape))
        needed = 0
        for user in users.get(name, []):
            if user.opcode in SLICING and user.operands[0] == name:
                needed += sum(n for _, n in arrays(user.shape))
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                continue
            elif user.opcode == "scatter" and user.operands[0] == name:
                needed += sum(n for _, n in arrays(body[user.operands[-1]].shape))
            elif user.opcode in THROUGH:
                needed += elements(user.name)
            else:
                return whole
        # The result itself, where nothing uses it.
        return min(whole, needed) if name in users else whole

    total = 0
    for one in body.values():
        if one.opcode == "parameter" and (whole := sum(n for _, n in arrays(one.shape))):
            total += size(one.shape) * elements(one.name) // whole
    return total


def _written(root: Instruction, body: Computation) -> int:
    """Bytes a fusion writes: of its root, or of each part of a tuple."""
    if root.opcode == "tuple":
        return sum(_written(body[name], body) for name in root.operands)
    if root.opcode == "dynamic-update-slice":
        return size(body[root.operands[1]].shape)
    if root.opcode == "scatter":
        return size(body[root.operands[-1]].shape)
    if root.opcode == "bitcast" and body[root.operands[0]].opcode in ("dynamic-update-slice", "scatter"):
        return _written(body[root.operands[0]], body)
    return size(root.shape)
