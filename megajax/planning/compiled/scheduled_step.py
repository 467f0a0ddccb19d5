"""Train steps that XLA schedules with the kernel times of the cost model: compiled twice, without a device.

XLA's scheduler decides what runs beside a collective. By default it counts time in units: a collective takes 5000, a
matmul 1000, a matmul that is fused with its slices far less. It takes measured times instead, as a profile of the same
program (`JAX_ENABLE_PGLE` measures one). Ours is calculated from the text of the first compilation, and passed to the
second one as the compile option `fdo_profile`, which jax passes on to every compiler, and whose content is part of the
key of jax's compile cache. It is a function of the program, the kind of device and the constants of the cost model, so
all processes of a run have the same one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered, Wrapped

from megajax.batch import SAMPLE
from megajax.layers.expert_facts import ExpertSharding
from megajax.models.facts import block_facts, facts_of
from megajax.planning.compiled import hlo
from megajax.planning.compiled.audit import FREE
from megajax.planning.compiled.devices import GPU, gpu_of
from megajax.planning.compiled.instruction_times import InstructionTimes
from megajax.planning.compiled.timeline import Timeline, timeline
from megajax.processes.xla_options import PROFILE, PROFILES, Value, XlaConfig
from megajax.training.run_config import RunConfig

LEAST_MATCHED = 0.95
"""Share of the second program's instructions that must be in the profile: where fewer are, XLA has renamed them, and
the profile is of another program."""


class Scheduled(NamedTuple):
    """A program that was compiled with XLA's times and with those of the cost model."""

    compiled: Compiled
    """The one of both that is taken."""
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
    lowered: Any, options: Mapping[str, Any], costs: Callable[[str], InstructionTimes], unknown_trips: int = 1
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
    program: hlo.CompiledProgram, name: str | None = None, depth: int = 0
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


def profile_lines(costs: InstructionTimes, unknown_trips: int = 1) -> Iterator[str]:
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

    def __init__(self, costs: InstructionTimes, unknown_trips: int):
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


def scheduling_gpu(xla: XlaConfig, mesh: Mesh) -> GPU | None:
    """The GPU by whose costs the train step on this mesh is scheduled; None: it is scheduled by XLA's own.

    `auto` takes costs on several GPUs, unless the user gives XLA a profile or lets jax measure one.
    """
    device = mesh.devices.flat[0]
    has_profile = jax.config.jax_enable_pgle or any(name in xla.options for name in PROFILES)
    several = device.platform in ("gpu", "cuda") and mesh.size > 1 and not has_profile
    chosen = xla.schedule == "costs" or (xla.schedule == "auto" and several)
    return gpu_of(device.device_kind) if chosen else None


def rows_over_mean(cfg: RunConfig) -> float:
    """Rows that a device's experts have room for over the mean, the most of all layers; 1 without experts or facts."""
    facts, sharding = facts_of(cfg.model), ExpertSharding.of(cfg.parallel)
    sections = () if facts is None else facts.section_facts()
    blocks = (block_facts(section, section.stack.pattern, cfg.precision.compute) for section in sections)
    experts = (experts for pattern in blocks for block in pattern for experts in block.experts)
    return max((layer.over_mean(sharding) for layer in experts), default=1.0)


@dataclass(frozen=True)
class CostScheduler:
    """Schedules train steps on a mesh by the costs of its GPUs in their usual nodes, by the data sheet.

    A plan has the same costs as the run.
    """

    gpu: GPU
    mesh: Mesh
    over_mean: float = 1.0
    """Of `rows_over_mean`."""

    @classmethod
    def of(cls, cfg: RunConfig, mesh: Mesh) -> "CostScheduler | None":
        """For the steps of a run; None: they are scheduled by XLA's own costs."""
        gpu = scheduling_gpu(cfg.xla, mesh)
        return None if gpu is None else cls(gpu, mesh, rows_over_mean(cfg))

    @property
    def device(self) -> str:
        """Name of the GPU."""
        return self.gpu.name

    def schedule(self, step: Wrapped) -> "ScheduledStep":
        """step: of `jax.jit`."""
        return ScheduledStep(step, self.instruction_times)

    def instruction_times(self, text: str) -> InstructionTimes:
        """Of the program with this text."""
        return InstructionTimes(
            hlo.CompiledProgram.read(text), dict(self.mesh.shape), self.gpu, self.gpu.per_node, self.over_mean
        )


class ScheduledStep:
    """A jitted (state, batch, *control) -> (state, metrics), compiled twice for each shape of batch and control."""

    def __init__(self, step: Wrapped, costs: Callable[[str], InstructionTimes]):
        """step: of `jax.jit`."""
        self._step, self._costs = step, costs
        self.scheduled: dict[Any, Scheduled] = {}
        """The compiled programs, by the signature of their arguments."""

    def __call__(self, *arguments: Any) -> Any:
        if _signature(arguments) not in self.scheduled:
            self.lower(*arguments).compile()
        return self.scheduled[_signature(arguments)].compiled(*arguments)

    def lower(self, *arguments: Any) -> "ScheduledLowering":
        """As the method of a jitted function; once it is compiled, calls with such arguments run this program."""
        return ScheduledLowering(self, arguments, self._step.lower(*arguments))

    def schedule(self, lowering: "ScheduledLowering", options: Mapping[str, Value]) -> Compiled:
        """Compiles a lowering."""
        unknown_trips = max(1, len(lowering.arguments[1][SAMPLE]) - 1)  # one microbatch may be peeled off the loop
        scheduled = compile_scheduled(lowering.lowered, options, self._costs, unknown_trips)
        self.scheduled[_signature(lowering.arguments)] = scheduled
        return scheduled.compiled


@dataclass(frozen=True)
class ScheduledLowering:
    """A lowered train step that is compiled twice."""

    step: ScheduledStep
    arguments: tuple[Any, ...]
    lowered: Lowered

    def compile(self, compiler_options: Mapping[str, Value] = MappingProxyType({})) -> Compiled:
        """As the method of a `jax.stages.Lowered`."""
        return self.step.schedule(self, compiler_options)


def _signature(arguments: tuple[Any, ...]) -> Any:
    """What the program depends on: shapes of batch and control. The state always has the same."""
    leaves, tree = jax.tree.flatten(arguments[1:])
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
