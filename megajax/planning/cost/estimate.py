"""How long a step takes, and what it takes: one pure function, made for many calls.

`estimate(description)` compiles nothing, imports neither jax nor numpy, and takes about a millisecond.
"""

from dataclasses import dataclass
from typing import Any

from megajax.models.flops import Flops, flops_per_token
from megajax.models.memory import MemoryReport, MemorySetting, memory_report
from megajax.planning.cost.block_work import blocks_of
from megajax.planning.cost.description import Description
from megajax.planning.cost.footprint import Footprint, footprint, held_weights
from megajax.planning.cost.memory_traffic import once_bytes, step_bytes
from megajax.planning.cost.pipeline_bubble import Bubble, bubble
from megajax.planning.cost.traffic import Times, Traffic, memory_bytes, traffic
from megajax.planning.cost.work import Halves, Seconds, block_time, head_time
from megajax.planning.program.devices import GIB

DAY = 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Of one step and one device. Seconds add up: compute, exposed communication, bubble and optimizer are the step."""

    run: Description
    memory: Footprint
    report: MemoryReport
    """What Megatron-LM's report says of the same model and layout."""
    flops: Flops
    """Model operations for each token."""
    schedule: Bubble
    traffic: tuple[Traffic, ...]
    matmul_seconds: float
    attention_seconds: float
    stream_seconds: float
    """Of what memory bounds: norms, activations, casts, logits, additions and copies."""
    exposed_seconds: float
    """Of collectives that nothing hides."""
    hidden_seconds: float
    """Of collectives that run beside computing; not part of the step."""
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
    def mfu_causal(self) -> float:
        """Share of the data sheet's peak in bfloat16, as runs tell it whatever they multiply in; causal attention."""
        return self.flops.causal * self.tokens_per_second_per_device / self.run.device.peak

    @property
    def mfu_full(self) -> float:
        """The same with the whole square of attention."""
        return self.flops.full * self.tokens_per_second_per_device / self.run.device.peak

    @property
    def days(self) -> float:
        """Of all steps, if they follow each other without a stop."""
        return self.run.steps * self.step_seconds / DAY

    @property
    def device_hours(self) -> float:
        return self.days * 24 * self.run.devices

    @property
    def tokens(self) -> int:
        """Of all steps."""
        return self.run.steps * self.run.step_tokens

    @property
    def fits(self) -> bool:
        """Whether the peak is within what a device has for arrays."""
        return self.memory.peak <= self.run.device.usable_gib * GIB


def estimate(run: Description) -> Estimate:
    """Speed and memory of a run, from its description alone.

    Raises UserError for a layer there is no formula for, and for fp8 on a device that has none.
    """
    times, share = layer_times(run)
    head = head_time(run)
    microbatches = run.microbatches
    held = held_weights(run)
    rows = traffic(run, times, held)
    work = share.plus(head.forward).plus(head.backward)
    # The layers' own collectives run in idle ticks as well; losses do not.
    inside = sum(row.exposed for row in rows if row.axis in ("tensor", "context"))
    layers = microbatches * share.total + inside
    schedule = bubble(run)
    memory = footprint(run)
    return Estimate(
        run=run,
        memory=memory,
        report=megatron_report(run),
        flops=flops_per_token(run.model),
        schedule=schedule,
        traffic=tuple(rows),
        matmul_seconds=microbatches * work.matmul,
        attention_seconds=microbatches * work.attention,
        stream_seconds=microbatches * work.stream,
        exposed_seconds=sum(row.exposed for row in rows),
        hidden_seconds=sum(row.seconds - row.exposed for row in rows),
        bubble_seconds=schedule.fraction * layers,
        optimizer_seconds=_once(run, memory, held),
    )


def megatron_report(run: Description) -> MemoryReport:
    """What Megatron-LM's memory report says of the model in this layout."""
    parallel = run.parallel
    setting = MemorySetting(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        data=run.shards,
        virtual_stages=parallel.virtual_stages,
        micro_size=run.micro_size,
        microbatches=run.microbatches,
        zero1=parallel.data_sharding != "replicate",
        sequence=parallel.sequence and run.model.recompute == "selective",
    )
    return memory_report(run.model, setting)


def layer_times(run: Description) -> tuple[Times, Seconds]:
    """Of the layers of one device and one microbatch; the second is their sum by what bounds it."""
    kept, others, share = run.recomputing.kept(), run.recomputing.others(), run.recomputing_share
    repeats = run.rows * run.parallel.virtual_stages
    pairs, total = [], Seconds()
    for block in blocks_of(run):
        halves = block_time(run, block, kept)
        if share < 1:
            lighter = block_time(run, block, others)
            none = Seconds()
            halves = Halves(
                none.plus(halves.forward, share).plus(lighter.forward, 1 - share),
                none.plus(halves.backward, share).plus(lighter.backward, 1 - share),
            )
        pairs.append((block, halves))
        total = total.plus(halves.forward, repeats).plus(halves.backward, repeats)
    return Times(tuple(pairs), repeats, total.attention), total


def _once(run: Description, memory: Footprint, held: tuple[float, float]) -> float:
    """Seconds of the optimizer, and of zeros that a step begins with.

    Moments in host memory are fetched and sent back, and nothing runs beside that.
    """
    weights = memory.parameters / 4
    away = run.moments_away * run.moments * run.moment_bytes * weights
    moved = once_bytes(run, sum(held), weights).stream
    return moved / (run.device.bandwidth * run.device.stream) + 2 * away / run.device.host


def bytes_per_step(found: Estimate) -> dict[str, float]:
    """Through the memory of one device, in the classes of `plan --audit`."""
    run = found.run
    moved = step_bytes(run, sum(held_weights(run)), found.memory.parameters / 4)
    sums = {
        "copies": moved.copies,
        "elementwise": moved.elementwise,
        "matmul": moved.matmul,
        "attention": moved.attention,
        "collective": sum(memory_bytes(run, row) for row in found.traffic),
    }
    return {"total": sum(sums.values()), **sums}


def to_dict(found: Estimate) -> dict[str, Any]:
    """The estimate's figures under the names of plans; bytes and seconds are of one device and one step."""
    run, memory = found.run, found.memory
    parts = ("parameters", "optimizer", "weights", "gradients", "activations", "working", "peak")
    return {
        **{f"{name}_gib": getattr(memory, name) / GIB for name in parts},
        "usable_gib": run.device.usable_gib,
        "device_gib": run.device.memory_gib,
        "fits": found.fits,
        "megatron_report_gib": found.report.total / GIB,
        "flops_per_token_causal": found.flops.causal,
        "flops_per_token_full": found.flops.full,
        "bubble_fraction": found.schedule.fraction,
        "ring_slots": found.schedule.slots if run.parallel.pipeline > 1 else None,
        "collectives": [
            {
                "kind": row.kind,
                "axis": row.axis,
                "what": row.what,
                "count": row.count,
                "bytes": row.bytes,
                "seconds": row.seconds,
                "exposed_seconds": row.exposed,
            }
            for row in found.traffic
        ],
        **speed(found),
        "bytes_per_step": bytes_per_step(found),
        "device": run.device.name,
        "devices": run.devices,
        "gpus_per_node": run.per_node,
        "mesh": run.sizes,
        "microbatches": run.microbatches,
        "tokens": found.tokens,
        "days": found.days,
        "gpu_hours": found.device_hours,
    }


def speed(found: Estimate) -> dict[str, Any]:
    """The figures of time, for any plan."""
    return {
        "step_seconds": found.step_seconds,
        "compute_seconds": found.compute_seconds,
        "matmul_seconds": found.matmul_seconds,
        "attention_seconds": found.attention_seconds,
        "stream_seconds": found.stream_seconds,
        "exposed_seconds": found.exposed_seconds,
        "hidden_seconds": found.hidden_seconds,
        "bubble_seconds": found.bubble_seconds,
        "optimizer_seconds": found.optimizer_seconds,
        "tokens_per_second_per_device": found.tokens_per_second_per_device,
        "mfu_full": found.mfu_full,
        "mfu_causal": found.mfu_causal,
    }
