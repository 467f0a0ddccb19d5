"""A train step that XLA schedules with the kernel times of the cost model, see `megajax.compiled.schedule`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from megajax.batch import SAMPLE
from megajax.compiled.costs import Costs
from megajax.compiled.gpus import GPU, gpu_of
from megajax.compiled.hlo import Program
from megajax.compiled.schedule import Scheduled, compile_scheduled
from megajax.layers.expert_facts import ExpertSharding
from megajax.mesh.xla_options import PROFILES, Value, XlaConfig
from megajax.models.facts import block_facts, facts_of
from megajax.training.run_config import RunConfig

type CostsOf = Callable[[str], Costs]
"""Text of a compiled program -> the costs of its instructions."""


def scheduling_gpu(xla: XlaConfig, mesh: Mesh) -> GPU | None:
    """The GPU by whose costs the train step on this mesh is scheduled; None: it is scheduled by XLA's own.

    `auto` takes costs on several GPUs, unless the user gives XLA a profile or lets jax measure one.
    """
    device = mesh.devices.flat[0]
    has_profile = jax.config.jax_enable_pgle or any(name in xla.options for name in PROFILES)
    several = device.platform in ("gpu", "cuda") and mesh.size > 1 and not has_profile
    chosen = xla.schedule == "costs" or (xla.schedule == "auto" and several)
    return gpu_of(device.device_kind) if chosen else None


def costs_of(gpu: GPU, mesh: Mesh, over_mean: float = 1.0) -> CostsOf:
    """The costs of programs on a mesh of GPUs in their usual nodes, by the data sheet: a plan has those of the run.

    over_mean: of `rows_over_mean`.
    """
    sizes = dict(mesh.shape)
    return lambda text: Costs(Program.read(text), sizes, gpu, gpu.per_node, over_mean)


def rows_over_mean(cfg: RunConfig) -> float:
    """Rows that a device's experts have room for over the mean, the most of all layers; 1 without experts or facts."""
    facts, sharding = facts_of(cfg.model), ExpertSharding.of(cfg.parallel)
    sections = () if facts is None else facts.section_facts()
    blocks = (block_facts(section, section.stack.pattern, cfg.precision.compute) for section in sections)
    experts = (experts for pattern in blocks for block in pattern for experts in block.experts)
    return max((layer.over_mean(sharding) for layer in experts), default=1.0)


class ScheduledStep:
    """A jitted (state, batch, *control) -> (state, metrics), compiled twice for each shape of batch and control."""

    def __init__(self, step: Any, costs: CostsOf):
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

    def schedule(self, lowering: "ScheduledLowering", options: Mapping[str, Value]) -> Any:
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
    lowered: Any
    """jax.stages.Lowered."""

    def compile(self, compiler_options: Mapping[str, Value] = MappingProxyType({})) -> Any:
        """As the method of a `jax.stages.Lowered`."""
        return self.step.schedule(self, compiler_options)


def _signature(arguments: tuple[Any, ...]) -> Any:
    """What the program depends on: shapes of batch and control. The state always has the same."""
    leaves, tree = jax.tree.flatten(arguments[1:])
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
