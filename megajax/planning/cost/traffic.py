"""The collectives of a step by formulas, and how much of them is hidden behind compute.

What overlaps is read from our compiled programs (docs/planning.md, docs/pipeline.md): in the backward pass two gathers
of a layer, or a gather and a scatter; in the ticks of a pipeline with both kinds of work all traffic between stages;
under FSDP most gathers and all scatters of a layer; nothing of what ZeRO-1 does once a step; of exchanges with experts
what `Beside` has. What attention sends over
`context` was counted in programs of Llama-3 8B and 70B (benchmarks), without ids of documents, 4 bytes a
position.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from megajax.layers.facts import BlockFacts
from megajax.layers.recompute import SavePolicy
from megajax.planning.compiled.links import AxisSpan, seconds
from megajax.planning.cost.description import Description, Tower
from megajax.planning.cost.device_work import Beside, Halves, beside_experts, recomputed
from megajax.planning.cost.memory import copied_weights, footprint, held_weights

GATHERED_BESIDE = (0.6, 0.75)
"""Shares of a layer's weights that our FSDP gathers beside matmuls, in the forward and in the backward pass."""

BESIDE_ANOTHER = 0.85
"""Share of the time of collectives over `tensor` that another microbatch hides, with batch.side_by_side."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind over one axis, of one device and one step."""

    kind: str
    axis: str
    what: str
    count: float
    bytes: float
    """Bytes of the full side, summed over all of them."""
    seconds: float
    """If nothing were hidden."""
    hidden: float
    """Seconds that overlap with computing."""
    contention: float = 0.0
    """Share of these by which the kernels beside it are slower."""

    @property
    def exposed(self) -> float:
        """Seconds that it adds to the step: where nothing is computed, and where kernels are slower beside it."""
        return max(0.0, self.seconds - self.hidden) + self.contention * min(self.seconds, self.hidden)

    def beside(self, computing: float) -> "Traffic":
        """This traffic, hidden by at most `computing` seconds of computation."""
        return replace(self, hidden=min(self.seconds, computing))


def traffic(run: Description, layers: Halves) -> list[Traffic]:
    """Every kind of collective of a step. layers: computing of all layers of a device and microbatch."""
    rows = (*_tensor(run), *_experts(run), *_context(run, layers), *_pipeline(run, layers), *_loss(run))
    return [row for row in (*rows, *_data(run, layers), *_groups(run, layers)) if row.count]


def memory_bytes(run: Description, row: Traffic) -> float:
    """Bytes that its kernels read and write: the full side and a device's part, or the full side twice."""
    axes = row.axis.partition(" ")[0].split("+")  # a program's may be of a part of an axis
    devices = _span(run, "data").size if axes == ["data"] else prod(run.sizes[axis] for axis in axes)
    return row.bytes * (1 + 1 / devices if row.kind in ("all-gather", "reduce-scatter") else 2)


def _span(run: Description, axis: str) -> AxisSpan:
    """The span of groups along mesh axes; `data` includes the devices of `context`."""
    if axis in ("data", "data+expert"):
        expert = run.parallel.expert if axis == "data" else 1
        return AxisSpan.of(run.shards // expert, run.sizes["tensor"] * expert, run.per_node)
    return AxisSpan.along(axis.split("+"), run.sizes, run.per_node)


def _row(
    run: Description,
    label: tuple[str, ...],
    count: float,
    size: float,
    hidden: float = 0.0,
    span: AxisSpan | None = None,
) -> Traffic:
    """label: kind, axis, what; size: bytes of each; hidden: share of the seconds; span: None for all of the axis."""
    kind, axis, what = label
    total = count * seconds(kind, size, span or _span(run, axis), run.device)
    return Traffic(kind, axis, what, count, count * size, total, hidden * total, run.device.contention)


def _tensor(run: Description) -> Iterator[Traffic]:
    if run.parallel.tensor == 1:
        return
    copied = copied_weights(run)[0] / (1 if run.parallel.data_sharding == "replicate" else run.shards)
    yield _row(run, ("all-reduce", "tensor", "gradients of copied heads, once a step"), float(copied > 0), 4 * copied)
    for tower in run.towers:
        yield from _tower_tensor(tower)


def _tower_tensor(tower: Tower) -> Iterator[Traffic]:
    """Collectives of one section: around each part of each block, and of inputs from the section before."""
    run, policy = tower.run, tower.section.recomputing.policy()
    overlap = run.system.tensor_hidden if run.side_by_side == 1 else BESIDE_ANOTHER
    size, source = (tokens * tower.hidden * run.width for tokens in (tower.tokens, tower.source_tokens))
    passes = run.microbatches * tower.repeats
    parts, readers = (
        sum(block.sharded_parts for block in tower.blocks),
        sum(block.memory_ratio > 0 for block in tower.blocks),
    )
    back = passes * tower.differentiated
    once_more = recomputed(policy, "residual") * max(0, parts - len(tower.blocks))
    forward, backward = (0.0, 1.0) if overlap is None else (overlap, overlap)

    def row(kind: str, what: str, count: float, size: float, hidden: float = 0.0) -> Traffic:
        return _row(run, (kind, "tensor", f"{tower.prefix}{what}"), count, size, hidden)

    if run.sequence_shards == 1:
        yield row("all-reduce", "activations, forward", parts * passes, size, forward)
        yield row("all-reduce", "gradients, backward", parts * back, size, backward)
        yield row("all-reduce", "gradients of what is read", readers * back, source, backward)
        yield row("all-reduce", "activations, again", once_more * back, size, forward)
        return
    recomputes = policy.parts is not None
    # Hidden shares in compiled programs that recompute everything, norms and activations, or nothing.
    gathers, scatters = (1 / 4, 1 / 3) if once_more else (1 / 2, 0) if recomputes else (0, 1 / 2)
    counts = {"all-gather": (parts * (1 + recomputes), gathers), "reduce-scatter": (parts + once_more, scatters)}
    for kind, (count, share) in counts.items():
        share, twice = share if overlap is None else overlap, 2 if kind == "all-gather" else 1
        yield row(kind, "activations, forward", parts * passes, size, forward)
        yield row(kind, "activations and gradients, backward", count * back, size, share)
        yield row(kind, "what is read, both ways", readers * passes * twice, source, forward)
        yield row(kind, "embeddings and outputs", 2 * run.microbatches * (tower.before == 0), size)


def _experts(run: Description) -> Iterator[Traffic]:
    """Tokens to their experts and back, also of multi-token prediction, whose block saves all tensors."""
    for tower in run.towers:
        for (policy, repeats), block in product(tower.policies, tower.blocks):
            yield from _exchanges(tower, block, policy, repeats, tower.differentiated)
    everything = SavePolicy(parts=None)
    for block in run.predicting_blocks:
        yield from _exchanges(run.towers[-1], block, everything, 1, True)


def _exchanges(
    tower: Tower, block: BlockFacts, policy: SavePolicy, repeats: float, differentiated: bool
) -> Iterator[Traffic]:
    """Of one block. What compiled programs run beside: see `Beside`.

    In the backward pass the last one brings the inputs' gradients back; those before bring outputs' gradients, and
    inputs again.
    """
    run = tower.run
    for experts in block.experts:
        passes = run.microbatches * repeats * experts.chunks
        beside = beside_experts(tower, block, policy)
        # Chunks run in a loop of their own, which has only the experts' gradients beside an exchange.
        free = Beside(0.0, 0.0, beside.gradients) if experts.chunks > 1 else beside
        rooms = [seconds * passes / experts.chunks for seconds in free]
        sent_twice = policy.parts is not None or experts.chunks > 1
        for message in experts.collectives(tower.tokens, run.spread):
            last = min(1, message.backward) if message.kind != "all-gather" else 0
            early = message.backward - last + message.recompute * sent_twice
            size = message.elements * run.width / experts.chunks
            for what, calls in (("forward", (message.forward,)), ("backward", (0, early, last))):
                count = passes * sum(calls) * (differentiated or what == "forward")
                label = message.kind, "+".join(message.axes), f"{tower.prefix}experts, {what}"
                row = _row(run, label, count, size, run.system.experts_hidden or 0.0)
                if run.system.experts_hidden is None and message.kind != "ragged-all-to-all":
                    hidden = 0.0
                    for place, times in enumerate(calls):
                        used = min(rooms[place], row.seconds * times / max(1, sum(calls)))
                        rooms[place] -= used
                        hidden += used
                    row = row.beside(hidden)
                yield row


class Sent(NamedTuple):
    """Collectives of attention over `context`, of one repeat of a stack's pattern and one microbatch."""

    kind: str
    what: str
    parts: list[float]
    """Bytes of each array on a device; for a gather, before it."""
    beside: str = ""
    """Kernels that the compiler runs at the same time."""
    share: float = 1.0
    """Share of the collectives that run beside it."""
    members: int | None = None
    """Devices of a group; None: all of `context` that the strategy groups."""

    def size(self, devices: int) -> float:
        """Mean bytes on the full side, in groups of this many devices."""
        full = devices if self.kind in ("all-gather", "reduce-scatter") else 1
        return full * sum(self.parts) / len(self.parts)


def sent_by_attention(tower: Tower) -> Iterator[Sent]:
    """Collectives of the `context` strategy, see megajax.kernels.context."""
    run, parallel = tower.run, tower.run.parallel
    times = 1 + recomputed(tower.section.recomputing.policy(), "core_attention")
    queries, keys, outputs = tower.attention_bytes
    tensors, sums = [keys / 2] * 2, [keys / 2 * 4 / run.width] * 2
    if parallel.exchanging() > 1:
        heads = [queries, *tensors, outputs]
        yield Sent("all-to-all", "heads, forward", heads * times)
        # Gradients of the outputs are exchanged beside matmuls.
        yield Sent("all-to-all", "heads, backward", 2 * heads, "matmuls", 1 / 4)
    steps = parallel.context // parallel.exchanging() - 1
    if parallel.context_strategy == "all_gather":
        yield Sent("all-gather", "keys and values, forward", tensors * times)
        yield Sent("all-gather", "keys and values, backward", tensors, "matmuls")
        yield Sent("reduce-scatter", "their gradients, backward", tensors, "matmuls")
    elif steps:
        for what, parts, beside in (
            ("keys and values, forward", tensors * steps * times, "forward kernels"),
            ("both and gradients, backward", (tensors + sums) * steps, "backward kernels"),
            ("last gradients, backward", tensors, "matmuls"),
        ):
            if parallel.pipeline == 1 or not run.system.lockstep:
                yield Sent("collective-permute", what, parts, beside)
                continue
            # Gathers of two devices, two where the ring has more: one runs beside kernels. Odd rings gather at once.
            hops = 1 if steps == 1 or steps % 2 == 0 else 2
            yield Sent("all-gather", what, parts * hops, beside, 1 / hops, 2 if steps % 2 else steps + 1)


def _context(run: Description, layers: Halves) -> Iterator[Traffic]:
    parallel, apart = run.parallel, run.parallel.exchanging()
    for tower in run.towers if parallel.context > 1 else ():
        part = run.microbatches / len(run.towers)
        rooms = {
            "forward kernels": layers.forward.attention_seconds * part,
            "backward kernels": layers.backward.attention_seconds * part,
            "matmuls": layers.backward.matmul_seconds * part / 2,
        }
        for message in sent_by_attention(tower):
            runs = run.microbatches * (message.what.endswith("forward") or tower.differentiated)
            span = AxisSpan.of(parallel.context // apart, parallel.tensor * apart, run.per_node)
            if message.kind == "all-to-all":
                span = AxisSpan.of(apart, parallel.tensor, run.per_node)
            elif message.members is not None and message.members < span.size:
                span = AxisSpan(message.members, message.members if span.nodes == 1 else 1)
            label = message.kind, "context", f"{tower.prefix}{message.what}"
            row = _row(run, label, len(message.parts) * tower.repeats * runs, message.size(span.size), span=span)
            yield row.beside(min(rooms.get(message.beside, 0.0), message.share * row.seconds))


def _pipeline(run: Description, layers: Halves) -> Iterator[Traffic]:
    stages, chunks = run.parallel.pipeline, run.parallel.virtual_stages
    if stages == 1:
        return
    tower = run.towers[-1]
    size = tower.tokens * tower.hidden * run.width / run.sequence_shards
    schedule, span = run.schedule, _span(run, "pipeline")
    permute, reduction = (seconds(kind, size, span, run.device) for kind in ("collective-permute", "all-reduce"))
    between = ("collective-permute", "pipeline", "between stages")
    if not run.system.lockstep:
        count = 2 * run.microbatches * chunks
        # All but those that fill and drain the pipeline.
        hidden = permute * (count - 2 * (stages - 1))
        yield replace(_row(run, between, count, size), hidden=max(0, hidden))
        return
    warmup, steady = schedule.warmup_ticks, schedule.ticks - 2 * schedule.warmup_ticks
    # With one chunk all ticks of both kinds have a microbatch that enters and one that leaves, and reductions travel
    # while layers compute. With more, some ticks have: reductions are in branches, where nothing else runs.
    every = chunks == 1
    forward, backward = layers.forward.seconds / chunks, layers.backward.seconds / chunks
    beside_forward = min(1.0, forward / (permute + 3 * reduction * every))
    beside_backward = min(1.0, backward / (permute + reduction * every))
    count = 2 * schedule.ticks - 2 * warmup
    yield replace(_row(run, between, count, size), hidden=steady * permute * (beside_forward + beside_backward))
    # Forwards alone hide the next embedding; backwards alone hide nothing.
    hidden = reduction * (steady * (3 * beside_forward + beside_backward) + warmup * min(1.0, forward / reduction))
    what = "embeddings, outputs and their gradients, to all stages"
    yield _row(run, ("all-reduce", "pipeline", what), 4 * run.microbatches, size).beside(hidden * every)


def _loss(run: Description) -> Iterator[Traffic]:
    """Sums over the vocabulary: small, and nothing overlaps with them."""
    stages, tensor = run.parallel.pipeline if run.system.lockstep else 1, run.parallel.tensor
    devices = stages * tensor
    if devices == 1 or run.head.replicated:
        return
    rows = min(run.scored, run.head.chunk)
    count = 2 * ceil(run.scored / rows) * run.microbatches
    # Groups reach from stage to stage: as many devices of a node as `tensor` has.
    span = AxisSpan(devices, min(tensor, run.per_node))
    axis = "+".join(["pipeline"] * (stages > 1) + ["tensor"] * (tensor > 1))
    yield _row(run, ("all-reduce", axis, "sums of the loss"), count, 6 * rows, span=span)


def _data(run: Description, layers: Halves) -> Iterator[Traffic]:
    if run.shards == 1:
        return
    sharding = run.parallel.data_sharding
    once, trained = (
        rest if sharding == "fsdp" else stack + rest
        for stack, rest in (held_weights(run), held_weights(run, trained=True))
    )
    before, after = layers.forward.seconds, layers.backward.seconds
    if sharding == "fsdp":
        for tower in run.towers:
            yield from _gathers(tower, before, after / 2)
    # The last (first) microbatches of an interleaved pipeline leave (enter) chunk after chunk, in groups of its stages.
    group = min(run.microbatches, run.parallel.pipeline) if run.parallel.virtual_stages > 1 else 1
    reduced = trained * run.reduced_width
    if sharding == "replicate":
        kinds = [("all-reduce", "gradients", reduced, after)]
    else:
        kinds = [("all-gather", "weights", once * run.width, before), ("reduce-scatter", "gradients", reduced, after)]
    experts = run.predicting_experts + sum(tower.expert_matrices for tower in run.towers) * (sharding != "fsdp")
    parts = [("data", "experts' ", experts / once), ("data+expert", "", 1 - experts / once)]
    for kind, what, size, room in kinds:
        for axis, whose, share in parts if experts else [(_shared_axis(run), "", 1.0)]:
            row = _row(run, (kind, axis, f"{whose}{what}, once a step"), 1, share * size)
            yield row.beside(room * group) if run.system.data_hidden else row


def _groups(run: Description, layers: Halves) -> Iterator[Traffic]:
    """With parallel.shards: each device has its group's sum of the gradients of the weights that it updates."""
    if run.sizes["replica"] == 1:
        return
    size = footprint(run).updated * run.reduced_width
    row = _row(run, ("all-reduce", "replica", "gradients of the groups, once a step"), 1, size)
    yield row.beside(layers.backward.seconds) if run.system.data_hidden else row


def _shared_axis(run: Description) -> str:
    """Axes over which weights outside of experts are replicated."""
    return "data+expert" if run.parallel.expert > 1 else "data"


def _gathers(tower: Tower, before: float, after: float) -> Iterator[Traffic]:
    """FSDP of one section. before, after: seconds of the layers' forward pass, and of a half of the backward pass."""
    run = tower.run
    forward, backward = (1.0, 1.0) if run.system.data_hidden else GATHERED_BESIDE
    experts = tower.expert_matrices
    sizes = {"data": experts, _shared_axis(run): tower.matrices - experts - tower.unsharded}
    for kind, what, width, share, room, needed in (
        ("all-gather", "weights, forward", run.width, forward, before, True),
        ("all-gather", "weights, backward", run.width, backward, after, tower.differentiated),
        ("reduce-scatter", "gradients", run.reduced_width, 1.0, after, tower.trained() > 0),
    ):
        for axis, size in sizes.items():
            count = run.microbatches * tower.repeats * needed * (size > 0)
            label = kind, axis, f"{tower.prefix}a layer's {what}"
            row = _row(run, label, count, size * width / tower.held_repeats)
            part = room * run.microbatches / len(run.towers) * size / tower.matrices
            yield row.beside(share * min(row.seconds, part))
