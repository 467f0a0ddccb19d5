"""The time of a step by formulas: computing, collectives that nothing hides, bubble and optimizer.

`estimate(description)` compiles nothing, imports neither jax nor numpy, and takes about a millisecond.

A predicted speed has two ranges, from the errors of predictions for groups of published runs: of programs that NVIDIA
tuned, and of any program. `python -m benchmarks planner_accuracy` makes the table of both, and a test compares.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import log2
from typing import Any, Literal, NamedTuple

from megajax.models.facts import Flops, count_flops
from megajax.planning.compiled.devices import GIB, Cluster
from megajax.planning.cost import device_work as work
from megajax.planning.cost.description import OPERANDS, Description, describe
from megajax.planning.cost.memory import Footprint, footprint, held_weights
from megajax.planning.cost.traffic import Traffic, memory_bytes, traffic
from megajax.training.run_config import RunConfig

DAY = 86_400
LAYER_AXES = frozenset({"tensor", "context", "expert"})
"""Axes whose collectives run with layers."""


class ErrorRange(NamedTuple):
    """Errors of predicted speeds, predicted / published - 1."""

    low: float
    high: float
    groups: int
    """Groups of runs behind it."""
    assumed: str = ""
    """What else widens it, to follow these groups."""

    def speeds(self, predicted: float) -> tuple[float, float]:
        """The lowest and the highest speed at these errors."""
        return predicted / (1 + self.high), predicted / (1 + self.low)

    def text(self, predicted: float) -> str:
        """These speeds, and what they stand for."""
        low, high = self.speeds(predicted)
        return f"{low:,.0f} to {high:,.0f} by the errors of {self.groups} groups of published runs{self.assumed}"

    def with_codes(self, slower: float, faster: float) -> "ErrorRange":
        """The range where kernels of codes may make a step take these many times as long."""
        low, high = CODES_SHARES
        assumed = f", and by {low:.0%} to {high:.0%} of the peak in the kernel of codes, which no run has timed"
        return ErrorRange((1 + self.low) * faster - 1, (1 + self.high) * slower - 1, self.groups, assumed)


CODES_SHARES = 0.25, 0.65
"""Shares of the peak that kernels of codes may reach: two thirds of what is assumed, and about cuBLASLt's."""

type Program = Literal["tuned", "any"]
"""tuned: as NVIDIA's own programs (`System.tuned`); any: these and all others."""
RANGES: Mapping[tuple[Program, str, bool], ErrorRange] = {
    ("tuned", "dense", False): ErrorRange(-0.13, 0.30, 8),
    ("any", "dense", False): ErrorRange(-0.18, 0.77, 13),
    ("tuned", "dense", True): ErrorRange(-0.13, 0.47, 6),
    ("any", "dense", True): ErrorRange(-0.18, 1.46, 14),
    ("tuned", "mixture", False): ErrorRange(-0.54, 0.33, 5),
    ("any", "mixture", False): ErrorRange(-0.54, 0.77, 10),
    ("tuned", "mixture", True): ErrorRange(-0.46, 0.66, 5),
    ("any", "mixture", True): ErrorRange(-0.46, 1.46, 13),
}
"""(Program, kind of model, whether matmuls are in 8 bits or fewer) -> errors. benchmarks/planning/held_out.py has the
rules; state spaces, of which few groups of a single program are known, have the errors of dense models."""


def kind_of(run: Description) -> str:
    """`state space` with a mixer that is no attention; otherwise `mixture` with experts, or `dense`."""
    blocks = [(tower.section.length, block) for tower in run.towers for block in tower.blocks]
    if any(mixer.work.scores < mixer.heads * length for length, block in blocks for mixer in block.mixers):
        return "state space"
    return "mixture" if any(block.experts for _, block in blocks) else "dense"


def range_of(run: Description, program: Program = "any") -> ErrorRange:
    """Errors of runs of this kind."""
    return RANGES[program, kind_of_errors(kind_of(run)), run.compute in OPERANDS]


def kind_of_errors(kind: str) -> str:
    """The kind of model in RANGES whose errors a kind of model has."""
    return "mixture" if kind == "mixture" else "dense"


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Figures of one step and one device. Seconds of compute, exposed collectives, bubble and optimizer add up."""

    run: Description
    memory: Footprint
    flops: Flops
    traffic: tuple[Traffic, ...]
    work: work.Work
    matmul_seconds: float
    attention_seconds: float
    stream_seconds: float
    """Memory-bound kernels: norms, activations, casts, logits, additions and copies."""
    exposed_seconds: float
    """Collectives that nothing hides, what hidden ones slow down, and waiting for the slowest device."""
    hidden_seconds: float
    """Collectives that overlap with computing; not part of the step."""
    bubble_seconds: float
    optimizer_seconds: float

    @property
    def compute_seconds(self) -> float:
        return self.matmul_seconds + self.attention_seconds + self.stream_seconds

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.exposed_seconds + self.bubble_seconds + self.optimizer_seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.run.step_tokens / self.step_seconds / self.run.devices

    @property
    def errors(self) -> ErrorRange:
        """Errors of predictions of this kind for any program."""
        return self.errors_of("any")

    def errors_of(self, program: Program) -> ErrorRange:
        """Errors of predictions of this kind."""
        known = range_of(self.run, program)
        if not self.run.calls_codes:
            return known
        devices = (replace(self.run.device, matmul_codes=share) for share in CODES_SHARES)
        steps = (estimate(replace(self.run, device=device)).step_seconds for device in devices)
        return known.with_codes(*(seconds / self.step_seconds for seconds in steps))

    @property
    def tokens_per_second_per_device_range(self) -> tuple[float, float]:
        """The speed at the ends of the range of these errors."""
        return self.errors.speeds(self.tokens_per_second_per_device)

    @property
    def tokens_per_second_per_device_range_tuned(self) -> tuple[float, float]:
        """The same, by the errors for NVIDIA's tuned programs."""
        return self.errors_of("tuned").speeds(self.tokens_per_second_per_device)

    @property
    def range_groups(self) -> int:
        """Groups of published runs behind the range."""
        return self.errors.groups

    @property
    def mfu_causal(self) -> float:
        """Model FLOPs over the data sheet's peak in bfloat16, whatever dtype matmuls are in."""
        return self.flops.causal * self.tokens_per_second_per_device / self.run.device.peak

    @property
    def mfu_full(self) -> float:
        return self.flops.full * self.tokens_per_second_per_device / self.run.device.peak

    @property
    def days(self) -> float:
        """Days of all steps, without interruptions."""
        return self.run.steps * self.step_seconds / DAY

    @property
    def device_hours(self) -> float:
        return self.days * 24 * self.run.devices

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        return self.run.steps * self.run.step_tokens

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.run.usable_gib * GIB


def estimate(run: Description) -> Estimate:
    """Speed and memory of a run, from its description alone.

    Raises UserError for fp8 on a device that has none.
    """
    layers, microbatches = work.layers_work(run), run.microbatches
    rows, memory = traffic(run, layers), footprint(run)
    microbatch = layers.forward.plus(layers.backward)
    # The layers' own collectives run in idle ticks as well; losses do not.
    inside = sum(row.exposed for row in rows if LAYER_AXES.issuperset(row.axis.split("+")))
    bubble_seconds = run.schedule.fraction * (microbatches * microbatch.seconds + inside)
    head = work.head_work(run)
    share = work.head_share(run, layers, head)
    microbatch = microbatch.plus(head.forward, share).plus(head.backward, share)
    microbatch.stream_seconds += run.parallel.virtual_stages * work.tick_work(run).stream_seconds
    once = work.once_work(run, sum(held_weights(run, trained=True)), memory.updated)
    # Moments in host memory are fetched and sent back, and nothing overlaps with that.
    away = run.offload * run.moment_bytes * memory.updated
    compute = microbatches * microbatch.seconds
    layers_of_experts = sum(tower.repeats * len(block.experts) for tower in run.towers for block in tower.blocks)
    host = run.system.experts_wait * layers_of_experts * microbatches * (1 + float(run.schedule.fraction))
    exposed = host + sum(row.exposed for row in rows)
    return Estimate(
        run=run,
        memory=memory,
        flops=count_flops(run.model, run.trainable),
        traffic=tuple(rows),
        work=work.step_work(run, layers, head, once),
        matmul_seconds=microbatches * microbatch.matmul_seconds,
        attention_seconds=microbatches * microbatch.attention_seconds,
        stream_seconds=microbatches * microbatch.stream_seconds,
        exposed_seconds=exposed + waiting(run, compute + exposed + bubble_seconds),
        hidden_seconds=sum(min(row.seconds, row.hidden) for row in rows),
        bubble_seconds=bubble_seconds,
        optimizer_seconds=once.stream / run.device.memory_rate + 2 * away / run.device.host,
    )


def waiting(run: Description, seconds: float) -> float:
    """Seconds in which devices wait for the slowest one, in a step of so many seconds without.

    The largest of n independent delays grows like log n: one share for each doubling of the nodes.
    """
    return seconds * run.device.straggling * log2(max(1, run.devices / run.per_node))


def bytes_per_step(step: Estimate) -> dict[str, float]:
    """Through the memory of one device, in the classes of `plan --audit`."""
    classes = {name: getattr(step.work, name) for name in ("copies", "elementwise", "matmul", "attention")}
    classes["collective"] = sum(memory_bytes(step.run, row) for row in step.traffic)
    return {"total": sum(classes.values()), **classes}


SPEED = ("step_seconds", "compute_seconds", "matmul_seconds", "attention_seconds", "stream_seconds", "exposed_seconds",
         "hidden_seconds", "bubble_seconds", "optimizer_seconds", "tokens_per_second_per_device", "mfu_full",
         "mfu_causal")  # fmt: skip
"""Figures of time in the JSON of any plan."""
RANGE = "tokens_per_second_per_device_range"
SPEED_AND_RANGE = (*SPEED, RANGE, f"{RANGE}_tuned", "range_groups")
"""The same, and the ranges of the speed."""


def speed(step: Estimate | None) -> dict[str, Any]:
    """The figures of time; None for each where formulas do not hold."""
    return {name: None if step is None else getattr(step, name) for name in SPEED_AND_RANGE}


def to_dict(step: Estimate) -> dict[str, Any]:
    """The estimate's figures under the names of plans; bytes and seconds are of one device and one step."""
    run, memory = step.run, step.memory
    parts = ("parameters", "optimizer", "weights", "gradients", "activations", "working", "peak")
    names = ("kind", "axis", "what", "count", "bytes", "seconds")
    return {
        **{f"{name}_gib": getattr(memory, name) / GIB for name in parts},
        "usable_gib": run.usable_gib,
        "device_gib": run.device.memory_gib,
        "fits": step.fits,
        "flops_per_token_causal": step.flops.causal,
        "flops_per_token_full": step.flops.full,
        "bubble_fraction": run.schedule.fraction,
        "ring_slots": run.schedule.slots if run.parallel.pipeline > 1 else None,
        "collectives": [
            {**{name: getattr(row, name) for name in names}, "exposed_seconds": row.exposed} for row in step.traffic
        ],
        **speed(step),
        "bytes_per_step": bytes_per_step(step),
        "device": run.device.name,
        "devices": run.devices,
        "gpus_per_node": run.per_node,
        "mesh": run.sizes,
        "microbatches": run.microbatches,
        "tokens": step.tokens,
        "days": step.days,
        "gpu_hours": step.device_hours,
    }


@dataclass(frozen=True)
class Case:
    """A config on a cluster."""

    cfg: RunConfig
    cluster: Cluster

    @property
    def usable_gib(self) -> float:
        """Memory of a device that the run reserves for arrays."""
        return self.cluster.device.usable_gib(self.cfg.xla.memory_fraction)

    @cached_property
    def described(self) -> Description:
        return describe(self.cfg, *self.cluster)

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.described)
