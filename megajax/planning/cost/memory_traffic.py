"""Bytes through the memory of one device by formula, in the classes of `plan --audit`.

Kernels read each operand once and write each result once. Passes over activations are counted in compiled programs of
GPT-3 175B and of Llama-3 8B, 70B and 405B; benchmarks/traffic.py compares the sums with those programs.

T tokens of a microbatch on a device of `context`, D hidden, F ffn, t devices of `tensor`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from megajax.layers.remat import Kept
from megajax.planning.cost.block_work import MAKES, BlockWork, Matrix, again, block_work, blocks_of, kept_bytes
from megajax.planning.cost.description import BYTES, Description
from megajax.planning.cost.pipeline_bubble import bubble

RESIDUAL_PASSES = 24
"""Reads and writes of an array of T x D by a block's norms and additions, forward and backward."""
JOINING_PASSES = 3
"""The same of whole rows, by adding up the input's gradients of products that are not one."""
FFN_PASSES = {2: 6, 3: 8}
"""The same of T x F, by number of the MLP's matrices: the activation alone, or gate and product as well."""
HEAD_PASSES = 4
"""The same of queries, keys and values: rotations, biases, casts beside attention."""
CAST_BYTES = 4
"""Of casting one element to fp8: read in bfloat16, written twice, as it is and transposed."""
SCORE_BYTES = 24
"""Of one attention score, forward and backward, where scores are kept: softmax, mask and gradients."""
LOGIT_BYTES = 14
"""Of one logit, beside the products, where the loss works in chunks: read in float32 for maximum, sum and gradient,
which is written in bfloat16."""
UNFUSED_LOGIT_BYTES = 36
"""The same with a loss of separate steps, each of which reads and writes all logits in float32."""
EMBEDDING_PASSES = 6
"""Of T x D, by looking up embeddings and adding their gradients, once a microbatch."""
ENTRY_PASSES = 12
"""The same of what is cut along the sequence: the last norm, the loss's input and its gradient."""
TICK_PASSES = {"elementwise": 9, "copies": 10}
"""Of T x D along the sequence, by what goes between stages: selected, kept, sent; once a tick."""
ALIGNED = 8
"""cuBLAS wants products of multiples of so many; others are padded by copies."""


@dataclass(slots=True)
class Bytes:
    """Of one device, by class of kernel; collectives are apart (megajax.planning.cost.traffic)."""

    copies: float = 0.0
    elementwise: float = 0.0
    matmul: float = 0.0
    attention: float = 0.0

    @property
    def stream(self) -> float:
        """What memory bounds: all but matmuls and attention."""
        return self.copies + self.elementwise

    @property
    def total(self) -> float:
        return self.copies + self.elementwise + self.matmul + self.attention

    def plus(self, other: "Bytes", times: float = 1.0) -> "Bytes":
        """The sum with another, taken that many times."""
        return Bytes(
            self.copies + times * other.copies,
            self.elementwise + times * other.elementwise,
            self.matmul + times * other.matmul,
            self.attention + times * other.attention,
        )


@dataclass(frozen=True, slots=True)
class Product:
    """One matmul of a layer: rows x contracted by contracted x columns."""

    rows: float
    contracted: float
    columns: float
    bytes: float
    backward: bool


def products(run: Description, block: BlockWork, kept: Kept) -> Iterator[Product]:
    """The matmuls of a block's forward and backward pass; of those computed again, both."""
    for matrix in block.matrices:
        inner, outer = matrix.local(run.parallel.tensor)
        pieces = _pieces(run, block, matrix)
        tokens, weights, width = run.tokens, inner * outer, run.width
        forward = (tokens * (pieces[0] * inner + outer) + weights) * width
        yield Product(tokens, inner, outer, forward, False)
        if again(kept, MAKES.get(matrix.kind, "")):
            yield Product(tokens, inner, outer, forward, True)
        # Results of further pieces are added to the first one's: read once more.
        given = (tokens * (outer + (2 * pieces[1] - 1) * inner) + weights) * width
        yield Product(tokens, outer, inner, given, True)
        made = tokens * (pieces[1] * inner + outer) * width + weights * _gradient_bytes(run)
        yield Product(inner, tokens, outer, made, True)


def _pieces(run: Description, block: BlockWork, matrix: Matrix) -> tuple[int, int]:
    """Products that a matrix is applied by, forward and backward: gate and up, or queries, keys and values, apart."""
    if run.system.joined or matrix.kind not in ("projections", "up"):
        return 1, 1
    return (1, 3) if matrix.kind == "projections" else (1 + block.gated, 1 + block.gated)


def _gradient_bytes(run: Description) -> float:
    """What the product that makes a weight's gradient reads and writes of it."""
    if run.parallel.data_sharding == "fsdp":
        return BYTES[run.reduce or run.gradients]
    return 2 * BYTES[run.gradients] if run.system.adds_in_matmul else run.width


def block_bytes(run: Description, block: BlockWork, kept: Kept) -> tuple[Bytes, Bytes]:
    """Forward and backward pass of one block and microbatch, which includes what is computed again."""
    forward, backward, tensor, width = Bytes(), Bytes(), run.parallel.tensor, run.width
    for one in products(run, block, kept):
        half = backward if one.backward else forward
        half.matmul += one.bytes
    _attention(run, block, kept, (forward, backward))
    hidden = run.tokens * run.model.hidden * width
    inner = FFN_PASSES[2 + block.gated] * run.tokens * block.ffn / tensor * width
    heads = run.tokens * (block.projections / tensor + block.copied(tensor)) * width
    passes = RESIDUAL_PASSES * hidden / run.cut + inner + HEAD_PASSES * heads
    parts = ("norm", "activation", "residual", "mlp")
    repeated = sum(again(kept, part) for part in parts) / len(parts)
    forward.elementwise += passes / 3
    backward.elementwise += (2 + repeated) * passes / 3
    if not run.system.joined:
        # XLA joins the products of queries, keys and values itself, by copies of the weights and of their gradients.
        local = (matrix.local(tensor) for matrix in block.matrices if matrix.kind == "projections")
        forward.copies += 2 * sum(rows * columns for rows, columns in local) * width
        backward.copies += 2 * heads
        backward.elementwise += JOINING_PASSES * hidden
    _accumulation(run, block, backward)
    if run.system.stacked:
        # What is kept goes into a stack, and what attention reads comes out of it; matmuls read it there.
        forward.copies += 2 * kept_bytes(run, block, kept)
        backward.copies += 2 * (heads + run.tokens * block.parts["core_attention"] / tensor * width)
    if run.compute == "fp8":
        for matrix in block.matrices:
            rows, columns = matrix.local(tensor)
            # Inputs and outputs' gradients; weights are read in bfloat16 for each microbatch.
            forward.elementwise += CAST_BYTES * (run.tokens * rows + rows * columns)
            backward.elementwise += CAST_BYTES * run.tokens * columns
    return forward, backward


def _attention(run: Description, block: BlockWork, kept: Kept, halves: tuple[Bytes, Bytes]) -> None:
    forward, backward = halves
    core = block.parts["core_attention"]
    tensor = run.parallel.tensor
    once = run.tokens * ((block.projections + core) / tensor + block.copied(tensor)) * run.width
    repeated = again(kept, "core_attention") if block.fused else kept.parts is not None
    forward.attention += once
    backward.attention += (2 + repeated) * once
    if not block.fused:
        scores = (
            run.tokens * run.model.sequence_length * block.heads / run.parallel.tensor * SCORE_BYTES * run.width / 2
        )
        forward.attention += scores / 3
        backward.attention += (2 + repeated) * scores / 3


def _accumulation(run: Description, block: BlockWork, backward: Bytes) -> None:
    """Adding a layer's gradients to those of the microbatches before, and taking weights out of their stack."""
    weights, gradient = block.held(run.model.hidden, run.parallel.tensor), BYTES[run.gradients]
    if run.parallel.data_sharding == "fsdp":
        backward.elementwise += weights / run.shards * (BYTES[run.reduce or run.gradients] + 2 * gradient)
        return
    if not run.system.adds_in_matmul:
        # Copied out of the stack, added up, written into it.
        backward.copies += 2 * gradient * weights
        backward.elementwise += (2 * gradient + run.width) * weights
    elif not run.in_place:
        backward.copies += 4 * gradient * weights
    if not run.in_place:
        backward.copies += 4 * run.width * weights


def table_bytes(run: Description) -> tuple[Bytes, Bytes]:
    """Of the loss of one microbatch on one of the devices that make it, and of looking embeddings up."""
    model, width = run.model, run.width
    stages = run.parallel.pipeline if run.system.head == "spread" else 1
    columns = model.padded_vocabulary() / (stages * run.parallel.tensor)
    table, rows = columns * model.hidden, min(run.tokens, model.loss_chunk)
    chunks, hidden = ceil(run.tokens / rows), run.tokens * model.hidden * width
    times = 1 + len(model.predicting_blocks())
    logits = run.tokens * columns
    forward = Bytes(matmul=times * (hidden + chunks * table * width + 4 * logits))
    # Gradients of the input and of the table, which is added up in float32 chunk by chunk.
    backward = Bytes(matmul=times * (2 * hidden + chunks * table * (width + 8) + 4 * logits))
    if columns % ALIGNED:
        backward.copies += times * chunks * 20 * table
    streamed = times * (LOGIT_BYTES if run.system.fused_loss else UNFUSED_LOGIT_BYTES) * logits
    streamed += EMBEDDING_PASSES * hidden + ENTRY_PASSES * hidden / run.cut
    streamed += 12 * run.tokens * model.hidden * model.learned_positions
    forward.elementwise += streamed / 3
    tables = 1 if model.tied else 2
    # Zeros for a microbatch's gradients of the tables, added to those before.
    backward.elementwise += 2 * streamed / 3 + 12 * tables * table
    backward.copies += 4 * tables * table + 2 * hidden
    return forward, backward


def tick_bytes(run: Description) -> Bytes:
    """Of a tick of a pipeline in lockstep, beside layers and loss; nothing without one."""
    if run.parallel.pipeline == 1 or not run.system.lockstep:
        return Bytes()
    row = run.tokens * run.model.hidden / run.cut * run.width
    return Bytes(**{name: passes * row for name, passes in TICK_PASSES.items()})


def optimizer_bytes(run: Description, weights: float) -> float:
    """Of so many weights: gradient read twice, for the norm and the update; weights and moments read and written; a
    copy in compute dtype made."""
    return weights * (8 + 8 + 2 * run.moments * run.moment_bytes + run.width)


def once_bytes(run: Description, held: float, weights: float) -> Bytes:
    """Once a step. held: weights in use on a device; weights: those it updates."""
    ring = bubble(run).slots * run.rows * sum(kept_bytes(run, one, run.recomputing.kept()) for one in blocks_of(run))
    gradient = BYTES[run.gradients]
    # Zeros, and the transpose before what is summed over devices is cut.
    turned = 2 * gradient * held * (run.shards > 1)
    copies = gradient * held + (ring + turned) * run.system.stacked
    return Bytes(copies=copies, elementwise=optimizer_bytes(run, weights))


def layer_bytes(run: Description) -> tuple[Bytes, Bytes]:
    """Forward and backward pass of all layers of a device, of one microbatch."""
    kept, others, share = run.recomputing.kept(), run.recomputing.others(), run.recomputing_share
    repeats = run.rows * run.parallel.virtual_stages
    forward, backward = Bytes(), Bytes()
    for block in blocks_of(run):
        for part, choice in ((share, kept), (1 - share, others)):
            if part:
                one_forward, one_backward = block_bytes(run, block, choice)
                forward = forward.plus(one_forward, part * repeats)
                backward = backward.plus(one_backward, part * repeats)
    return forward, backward


def step_bytes(run: Description, held: float, weights: float) -> Bytes:
    """Of a step. Forwards run in idle ticks as well. held, weights: see `once_bytes`."""
    schedule = bubble(run)
    forward, backward = layer_bytes(run)
    ticks = (schedule.ticks - schedule.alone) / run.parallel.virtual_stages if run.system.lockstep else run.microbatches
    total = once_bytes(run, held, weights).plus(forward, ticks).plus(backward, run.microbatches)
    for half in table_bytes(run):
        total = total.plus(half, run.microbatches)
    for block in run.model.predicting_blocks():
        work = block_work(block, run.model.hidden, run.model.sequence_length, run.compute)
        for half in block_bytes(run, work, run.recomputing.kept()):
            total = total.plus(half, run.microbatches)
    return total.plus(tick_bytes(run), schedule.ticks)
