"""Seconds of the instructions of a compiled program on a GPU, by the constants of the cost model.

A matmul's operations follow from its shapes, its bytes from `megajax.planning.compiled.audit`; memory-bound kernels
take as long as their bytes. Scratch arrays of cuBLAS are not counted: they are hardly used. Attention counts as causal
unless its call says otherwise, and with as many keys as their array holds.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from megajax.planning.compiled import hlo
from megajax.planning.compiled.audit import CompiledKernel, InstructionContext, branch_shares, kernel_of
from megajax.planning.compiled.devices import OVERHEAD, Device
from megajax.planning.compiled.links import AxisSpan
from megajax.planning.compiled.links import seconds as link_seconds

SPLIT_BACKWARD = 7 / 4
"""Operations of one of two kernels of attention's backward pass over the forward pass: seven matmuls in both. A single
kernel has five."""

_DIMENSIONS = r'lhs_{}_dim(?:ension)?s"?[=:][\[{{]([^\]}}]*)'
_CONTRACTED, _BATCH = (re.compile(_DIMENSIONS.format(kind)) for kind in ("contracting", "batch"))


@dataclass(frozen=True)
class InstructionTimes:
    """Seconds of the instructions of one program on one kind of device."""

    program: hlo.CompiledProgram
    mesh: Mapping[str, int]
    """Axis -> size, outermost first."""
    device: Device
    per_node: int
    """Devices of a node."""
    over_mean: float = 1.0
    """Rows that experts have room for over those that a balanced router fills; grouped matmuls skip the others."""
    _collectives: dict[str, float | None] = field(default_factory=dict)
    _kernels: dict[str, float] = field(default_factory=dict)
    _branches: dict[str, list[tuple[str, float]]] = field(default_factory=dict)

    def collective(self, op: hlo.Instruction, home: hlo.Computation) -> float | None:
        """Seconds of the collective that an instruction is, starts or wraps; None if it is none."""
        if op.name not in self._collectives:
            wrapped = self.program.collective(op, home)
            message = wrapped and hlo.message(*wrapped, self.mesh)
            seconds = None if wrapped is None else 0.0 if message is None else self.of_message(message)
            self._collectives[op.name] = seconds
        return self._collectives[op.name]

    def of_message(self, message: hlo.Message) -> float:
        """Seconds of one collective."""
        group = AxisSpan.along(message.groups.axes, self.mesh, self.per_node)
        # Of a part of an axis: neighbours.
        span = AxisSpan(message.groups.size, min(message.groups.size, group.inside))
        return link_seconds(message.kind, message.bytes, span, self.device)

    def branches(self, op: hlo.Instruction) -> Sequence[tuple[str, float]]:
        """(computation, share of the runs) of each branch of a conditional."""
        if op.name not in self._branches:
            self._branches[op.name] = branch_shares(self.program, op)
        return self._branches[op.name]

    def trips(self, op: hlo.Instruction, depth: int, unknown_trips: int) -> float:
        """Iterations of a loop with `depth` loops around it, on average; see `hlo.rounds`."""
        if op.trips is not None:
            return op.trips
        # A loop of at most one iteration runs in a share of the ticks.
        return op.share if op.share is not None else 1 if depth else unknown_trips

    def kernel(self, op: hlo.Instruction, home: hlo.Computation) -> float:
        """Seconds of an instruction that is one kernel."""
        if op.name not in self._kernels:
            self._kernels[op.name] = self._kernel(op, home)
        return self._kernels[op.name]

    def _kernel(self, op: hlo.Instruction, home: hlo.Computation) -> float:
        kernel = kernel_of(self.program, op, home, InstructionContext(over_mean=self.over_mean))
        moving = (kernel.bytes - kernel.workspace) / self.device.memory_rate
        if kernel.work not in ("matmul", "attention"):
            return OVERHEAD * moving
        computing = sum(self._operations_seconds(*place, kernel) for place in self.program.inside(op, home))
        return max(computing * (1 if kernel.work == "attention" else OVERHEAD), OVERHEAD * moving)

    def _operations_seconds(self, op: hlo.Instruction, home: hlo.Computation, kernel: CompiledKernel) -> float:
        """Seconds of the arithmetic of an instruction that is not a fusion."""
        operands = [shape for name in op.operands if name in home for shape in hlo.shapes(home[name].shape)]
        results = hlo.shapes(op.shape)
        if kernel.work == "attention":
            return self._attention(op, [dims for _, dims in operands if len(dims) == 4])
        if not op.is_matmul or not operands:
            return 0.0
        kind, compute = operands[0][0], "bfloat16"
        compute = {"f8": "fp8", "f4": "nvfp4", "f32": "float32"}.get(kind if kind == "f32" else kind[:2], compute)
        matmuls, sizes = _dot(op, operands[0][1], results[0][1]) or _grouped([*operands, *results], self.over_mean)
        return self.device.matmul_seconds(compute, sizes, matmuls)

    def _attention(self, op: hlo.Instruction, arrays: Sequence[tuple[int, ...]]) -> float:
        """Of a call whose first arrays of four dimensions are queries and keys, positions and heads in any order."""
        if op.target is None or len(arrays) < 2:
            return 0.0
        queries, keys = arrays[:2]
        operations = 4 * prod(queries) * max(keys[1:3]) / (1 if "NO_MASK" in op.attributes else 2)
        backward = "ackward" in op.target + op.attributes
        if backward:
            operations *= 5 / 2 if "fmha" in op.target else SPLIT_BACKWARD
        return operations / self.device.attention_rate(backward)


type Sizes = tuple[float, float, float]
"""Rows, contracted, columns of a matmul."""


def _dot(op: hlo.Instruction, left: tuple[int, ...], result: tuple[int, ...]) -> tuple[float, Sizes] | None:
    """(number of matmuls, sizes of each) of a dot or a call of cuBLAS; None for other matmuls."""
    contracted, batch = _CONTRACTED.search(op.attributes), _BATCH.search(op.attributes)
    if contracted is None:
        return None
    numbers = (re.findall(r"\d+", match[1] if match else "") for match in (contracted, batch))
    inner, matmuls = (prod(left[int(number)] for number in listed) for listed in numbers)
    rows = prod(left) / (inner * matmuls)
    return matmuls, (rows, inner, prod(result) / (rows * matmuls))


def _grouped(arrays: Sequence[tuple[str, tuple[int, ...]]], over_mean: float) -> tuple[float, Sizes]:
    """(experts, sizes of the matmul of each) of a grouped matmul: matrices of experts, and rows of tokens."""
    floats = [dims for kind, dims in arrays if kind[0] in "fb"]
    matrices = next((dims for dims in floats if len(dims) == 3), None)
    rows = next((dims for dims in floats if len(dims) == 2), None)
    if matrices is None or rows is None:
        return 0, (1, 1, 1)
    experts, inner, outer = matrices
    return experts, (rows[0] / experts / over_mean, inner, outer)
