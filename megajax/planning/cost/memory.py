"""Memory of one device at its peak, by formulas.

What is held at once was read from the buffers of compiled programs; `benchmarks compiled_peaks` compares the peaks.
"""

from dataclasses import dataclass

from megajax.layers.facts import BlockFacts, Matmul
from megajax.layers.recompute import Part
from megajax.models.memory import saved_bytes
from megajax.planning.compiled.devices import GIB
from megajax.planning.cost.description import BYTES, Description, Tower

MLP: tuple[Part, ...] = ("mlp", "activation")
"""Tensors of feed-forward layers; the others are those of mixers."""
ROW_BUFFERS = 2
"""Arrays of as many rows and their width that exist at once in a layer's backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes of one device at the moment when it holds most."""

    parameters: float
    """float32 master weights, at rest."""
    optimizer: float
    """Bytes of moments, without those in host memory."""
    weights: float
    """Weights in the compute dtype, as held during the step."""
    gradients: float
    """Gradients accumulated over microbatches."""
    activations: float
    """Saved for the backward pass: of a microbatch, or in the ring of a pipeline."""
    working: float
    """Temporaries of a layer or of the loss, and tensors sent between stages."""
    updated: float
    """Number of trained weights at rest."""

    @property
    def peak(self) -> float:
        return self.parameters + self.optimizer + self.weights + self.gradients + self.activations + self.working

    @property
    def peak_gib(self) -> float:
        return self.peak / GIB


def held_weights(run: Description, *, trained: bool = False) -> tuple[float, float]:
    """Weights of the stacks' matrices, and all others, on one device of `pipeline` and `tensor`, whole over data.

    As held during the step. trained: without those that are frozen.
    """
    tensor, hidden = run.parallel.tensor, run.towers[-1].hidden
    ahead = sum(block.local_size(tensor) + 2 * hidden**2 / tensor for block in run.predicting_blocks)
    shares = [(tower, tower.trained() if trained else 1.0) for tower in run.towers]
    rest = sum(share * tower.vectors for tower, share in shares) + ahead + run.held_tables(trained=trained)
    return sum(share * tower.matrices for tower, share in shares), rest


def footprint(run: Description) -> Footprint:
    """Memory of the most loaded device; with MEGAJAX as the system all are loaded alike."""
    parallel = run.parallel
    (stack, rest), (stack_trained, rest_trained) = held_weights(run), held_weights(run, trained=True)
    total, trained = stack + rest, stack_trained + rest_trained
    shards = 1 if parallel.data_sharding == "replicate" else run.shards
    # The devices of `expert` share no expert: as much more of these is at rest on each.
    more = (parallel.expert - 1) * (shards > 1)
    experts = more * sum(tower.expert_matrices for tower in run.towers)
    experts_trained = more * sum(tower.trained() * tower.expert_matrices for tower in run.towers)
    # FSDP holds the stack's matrices in shards, but for those without the axis `embed`; what is outside of the stack is
    # gathered once a step.
    if parallel.data_sharding == "fsdp":
        whole = sum(tower.unsharded for tower in run.towers)
        whole_trained = sum(tower.trained() * tower.unsharded for tower in run.towers)
        stack = (stack + experts - whole) / shards + whole
        stack_trained = (stack_trained + experts_trained - whole_trained) / shards + whole_trained
    experts, experts_trained = (size + more * run.predicting_experts for size in (experts, experts_trained))
    within, gradients = stack + rest, stack_trained + rest_trained
    if _one_microbatch(run):
        # Nothing waits for a next microbatch: in the backward pass of the layers the tables are no longer in use, and
        # of the gradients of two tables the head's is there. A tied table has one.
        within -= run.held_tables("vocab")
        token_table = run.held_tables("vocab", trained=True, head=False)
        head = run.held_tables("vocab", trained=True) - token_table
        gradients -= min(token_table, head)
    saved = (
        saved_tensor.layers * saved_tensor.device
        for tower in run.towers
        if tower.differentiated
        for saved_tensor in saved_bytes(tower.section.recomputing, tower.blocks, tower.share, tower.held_rows)
    )
    all_heads, own_heads = copied_weights(run)
    replicated = sum(tower.unsharded for tower in run.towers)
    replicated += sum(block.unsharded.local(parallel.tensor) for block in run.predicting_blocks)
    at_rest = (total + experts + all_heads - own_heads - replicated) / shards + replicated
    updated = at_rest * (trained + experts_trained) / (total + experts)
    copies = 0.0 if run.compute == "float32" and shards == 1 else within * run.width
    return Footprint(
        parameters=4 * at_rest,
        optimizer=(1 - run.offload) * run.moment_bytes * updated,
        weights=copies,
        gradients=gradients * BYTES[run.gradients],
        activations=sum(saved) * run.schedule.slots,
        working=_working(run),
        updated=updated,
    )


def _one_microbatch(run: Description) -> bool:
    """Whether a step has no loop over microbatches or ticks."""
    return run.microbatches == 1 and run.parallel.pipeline == 1


def _working(run: Description) -> float:
    parallel, hidden, pipelined = run.parallel, run.towers[-1].hidden, run.parallel.pipeline > 1
    # A layer's backward pass: what is recomputed, gradients, and whole rows of the residual stream.
    layer = max(
        tower.tokens * run.width * (3 * tower.hidden / run.sequence_shards + 2 * tower.hidden + _unit(tower))
        for tower in run.towers
    )
    # A chunk's logits three times in float32; in a pipeline the table's gradient as well.
    scores = min(run.scored, run.head.chunk) * run.columns * run.head.upsampled
    loss = 12 * scores + 4 * run.columns * hidden * pipelined
    # Without one, gradients of the vocabulary's tables are held through a microbatch's layers; with FSDP, that of the
    # head is added to those before it.
    waits = not pipelined and not _one_microbatch(run)
    tables = 4 * waits * run.held_tables("vocab", trained=True, head=parallel.data_sharding != "fsdp")
    # Inputs from the section before, and their gradient, which all layers add to in float32.
    moved = max(tower.source_tokens * tower.hidden for tower in run.towers) / run.sequence_shards * (run.width + 4)
    # Between stages, and a row's gradients before they are accumulated; under FSDP weights of 2 layers, gradients of 1.
    row = max(tower.matrices / tower.held_repeats for tower in run.towers)
    grouped = max(
        sum(matmul.local_size(parallel.tensor) for matmul in block.matmuls if of_experts(matmul))
        for tower in run.towers
        for block in tower.blocks
    )
    if run.parallel.data_sharding == "fsdp":
        # Experts' gathered matrices are free when the gradients of all of them are there.
        moved += row * (2 * run.width + run.reduced_width) - grouped * run.width
    else:
        # Grouped matmuls are kernels that read copies of a layer's matrices, and whose gradients are added afterwards.
        layer += grouped * (run.width + BYTES[run.gradients])
    if pipelined:
        moved += (10 * run.towers[-1].tokens * hidden / run.sequence_shards + row - grouped) * run.width
    return max(layer, loss) + tables + moved


def of_experts(matmul: Matmul) -> bool:
    """Whether experts have matrices of their own in it: it is a grouped matmul."""
    return matmul.experts > 1 or matmul.expert_shards > 1


def _unit(tower: Tower) -> float:
    """Elements for each token that the backward pass of the pattern holds at once.

    Those of its largest block, and of all others the operands of weights' gradients, which the compiler computes late.
    """
    sizes = [(_layer(tower, block), _operands(tower, block)) for block in tower.blocks]
    return sum(operands for _, operands in sizes) + max(layer - operands for layer, operands in sizes)


def _operands(tower: Tower, block: BlockFacts) -> float:
    """Elements for each token of the inputs of a block's matmuls, and of their outputs' gradients."""
    tensor, spread, total = tower.run.parallel.tensor, tower.run.spread, 0.0
    over_mean = sum(0 if experts.chunks > 1 else experts.over_mean(spread) for experts in block.experts)
    for matmul in block.matmuls:
        rows = matmul.per_token * (over_mean if of_experts(matmul) else 1)
        total += rows * (matmul.inputs.local(tensor) + matmul.outputs.local(tensor))
    return total


def _layer(tower: Tower, block: BlockFacts) -> float:
    """Elements for each token that the backward pass of a block recomputes and differentiates."""
    policy, tensor, spread = tower.section.recomputing.policy(), tower.run.parallel.tensor, tower.run.spread
    sizes = [0.0, 0.0]  # of the mixer and of the MLP: one after the other
    gradients = [0.0, 0.0]
    for part, elements in block.tensors.items():
        times = policy.layers_per_checkpoint * (policy.parts is not None and part not in policy.parts)
        gradients[part in MLP] += elements.local(tensor)
        sizes[part in MLP] += elements.divided * times / tensor + elements.local(tensor)
    # Without a fused kernel a layer's scores exist three times in float32: logits, probabilities and their gradient.
    unfused = [mixer for mixer in tower.full_attention(block) if not mixer.fused]
    sizes[False] += sum(12 / tower.run.width * mixer.work.scores / tensor for mixer in unfused)
    # Gathered keys and values come early in a layer's backward pass. In that of attention there are as many again, cut
    # for a kernel, and the gradients of two calls; with `tensor`, the compiler leaves matmuls of the MLP's weights'
    # gradients for later, to run them beside collectives.
    keys = _gathered_keys(tower, block)
    late = gradients[True] * (keys > 0 and tensor > 1)
    total, outputs = max(sizes[False] + late + 4 * keys, sizes[True] + keys), gradients[True]
    for experts in block.experts:
        # Rows of inputs and of outputs' gradients, of one chunk. Beside them are first the tokens that they are taken
        # from, then the tensors within experts and their gradients, then the inputs' gradients by two matrices.
        rows = experts.rows(1, spread) / experts.chunks
        within = rows * sum(experts.tensors.values()) * (experts.chunks > 1)
        gathered = 2 * spread.expert * experts.width * (experts.way_on(spread.devices) == "gather") / experts.chunks
        buffers = ROW_BUFFERS * rows * experts.width
        total = buffers + max(gathered, total + 2 * within, outputs + within + buffers)
    return total


def _gathered_keys(tower: Tower, block: BlockFacts) -> float:
    """Elements, for each token of a device, of the keys and values of whole rows that a block's attention gathers."""
    parallel = tower.run.parallel
    if parallel.context == 1 or parallel.context_strategy != "all_gather":
        return 0.0
    return parallel.context * tower.full_keys(block)


def copied_weights(run: Description) -> tuple[float, float]:
    """Weights of key-value heads fewer than the devices of `tensor`: at rest on a device, and in use."""
    tensor = run.parallel.tensor
    matmuls = [
        (tower.held_repeats, matmul) for tower in run.towers for block in tower.blocks for matmul in block.matmuls
    ]
    rest, used = (
        sum(times * measure(matmul, tensor) for times, matmul in matmuls)
        for measure in (Matmul.undivided, Matmul.copies)
    )
    return rest, used
