"""Programs that XLA schedules with the kernel times of the cost model: compiled twice, without a device.

XLA's scheduler decides what runs beside a collective. By default it counts time in units: a collective takes 5000, a
matmul 1000, a matmul that is fused with its slices far less. It takes measured times instead, as a profile of the same
program (`JAX_ENABLE_PGLE` measures one). Ours is calculated from the text of the first compilation, and passed to the
second one as the compile option `fdo_profile`, which jax passes on to every compiler, and whose content is part of the
key of jax's compile cache. It is a function of the program, the kind of device and the constants of the cost model, so
all processes of a run have the same one.
"""

from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from typing import Any, NamedTuple

from megajax.compiled import hlo
from megajax.compiled.audit import FREE
from megajax.compiled.costs import Costs
from megajax.compiled.timeline import Timeline, timeline
from megajax.mesh.xla_options import PROFILE

LEAST_MATCHED = 0.95
"""Share of the second program's instructions that must be in the profile: where fewer are, XLA has renamed them, and
the profile is of another program."""


class Scheduled(NamedTuple):
    """A program that was compiled with XLA's times and with those of the cost model."""

    compiled: Any
    """jax.stages.Compiled: the one of both that is taken."""
    default: Timeline
    """With XLA's times."""
    by_costs: Timeline
    matched: float
    """Share of the instructions of the second program that are in the profile."""
    profile: str
    device: str
    """Name of the GPU whose costs were taken."""

    @property
    def takes_costs(self) -> bool:
        """Whether the second program is taken: it has the profile's names, and takes no longer by the same costs."""
        return self.matched >= LEAST_MATCHED and self.by_costs.seconds <= self.default.seconds

    @property
    def digest(self) -> str:
        """Of what decides the order of collectives, which the processes of a run must share."""
        return sha256(f"{self.takes_costs} {self.profile}".encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Figures of the choice."""
        return {
            "by": "costs" if self.takes_costs else "default",
            "costs_of": self.device,
            "exposed_seconds": round(self.by_costs.exposed_seconds, 6),
            "default_exposed_seconds": round(self.default.exposed_seconds, 6),
            "matched": round(self.matched, 4),
        }

    def summary(self) -> str:
        """The choice, in one line of text."""
        costs, default = (f"{line.exposed_seconds:.3f}" for line in (self.by_costs, self.default))
        if self.takes_costs:
            return f"by costs of {self.device}: {costs} s of a step exposed, {default} by XLA's own (not measured)"
        if self.matched < LEAST_MATCHED:
            return f"XLA's own: only {self.matched:.0%} of the instructions have the names of the first compilation"
        return (
            f"XLA's own: steps take {self.default.seconds:.3f} s, {self.by_costs.seconds:.3f} by costs (not measured)"
        )


def compile_scheduled(
    lowered: Any, options: Mapping[str, Any], costs: Callable[[str], Costs], unknown_trips: int = 1
) -> Scheduled:
    """Compiles a `jax.stages.Lowered` with XLA's times and with ours.

    options: further compiler options; costs: of the program with this text; unknown_trips: see `hlo.rounds`.
    """
    first = lowered.compile(compiler_options=dict(options))
    before = costs(first.as_text())
    profile = "".join(profile_lines(before, unknown_trips))
    second = lowered.compile(compiler_options={**options, PROFILE: profile.encode()})
    after = costs(second.as_text())
    known = {op.name for op, *_ in timed_instructions(before.program)}
    names = [op.name for op, *_ in timed_instructions(after.program)]
    lines = timeline(before, unknown_trips), timeline(after, unknown_trips)
    matched = sum(name in known for name in names) / max(1, len(names))
    result = Scheduled(first, *lines, matched, profile, before.device.name)
    return result._replace(compiled=second) if result.takes_costs else result


def timed_instructions(
    program: hlo.Program, name: str | None = None, depth: int = 0
) -> Iterator[tuple[hlo.Instruction, hlo.Computation, int]]:
    """Kernels, collectives and control flow, with the computation and the number of loops around each."""
    home = program.computations[name or program.entry]
    for op in home.values():
        inner = {"while": "body", "conditional": "branches", "call": "to_apply"}.get(op.opcode)
        if inner is not None:
            for callee in program.callees_of(op, inner):
                yield from timed_instructions(program, callee, depth + (op.opcode == "while"))
        elif op.opcode in FREE or op.opcode.endswith(hlo.FINISH) or op.opcode == "async-update":
            continue
        yield op, home, depth


def profile_lines(costs: Costs, unknown_trips: int = 1) -> Iterator[str]:
    """The profile: a ProfiledInstructionsProto as text, in microseconds.

    A loop takes as long as all its iterations, a conditional as long as the branches that it takes; their collectives
    do not count.
    """
    lines = _Totals(costs, unknown_trips)
    for op, home, depth in timed_instructions(costs.program):
        if (sent := costs.collective(op, home)) is None:
            yield f'costs {{ name: "{op.name}" cost_us: {1e6 * lines.instruction(op, home, depth):.3f} }}\n'
            continue
        wrapped, _ = costs.program.collective(op, home) or (op, home)
        for name in dict.fromkeys((op.name, wrapped.name)):
            yield f'costs {{ name: "{name}" cost_us: {1e6 * sent:.3f} }}\n'
        ends = (end for end in home.values() if end.opcode.endswith(hlo.FINISH))
        for end in ends:
            if op.name in end.operands:
                yield f'latencies {{ source: "{op.name}" target: "{end.name}" latency_us: {1e6 * sent:.3f} }}\n'


class _Totals:
    """Seconds of kernels by instruction, with those in the computations that it calls."""

    def __init__(self, costs: Costs, unknown_trips: int):
        self.costs, self.unknown_trips = costs, unknown_trips
        self._known: dict[tuple[str, bool], float] = {}

    def computation(self, name: str, depth: int) -> float:
        key = name, depth > 0
        if key not in self._known:
            home = self.costs.program.computations[name]
            self._known[key] = sum(self.instruction(op, home, depth) for op in home.values())
        return self._known[key]

    def instruction(self, op: hlo.Instruction, home: hlo.Computation, depth: int) -> float:
        program = self.costs.program
        if op.opcode == "while":
            return self.costs.trips(op, depth, self.unknown_trips) * self.computation(op.callees["body"][0], depth + 1)
        if op.opcode == "conditional":
            return sum(share * self.computation(name, depth) for name, share in self.costs.branches(op))
        if op.opcode == "call":
            return sum(self.computation(name, depth) for name in program.callees_of(op))
        if op.opcode in FREE or op.opcode.endswith(hlo.FINISH) or op.opcode == "async-update":
            return 0.0
        return self.costs.kernel(op, home) if self.costs.collective(op, home) is None else 0.0
