"""What one device holds during a step, by formulas that follow the program: its accumulators, its ring, its recompute.

They are compared with compiled plans in docs/planning.md. Vectors (norms, biases) are taken as whole on every device of
`tensor`, which they are while layers use them.
"""

from dataclasses import dataclass

from megajax.planning.cost.block_work import BlockWork, block_work, blocks_of, kept_bytes, kept_whole
from megajax.planning.cost.description import BYTES, Description
from megajax.planning.cost.pipeline_bubble import bubble
from megajax.planning.program.devices import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes of one device at the moment when it holds most."""

    parameters: float
    """float32 master weights, at rest."""
    optimizer: float
    """Its moments, without those that wait in host memory."""
    weights: float
    """In compute dtype, as held during the step."""
    gradients: float
    """Added up over microbatches."""
    activations: float
    """What the backward pass finds: of a microbatch, or in the ring of a pipeline."""
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

    As held during the step: of key-value heads fewer than the devices of `tensor`, one.
    """
    model, parallel, tensor = run.model, run.parallel, run.parallel.tensor
    blocks, rows = blocks_of(run), run.rows * parallel.virtual_stages
    further = [
        block_work(block, model.hidden, model.sequence_length, run.compute) for block in model.predicting_blocks()
    ]
    stack = rows * sum(block.held(model.hidden, tensor) for block in blocks)
    vectors = rows * sum(block.vectors for block in blocks)
    shared = sum(block.held(model.hidden, tensor) + 2 * model.hidden**2 / tensor for block in further)
    positions = model.sequence_length * model.hidden if model.learned_positions else 0
    return stack, vectors + shared + positions + _table(run) * (1 if model.tied else 2)


def _table(run: Description) -> float:
    """Weights of a device's share of one table of the vocabulary."""
    return run.model.padded_vocabulary() * run.model.hidden / (run.parallel.pipeline * run.parallel.tensor)


def footprint(run: Description) -> Footprint:
    """Of the most loaded device; with OURS as the system all are loaded alike."""
    parallel, blocks = run.parallel, blocks_of(run)
    stack, rest = held_weights(run)
    held, table, rows = stack + rest, _table(run), run.rows * parallel.virtual_stages
    spread = 1 if parallel.data_sharding == "replicate" else run.shards
    # FSDP holds the stack's matrices in shards; what is outside of the stack is gathered once a step.
    within = stack / spread + rest if parallel.data_sharding == "fsdp" else held
    ring = bubble(run).slots
    share, chosen = run.recomputing_share, run.recomputing
    kept = sum(
        share * kept_bytes(run, block, chosen.kept()) + (1 - share) * kept_bytes(run, block, chosen.others())
        for block in blocks
    )
    rest_heads, held_heads = kept_whole(run)
    at_rest = held + rest_heads - held_heads
    copies = 0.0 if run.compute == "float32" and spread == 1 else within * run.width
    return Footprint(
        parameters=4 * at_rest / spread,
        optimizer=(1 - run.moments_away) * run.moments * run.moment_bytes * at_rest / spread,
        weights=copies,
        gradients=within * BYTES[run.gradients],
        activations=kept * run.rows * ring,
        working=max(_block(run, blocks), _loss(run, table)) + _tables(run, table) + _travelling(run, stack / rows),
    )


def _block(run: Description, blocks: list[BlockWork]) -> float:
    """Of a layer's backward pass: what is computed again, gradients, and whole rows of the residual stream."""
    kept, tensor, hidden = run.recomputing.kept(), run.parallel.tensor, run.model.hidden
    largest = 0.0
    for block in blocks:
        again = sum(count for part, count in block.parts.items() if kept.parts is not None and part not in kept.parts)
        both = (sum(block.parts.values()) + again * kept.together) / tensor
        largest = max(largest, both + block.copied(tensor))
    return run.tokens * run.width * (3 * hidden / run.cut + 2 * hidden + largest)


def _loss(run: Description, table: float) -> float:
    """A chunk's logits three times in float32; in a pipeline the table's gradient as well, see `_tables`."""
    gradient = 4 * table * (run.parallel.pipeline > 1)
    return 12 * min(run.tokens, run.model.loss_chunk) * table / run.model.hidden + gradient


def _tables(run: Description, table: float) -> float:
    """Gradients of the vocabulary's tables, which without a pipeline are held through a microbatch's layers."""
    return 0.0 if run.parallel.pipeline > 1 else 4 * table * (1 if run.model.tied else 2)


def _travelling(run: Description, row: float) -> float:
    """Between stages, and a row's gradients before they are added up; under FSDP two layers' weights, one's gradients.

    row: matrices of a repeat of the pattern, on one device of `tensor`.
    """
    gradient = BYTES[run.reduce or run.gradients]
    moved = row * (2 * run.width + gradient) if run.parallel.data_sharding == "fsdp" else 0.0
    if run.parallel.pipeline > 1:
        moved += (10 * run.tokens * run.model.hidden / run.cut + row) * run.width
    return moved
