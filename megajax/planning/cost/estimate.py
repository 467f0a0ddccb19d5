"""Speed and memory of a run by formulas: pure functions, made for many calls.

`estimate(description)` compiles nothing, imports neither jax nor numpy, and takes about a millisecond.
"""

from dataclasses import dataclass
from typing import Any

from megajax.models.facts import Flops
from megajax.models.memory import MemoryReport, MemorySetting, memory_report, saved_bytes
from megajax.planning.cost.description import BYTES, Description, PipelineBubble, pipeline_bubble
from megajax.planning.cost.traffic import Traffic, copied_weights, memory_bytes, traffic
from megajax.planning.cost.work import Work, head_work, layers_work, memory_rate, once_work, step_work, tick_work
from megajax.planning.program.devices import GIB

DAY = 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes of one device at the moment when it holds most."""

    parameters: float
    """float32 master weights, at rest."""
    optimizer: float
    """Its moments, without those in host memory."""
    weights: float
    """In compute dtype, as held during the step."""
    gradients: float
    """Accumulated over microbatches."""
    activations: float
    """Saved for the backward pass: of a microbatch, or in the ring of a pipeline."""
    working: float
    """What a layer or the loss uses while it runs, and what travels between stages."""

    @property
    def peak(self) -> float:
        return self.parameters + self.optimizer + self.weights + self.gradients + self.activations + self.working

    @property
    def peak_gib(self) -> float:
        return self.peak / GIB


def held_weights(run: Description) -> tuple[float, float]:
    """Weights of the stack's matrices, and all others, on one device of `pipeline` and `tensor`, whole over data.

    As held during the step: of key-value heads fewer than the devices of `tensor`, one. Vectors (norms, biases) are
    whole on every device of `tensor`, as layers use them.
    """
    model, tensor = run.model, run.parallel.tensor
    stack = run.repeats * sum(block.held(tensor) for block in run.blocks)
    vectors = run.repeats * sum(block.vectors for block in run.blocks)
    ahead = sum(block.held(tensor) + 2 * model.hidden**2 / tensor for block in run.predicting_blocks)
    positions = model.sequence_length * model.hidden if model.learned_positions else 0
    return stack, vectors + ahead + positions + run.table * (1 if model.tied else 2)


def footprint(run: Description) -> Footprint:
    """Memory of the most loaded device; with OURS as the system all are loaded alike.

    By formulas that follow the program: its accumulators, its ring, its recomputation. docs/planning.md compares them
    with compiled plans.
    """
    parallel = run.parallel
    stack, rest = held_weights(run)
    held = stack + rest
    spread = 1 if parallel.data_sharding == "replicate" else run.shards
    # FSDP holds the stack's matrices in shards; what is outside of the stack is gathered once a step.
    within = stack / spread + rest if parallel.data_sharding == "fsdp" else held
    saved = saved_bytes(run.recomputing, run.blocks, run.share, run.rows)
    all_heads, own_heads = copied_weights(run)
    at_rest = held + all_heads - own_heads
    copies = 0.0 if run.compute == "float32" and spread == 1 else within * run.width
    return Footprint(
        parameters=4 * at_rest / spread,
        optimizer=(1 - run.moments_away) * run.moments * run.moment_bytes * at_rest / spread,
        weights=copies,
        gradients=within * BYTES[run.gradients],
        activations=sum(each.layers * each.device for each in saved) * pipeline_bubble(run).slots,
        working=_working(run, stack / run.repeats),
    )


def _working(run: Description, row: float) -> float:
    """row: matrices of a repeat of the pattern, on one device of `tensor`."""
    model, pipelined, hidden = run.model, run.parallel.pipeline > 1, run.model.hidden
    # A layer's backward pass: what is recomputed, gradients, and whole rows of the residual stream.
    layer = run.tokens * run.width * (3 * hidden / run.cut + 2 * hidden + _largest_layer(run))
    # A chunk's logits three times in float32; in a pipeline the table's gradient as well.
    loss = 12 * min(run.tokens, model.loss_chunk) * run.table / hidden + 4 * run.table * pipelined
    # Without one, gradients of the vocabulary's tables are held through a microbatch's layers.
    tables = 0.0 if pipelined else 4 * run.table * (1 if model.tied else 2)
    # Between stages, and a row's gradients before they are accumulated; under FSDP weights of two layers, gradients of
    # one.
    fsdp = run.parallel.data_sharding == "fsdp"
    moved = row * (2 * run.width + BYTES[run.reduce or run.gradients]) if fsdp else 0.0
    if pipelined:
        moved += (10 * run.tokens * hidden / run.cut + row) * run.width
    return max(layer, loss) + tables + moved


def _largest_layer(run: Description) -> float:
    """Elements for each token that the backward pass of the pattern's largest layer recomputes and differentiates."""
    kept, tensor, largest = run.recomputing.policy(), run.parallel.tensor, 0.0
    for block in run.blocks:
        divided = {part: elements.divided for part, elements in block.tensors.items()}
        again = sum(count for part, count in divided.items() if kept.parts is not None and part not in kept.parts)
        copied = sum(elements.copied(tensor) for elements in block.tensors.values())
        largest = max(largest, (sum(divided.values()) + again * kept.layers_per_checkpoint) / tensor + copied)
    return largest


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Of one step and one device. Compute, exposed communication, bubble and optimizer add up to the step."""

    run: Description
    memory: Footprint
    report: MemoryReport
    """Megatron-LM's memory report for the same model and layout."""
    flops: Flops
    """Model operations for each token."""
    schedule: PipelineBubble
    traffic: tuple[Traffic, ...]
    work: Work
    """Bytes through memory."""
    matmul_seconds: float
    attention_seconds: float
    stream_seconds: float
    """Of memory-bound kernels: norms, activations, casts, logits, additions and copies."""
    exposed_seconds: float
    """Of collectives that nothing hides."""
    hidden_seconds: float
    """Of collectives that overlap with computing; not part of the step."""
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
        """Model FLOPs over the data sheet's peak in bfloat16, whatever dtype matmuls are in; causal attention."""
        return self.flops.causal * self.tokens_per_second_per_device / self.run.device.peak

    @property
    def mfu_full(self) -> float:
        """The same with the whole square of attention."""
        return self.flops.full * self.tokens_per_second_per_device / self.run.device.peak

    @property
    def days(self) -> float:
        """Of all steps, without interruptions."""
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

    Raises UserError for fp8 on a device that has none.
    """
    layers, microbatches, held = layers_work(run), run.microbatches, held_weights(run)
    rows, schedule, memory = traffic(run, layers, held), pipeline_bubble(run), footprint(run)
    each = layers.forward.plus(layers.backward)
    # The layers' own collectives run in idle ticks as well; losses do not.
    inside = sum(row.exposed for row in rows if row.axis in ("tensor", "context"))
    bubble_seconds = schedule.fraction * (microbatches * each.seconds + inside)
    head = head_work(run)
    each = each.plus(head.forward).plus(head.backward)
    each.stream_seconds += run.parallel.virtual_stages * tick_work(run).stream_seconds
    weights = memory.parameters / 4
    once = once_work(run, sum(held), weights)
    # Moments in host memory are fetched and sent back, and nothing overlaps with that.
    away = run.moments_away * run.moments * run.moment_bytes * weights
    return Estimate(
        run=run,
        memory=memory,
        report=megatron_report(run),
        flops=run.model.flops(),
        schedule=schedule,
        traffic=tuple(rows),
        work=step_work(run, layers, head, once),
        matmul_seconds=microbatches * each.matmul_seconds,
        attention_seconds=microbatches * each.attention_seconds,
        stream_seconds=microbatches * each.stream_seconds,
        exposed_seconds=sum(row.exposed for row in rows),
        hidden_seconds=sum(row.seconds - row.exposed for row in rows),
        bubble_seconds=bubble_seconds,
        optimizer_seconds=once.stream / memory_rate(run) + 2 * away / run.device.host,
    )


def megatron_report(run: Description) -> MemoryReport:
    """Megatron-LM's memory report for the model in this layout."""
    counts = {"data": run.shards, "micro_size": run.micro_size, "microbatches": run.microbatches}
    return memory_report(run.model, MemorySetting.of(run.parallel, run.recomputing.recompute, **counts))


def bytes_per_step(step: Estimate) -> dict[str, float]:
    """Through the memory of one device, in the classes of `plan --audit`."""
    classes = {name: getattr(step.work, name) for name in ("copies", "elementwise", "matmul", "attention")}
    classes["collective"] = sum(memory_bytes(step.run, row) for row in step.traffic)
    return {"total": sum(classes.values()), **classes}


SPEED = (
    *("step_seconds", "compute_seconds", "matmul_seconds", "attention_seconds", "stream_seconds", "exposed_seconds"),
    *(
        "hidden_seconds",
        "bubble_seconds",
        "optimizer_seconds",
        "tokens_per_second_per_device",
        "mfu_full",
        "mfu_causal",
    ),
)


def speed(step: Estimate) -> dict[str, Any]:
    """The figures of time, for any plan."""
    return {name: getattr(step, name) for name in SPEED}


def to_dict(step: Estimate) -> dict[str, Any]:
    """The estimate's figures under the names of plans; bytes and seconds are of one device and one step."""
    run, memory = step.run, step.memory
    parts = ("parameters", "optimizer", "weights", "gradients", "activations", "working", "peak")
    names = ("kind", "axis", "what", "count", "bytes", "seconds")
    return {
        **{f"{name}_gib": getattr(memory, name) / GIB for name in parts},
        "usable_gib": run.device.usable_gib,
        "device_gib": run.device.memory_gib,
        "fits": step.fits,
        "megatron_report_gib": step.report.total / GIB,
        "flops_per_token_causal": step.flops.causal,
        "flops_per_token_full": step.flops.full,
        "bubble_fraction": step.schedule.fraction,
        "ring_slots": step.schedule.slots if run.parallel.pipeline > 1 else None,
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
