"""Work of one device: seconds of kernels, and bytes through memory.

Kernels read each operand once and write each result once. The numbers of passes over activations are counted in
compiled programs of GPT-3 175B and of Llama-3 8B, 70B and 405B; `benchmarks traffic` compares the sums with those
programs. Bytes come in the classes of `plan --audit`; collectives are in megajax.planning.cost.traffic.

T tokens of a microbatch on a device of `context`, D hidden, F ffn. Times are of one microbatch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import NamedTuple

from megajax.layers.facts import BlockFacts, Matmul
from megajax.layers.recompute import NAMES, Part, SavePolicy
from megajax.planning.cost.description import BYTES, Description, Tower

ATTENTION_BACKWARD = 2.5
"""Operations of fused attention backward over forward: five matmuls (one recomputes the scores) against two."""
RESIDUAL_PASSES = 24
"""Reads and writes of an array of T x D by a block's norms and additions, forward and backward."""
JOINING_PASSES = 3
"""Reads and writes of an array of whole rows, to add the input's gradients from matmuls that are not joined."""
PASSES: dict[Part, int] = {
    "query_key_value": 4,  # rotations, biases, casts beside attention
    "mlp": 2,
    "activation": 4,
}
"""Additional reads and writes of each named tensor of a layer."""
LIGHT: tuple[Part, ...] = ("norm", "activation", "residual", "mlp")
"""Tensors whose recomputation makes memory-bound kernels run again."""
CAST_BYTES = {"fp8": 4.0, "fp8_blocks": 7.7, "mxfp8": 9.0, "nvfp4": 20.0}
"""Bytes of rounding one element for two products. fp8: read in bfloat16, written twice, as it is and transposed; others
as compiled for a B200, fp8_blocks for an H100 too, by `python -m benchmarks compiled_kernels --parts=recipes`."""
ONE_PASS_BYTES = {"fp8": 4.0, "fp8_blocks": 4.0, "mxfp8": 4.1, "nvfp4": 5.1}
"""The same where one kernel reads in bfloat16 and writes both codes and their scales. nvfp4: after another one that
reads for the largest magnitude of the tensor."""
WIDENED_BYTES = 6.0
"""Bytes of widening an element to bfloat16 again for two products, where a device does not multiply blocks."""
SCORE_BYTES = 24
"""Bytes of one attention score, forward and backward, where scores are kept: softmax, mask and gradients."""
COUNTED_SHARE = 0.45
"""Share of the rates of memory and matmuls that a recurrence reaches, if all its bytes are counted: the
rest is the time of small float32 matmuls, by the constants of compiled programs."""
LOGIT_BYTES = 14
"""Bytes of one logit, beside the matmuls, in a loss by chunks: read in float32 for maximum, sum and gradient,
which is written in bfloat16."""
UNFUSED_LOGIT_BYTES = 36
"""Bytes of one logit in a loss of separate steps, each of which reads and writes all logits in float32."""
EMBEDDING_PASSES = 6
"""Passes over T x D by looking up embeddings and accumulating their gradients, once a microbatch."""
ENTRY_PASSES = 12
"""Passes over T x D along the sequence by the last norm, the loss's input and its gradient, once a microbatch."""
TICK_PASSES = {"elementwise": 9, "copies": 10}
"""Passes over T x D along the sequence by tensors between stages: selected, kept, sent; once a tick."""
ALIGNED = 8
"""cuBLAS needs matrices whose number of columns is a multiple of this; others are copied with padding."""


@dataclass(slots=True)
class Work:
    """Seconds of one device by bound, and bytes through memory by class of kernel."""

    matmul_seconds: float = 0.0
    attention_seconds: float = 0.0
    stream_seconds: float = 0.0
    """Memory-bound kernels."""
    copies: float = 0.0
    elementwise: float = 0.0
    matmul: float = 0.0
    attention: float = 0.0

    @property
    def seconds(self) -> float:
        return self.matmul_seconds + self.attention_seconds + self.stream_seconds

    @property
    def stream(self) -> float:
        """Bytes of memory-bound kernels."""
        return self.copies + self.elementwise

    def plus(self, other: "Work", times: float = 1.0) -> "Work":
        """The sum of this and `times` the other."""
        return Work(*(getattr(self, name) + times * getattr(other, name) for name in self.__slots__))

    def streamed(self, run: Description) -> "Work":
        """The same with the seconds of its memory-bound bytes."""
        self.stream_seconds = run.system.overhead * self.stream / run.device.memory_rate
        return self


class Halves(NamedTuple):
    """Forward and backward pass; the backward pass includes what is recomputed."""

    forward: Work
    backward: Work

    def plus(self, other: "Halves", times: float = 1.0) -> "Halves":
        return Halves(*(work.plus(added, times) for work, added in zip(self, other, strict=True)))


def recomputed(policy: SavePolicy, part: Part | None) -> bool:
    """Whether the backward pass recomputes a named tensor."""
    return policy.parts is not None and part in NAMES and part not in policy.parts


@dataclass(frozen=True, slots=True)
class LayerMatmul:
    """One matmul of a layer, rows x contracted by contracted x columns, or one for each expert."""

    rows: float
    contracted: float
    columns: float
    bytes: float
    """Bytes of all experts."""
    backward: bool = False
    experts: int = 1
    compute: str = ""
    """What is multiplied; "": what the run computes in."""
    codes: bool = False
    """By a kernel of codes."""

    def seconds(self, run: Description) -> float:
        shape = self.rows, self.contracted, self.columns
        computing = run.device.matmul_seconds(self.compute or run.compute, shape, self.experts, codes=self.codes)
        return run.system.overhead * max(computing, self.bytes / run.device.memory_rate)


def _grouped(matmul: Matmul) -> bool:
    """Whether it is one of experts, here or on other devices."""
    return matmul.experts * matmul.expert_shards > 1


def _multiplied(run: Description, matmul: Matmul) -> tuple[str, bool]:
    """What a matmul multiplies, and whether by a kernel of codes."""
    sides = matmul.inputs.local(run.parallel.tensor), matmul.outputs.local(run.parallel.tensor)
    return run.multiplied(sides, experts=_grouped(matmul))


def products(
    run: Description, matmuls: Sequence[Matmul], all_tokens: int, policy: SavePolicy, *, trained: bool = True
) -> Iterator[LayerMatmul]:
    """Products of the forward and the backward pass of matmuls; recomputed matmuls are in both."""
    width, tensor = run.width, run.parallel.tensor
    accumulated = run.reduced_width if run.parallel.data_sharding == "fsdp" else 2 * BYTES[run.gradients]
    for matmul in matmuls:
        inner, outer, experts = matmul.inputs.local(tensor), matmul.outputs.local(tensor), matmul.experts
        behind = matmul.weights if run.system.xla else 1
        ahead = 1 if matmul.joined else behind
        tokens, weights = all_tokens * matmul.per_token, matmul.local_size(tensor)
        rows, kind = tokens / experts, _multiplied(run, matmul)
        forward = (tokens * (ahead * inner + outer) + weights) * width
        yield LayerMatmul(rows, inner, outer, forward, False, experts, *kind)
        if recomputed(policy, matmul.result):
            yield LayerMatmul(rows, inner, outer, forward, True, experts, *kind)
        # Results of further weights are added to the first one's: read once more.
        input_gradient = (tokens * (outer + (2 * behind - 1) * inner) + weights) * width
        yield LayerMatmul(rows, outer, inner, input_gradient, True, experts, *kind)
        weight_gradient = tokens * (behind * inner + outer) * width + weights * accumulated
        if trained:
            yield LayerMatmul(inner, rows, outer, weight_gradient, True, experts, *kind)


def matmul_work(run: Description, matmuls: Iterable[LayerMatmul]) -> Halves:
    """Work of `products`."""
    halves = Halves(Work(), Work())
    for matmul in matmuls:
        half = halves[matmul.backward]
        half.matmul += matmul.bytes
        half.matmul_seconds += matmul.seconds(run)
    return halves


def block_work(tower: Tower, block: BlockFacts, policy: SavePolicy) -> Halves:
    """Work of a block that saves these tensors for its backward pass, without collectives."""
    run, trained = tower.run, tower.trained(adapters=False) > 0
    halves = forward, backward = matmul_work(run, products(run, block.matmuls, tower.tokens, policy, trained=trained))
    tensor, bytes_per_element = run.parallel.tensor, tower.tokens * run.width
    _attention(tower, block, policy, halves)
    hidden = bytes_per_element * tower.hidden
    heads, core = (
        bytes_per_element * block.elements(part).local(tensor) for part in ("query_key_value", "core_attention")
    )
    inner = sum(passes * block.elements(part).local(tensor) for part, passes in PASSES.items())
    passes = RESIDUAL_PASSES * block.parts / 2 * hidden / run.sequence_shards + bytes_per_element * inner
    repeat = sum(recomputed(policy, part) for part in LIGHT) / len(LIGHT)
    forward.elementwise += passes / 3
    backward.elementwise += (2 + repeat) * passes / 3
    if run.system.xla:
        # XLA joins the matmuls of queries, keys and values itself, by copies of the weights and of their gradients.
        forward.copies += 2 * run.width * sum(matmul.local_size(tensor) for matmul in block.matmuls if matmul.joined)
        backward.copies += 2 * heads
        backward.elementwise += JOINING_PASSES * hidden
        # Saved tensors go into a stacked array; attention reads copies of them, matmuls read them in place.
        forward.copies += 2 * block.saved_bytes(policy, tower.share) * tower.differentiated
        backward.copies += 2 * (heads + core)
    gradient, weights = BYTES[run.gradients], block.local_size(tensor) * trained
    # The layer's gradients are added to those of the microbatches before.
    if run.parallel.data_sharding == "fsdp":
        backward.elementwise += weights / run.shards * (run.reduced_width + 2 * gradient)
    elif not run.in_place:
        backward.copies += 4 * gradient * weights + 4 * run.width * weights
    _experts(tower, block, halves)
    if cast := (ONE_PASS_BYTES if run.system.one_pass else CAST_BYTES).get(run.compute):
        for matmul in block.matmuls:
            widened = run.device.multiplied(_multiplied(run, matmul)[0]) == "bfloat16"
            rows, columns = matmul.inputs.local(tensor), matmul.outputs.local(tensor)
            # Inputs and outputs' gradients; weights are read in bfloat16 for each microbatch, or once a step.
            tokens, times = tower.tokens * matmul.per_token, run.microbatches if run.rounded_once else 1
            matrices = (cast / (times if _grouped(matmul) else 1) + WIDENED_BYTES * widened) * matmul.local_size(tensor)
            forward.elementwise += (cast + WIDENED_BYTES * widened) * tokens * rows + matrices
            backward.elementwise += (cast + WIDENED_BYTES * widened) * tokens * columns
    return Halves(forward.streamed(run), backward.streamed(run) if tower.differentiated else Work())


class Beside(NamedTuple):
    """Seconds of a block's kernels that compiled programs run beside exchanges with its experts."""

    forward: float
    """The shared expert, unless its own gather over `tensor` waits behind the exchange, and copies of saved tensors."""
    repeated: float
    """What is computed again outside of experts."""
    gradients: float
    """Gradients of experts' matrices."""


def beside_experts(tower: Tower, block: BlockFacts, policy: SavePolicy) -> Beside:
    """Of one block and microbatch. All other kernels wait for an exchange, or for rows that it brings."""
    run, repeated, gradients, trained = tower.run, 0.0, 0.0, tower.trained(adapters=False) > 0
    for matmul in block.matmuls:
        forward, *others = products(run, [matmul], tower.tokens, policy)
        if _grouped(matmul):
            gradients += others[-1].seconds(run) * trained
        elif recomputed(policy, matmul.result):
            repeated += forward.seconds(run)
    halves = Halves(Work(), Work())
    _attention(tower, block, policy, halves)
    repeated += halves.forward.attention_seconds * recomputed(policy, "core_attention")
    rate = run.parallel.tensor * run.device.matmul_rate(run.compute) / run.system.overhead
    shared = sum(2 * tower.tokens * experts.shared / rate for experts in block.experts) * (run.sequence_shards == 1)
    copied = 2 * block.saved_bytes(policy, tower.share) * tower.differentiated * run.system.xla
    return Beside(shared + run.system.overhead * copied / run.device.memory_rate, repeated, gradients)


def _attention(tower: Tower, block: BlockFacts, policy: SavePolicy, halves: Halves) -> None:
    """The kernels between a mixer's matmuls."""
    run, (forward, backward) = tower.run, halves
    device, tensor = run.device, run.parallel.tensor
    for mixer in block.mixers:
        queries = 2.0 * tower.tokens / tensor
        once = tower.tokens * run.width * sum(elements.local(tensor) for elements in mixer.tensors)
        if mixer.fused:
            repeat = recomputed(policy, "core_attention")
            seconds = queries * mixer.work.unmasked / device.attention_rate(backward=False)
            behind = ATTENTION_BACKWARD * queries * mixer.work.unmasked / device.attention_rate(backward=True)
        else:
            work, of_scores = mixer.work, mixer.work.scores * SCORE_BYTES / 2
            # Scores have no name: only recompute=none saves them.
            repeat = recomputed(policy, "core_attention") if work.moved else policy.parts is not None
            stored = tower.tokens * (work.moved or of_scores) * run.width / tensor
            by_chunks = work.scores < mixer.heads * tower.section.length  # of a state space
            share = COUNTED_SHARE if work.moved else device.scan if by_chunks else 1.0
            computing = queries * work.multiply_adds / device.matmul_rate(run.dtype)
            seconds = (computing + stored / 3 / device.memory_rate) / share
            behind, once = 2 * seconds, once + stored / 3
        forward.attention_seconds += seconds
        backward.attention_seconds += behind + repeat * seconds
        forward.attention += once
        backward.attention += (2 + repeat) * once


def _experts(tower: Tower, block: BlockFacts, halves: Halves) -> None:
    """Dispatch of tokens to rows of experts, and their sum; kernels skip unused rows, copies do not."""
    run, (forward, backward) = tower.run, halves
    for experts in block.experts:
        rows, mean = (run.width * count(tower.tokens, run.spread) for count in (experts.rows, experts.mean_rows))
        inner = sum(PASSES.get(part, 0) * elements for part, elements in experts.tensors.items())
        inner_bytes = rows * inner * (experts.chunks > 1)  # those of one chunk are among the block's tensors
        # Tokens become rows, in the backward pass again, as do gradients; rows become tokens, and inputs' gradients.
        copied = (rows + 2 * mean) * experts.width
        forward.copies += copied
        backward.copies += 2 * copied
        forward.elementwise += inner_bytes / 3
        backward.elementwise += inner_bytes + 3 * rows * experts.width


def table_work(run: Description) -> Halves:
    """Work of the loss of one microbatch on one of the devices that compute it, and of looking up embeddings."""
    head, width, device, last = run.head, run.width, run.device, run.towers[-1]
    stages = run.parallel.pipeline if run.system.lockstep else 1
    columns, scored = run.columns * (1 if head.replicated else run.parallel.pipeline / stages), run.scored
    table, rows = columns * last.hidden, min(scored, head.chunk)
    chunks, hidden = ceil(scored / rows), scored * last.hidden * width
    times, logits = 1 + len(run.predicting_blocks), scored * columns * head.upsampled
    forward = Work(matmul=times * (hidden + chunks * table * width + 4 * logits))
    # Gradients of the input and of the table, which is accumulated in float32 chunk by chunk.
    backward = Work(matmul=times * (2 * hidden + chunks * table * (width + 8) + 4 * logits))
    if columns % ALIGNED:
        backward.copies += times * chunks * 20 * table
    streamed = times * (LOGIT_BYTES if run.system.fused_loss else UNFUSED_LOGIT_BYTES) * logits
    for tower in (tower for tower in run.towers if tower.before == 0):
        row = tower.tokens * tower.hidden
        streamed += width * row * (EMBEDDING_PASSES + ENTRY_PASSES / run.sequence_shards) + (
            12 * row * tower.section.adds_positions
        )
    forward.elementwise += streamed / 3
    tables = run.held_tables("vocab") * run.parallel.pipeline / stages
    # Zeros for a microbatch's gradients of the tables, added to those before.
    backward.elementwise += 2 * streamed / 3 + 12 * tables
    backward.copies += 4 * tables + 2 * hidden
    rate = device.matmul_rate(run.dtype) * device.matmul_share(rows, last.hidden, columns)
    once = times * 2 * scored * last.hidden * columns / rate
    for half, count in ((forward, 1), (backward, 2)):
        half.matmul_seconds = run.system.overhead * max(count * once, half.matmul / run.device.memory_rate)
    return Halves(forward.streamed(run), backward.streamed(run))


def tick_work(run: Description) -> Work:
    """Work of a tick of a pipeline in lockstep, beside layers and loss; nothing without a pipeline."""
    if run.parallel.pipeline == 1 or not run.system.lockstep:
        return Work()
    tower = run.towers[-1]
    row = tower.tokens * tower.hidden / run.sequence_shards * run.width
    return Work(**{name: passes * row for name, passes in TICK_PASSES.items()}).streamed(run)


def head_work(run: Description) -> Halves:
    """Work of the loss and the inputs of one microbatch, and of multi-token prediction."""
    head, last = table_work(run), run.towers[-1]
    entries = [(t.section.matmuls, t.tokens, t.section.frozen) for t in run.towers if t.before == 0]
    for matmuls, tokens, frozen in [(run.head.matmuls, run.scored, False), *entries]:
        halves = matmul_work(run, products(run, matmuls, tokens, SavePolicy(parts=None)))
        head = head.plus(Halves(halves.forward, Work()) if frozen else halves)
    for block in run.predicting_blocks:
        merging = LayerMatmul(last.tokens, 2 * last.hidden, last.hidden / run.parallel.tensor, 0.0).seconds(run)
        head = head.plus(block_work(last, block, last.section.recomputing.policy()))
        head = head.plus(Halves(Work(matmul_seconds=merging), Work(matmul_seconds=2 * merging)))
    return head


def head_share(run: Description, layers: Halves, head: Halves) -> float:
    """Share of a microbatch's loss and inputs that the slowest device computes beside its layers.

    Whole where stages run in lockstep, or the layers fill all chunks. Otherwise stages with the loss have fewer layers:
    only what does not fit in their place is added, with the work spread evenly over the stages at best.
    """
    parallel, tower = run.parallel, run.towers[-1]
    filled = tower.section.stack.repeats / (tower.rows * parallel.chunks())
    if run.system.lockstep or parallel.pipeline == 1 or filled == 1:
        return 1.0
    whole, loss = (sum(half.seconds for half in halves) for halves in (layers, head))
    return max(0.0, (whole * filled + loss / parallel.pipeline - whole) / loss)


def layers_work(run: Description) -> Halves:
    """Work of all layers of one device and one microbatch."""
    total = Halves(Work(), Work())
    for tower in run.towers:
        for block, (policy, repeats) in product(tower.blocks, tower.policies):
            total = total.plus(block_work(tower, block, policy), repeats)
    return total


def once_work(run: Description, weights_in_use: float, weights: float) -> Work:
    """Bytes of the optimizer and of the start of a step. weights: those that it updates."""
    ring = run.schedule.slots * sum(
        tower.held_rows * block.saved_bytes(tower.section.recomputing.policy(), tower.share)
        for tower in run.towers
        if tower.differentiated
        for block in tower.blocks
    )
    gradient = BYTES[run.gradients]
    # Zeros, and the transpose before what is reduced over devices is cut.
    turned = 2 * gradient * weights_in_use * (run.copies > 1)
    copies = gradient * weights_in_use + (ring + turned) * run.system.xla
    # Gradients are read twice, for the norm and the update; weights and moments read and written; a copy is made.
    return Work(copies=copies, elementwise=weights * (8 + 8 + 2 * run.moment_bytes + run.width))


def step_work(run: Description, layers: Halves, head: Halves, once: Work) -> Work:
    """Bytes of a step, from those of a microbatch. Forwards run in idle ticks as well."""
    schedule = run.schedule
    ticks = (
        (schedule.ticks - schedule.warmup_ticks) / run.parallel.virtual_stages
        if run.system.lockstep
        else run.microbatches
    )
    total = once.plus(layers.forward, ticks).plus(layers.backward, run.microbatches)
    total = total.plus(head.forward, run.microbatches).plus(head.backward, run.microbatches)
    return total.plus(tick_work(run), schedule.ticks)
