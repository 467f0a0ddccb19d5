"""How long one device computes: matmuls, attention and what streams through memory, of a block and of the head.

Times are of one microbatch.
"""

from dataclasses import dataclass

from megajax.layers.remat import Kept
from megajax.planning.cost.block_work import BlockWork, again, block_work
from megajax.planning.cost.description import Description
from megajax.planning.cost.memory_traffic import SCORE_BYTES, block_bytes, products, table_bytes, tick_bytes

ATTENTION_BACKWARD = 2.5
"""Operations of fused attention backward over forward: the scores, computed again, and four gradients against two."""


@dataclass(slots=True)
class Seconds:
    """Of one device, by what bounds it."""

    matmul: float = 0.0
    attention: float = 0.0
    stream: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.stream

    def plus(self, other: "Seconds", times: float = 1.0) -> "Seconds":
        """The sum with another, taken that many times."""
        return Seconds(
            self.matmul + times * other.matmul,
            self.attention + times * other.attention,
            self.stream + times * other.stream,
        )


@dataclass(frozen=True, slots=True)
class Halves:
    """Forward and backward, which includes what is computed again."""

    forward: Seconds
    backward: Seconds

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total


def block_time(run: Description, block: BlockWork, kept: Kept) -> Halves:
    """Of a block that keeps that much for its backward pass, without collectives."""
    halves, factor = (Seconds(), Seconds()), run.system.overhead
    stream = run.device.bandwidth * run.device.stream / factor
    for one in products(run, block, kept):
        shape = one.rows, one.contracted, one.columns
        halves[one.backward].matmul += factor * _matmul(run, shape, one.bytes)
    _attention(run, block, kept, halves)
    for half, moved in zip(halves, block_bytes(run, block, kept), strict=True):
        half.stream += moved.stream / stream
    return Halves(*halves)


def _attention(run: Description, block: BlockWork, kept: Kept, halves: tuple[Seconds, Seconds]) -> None:
    forward, backward = halves
    device, length = run.device, run.model.sequence_length
    full = 2.0 * run.tokens * length * block.core / run.parallel.tensor
    repeated = again(kept, "core_attention")
    if block.fused:
        forward.attention += full / 2 / (device.peak * device.attention_forward)
        backward.attention += ATTENTION_BACKWARD * full / 2 / (device.peak * device.attention_backward)
        backward.attention += repeated * forward.attention
        return
    kind = "bfloat16" if run.compute == "fp8" else run.compute
    scores = run.tokens * length * block.heads / run.parallel.tensor * SCORE_BYTES * run.width / 2
    forward.attention += full / device.matmul_rate(kind) + scores / 3 / (device.bandwidth * device.stream)
    # With anything but `none` scores are computed again.
    backward.attention += 2 * full / device.matmul_rate(kind) + scores * 2 / 3 / (device.bandwidth * device.stream)
    backward.attention += (kept.parts is not None) * forward.attention


def head_time(run: Description) -> Halves:
    """Of the loss of one microbatch on one of the devices that make it, and of looking embeddings up.

    What predicts tokens further ahead is with it: its blocks, the matrices before them, and its losses. So is what goes
    through memory between the stages of a pipeline, for the ticks of one microbatch.
    """
    device, model = run.device, run.model
    stages = run.parallel.pipeline if run.system.head == "spread" else 1
    vocabulary = model.padded_vocabulary() / (stages * run.parallel.tensor)
    times, factor = 1 + len(model.predicting_blocks()), run.system.overhead
    # The loss is in 16 bits where blocks are in fp8; chunks of tokens are its rows.
    kind = "bfloat16" if run.compute == "fp8" else run.compute
    rate = device.matmul_rate(kind) * device.matmul_share(min(run.tokens, model.loss_chunk), model.hidden, vocabulary)
    once = times * 2 * run.tokens * model.hidden * vocabulary / rate
    stream = device.bandwidth * device.stream
    halves = tuple(
        Seconds(matmul=factor * max(count * once, moved.matmul / stream), stream=factor * moved.stream / stream)
        for count, moved in zip((1, 2), table_bytes(run), strict=True)
    )
    between = tick_bytes(run).stream / stream * run.parallel.virtual_stages
    forward, backward = halves[0].plus(Seconds(stream=factor * between)), halves[1]
    for block in model.predicting_blocks():
        work = block_work(block, model.hidden, model.sequence_length, run.compute)
        found = block_time(run, work, run.recomputing.kept())
        merged = run.tokens, 2 * model.hidden, model.hidden / run.parallel.tensor
        merging = factor * _matmul(run, merged, 0.0)
        forward = forward.plus(found.forward).plus(Seconds(matmul=merging))
        backward = backward.plus(found.backward).plus(Seconds(matmul=2 * merging))
    return Halves(forward, backward)


def _matmul(run: Description, shape: tuple[float, float, float], moved: float) -> float:
    """shape: rows, contracted, columns; moved: bytes."""
    device, (rows, contracted, columns) = run.device, shape
    rate = device.matmul_rate(run.compute) * device.matmul_share(rows, contracted, columns)
    return max(2 * rows * contracted * columns / rate, moved / (device.bandwidth * device.stream))
