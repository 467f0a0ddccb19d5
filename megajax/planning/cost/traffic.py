"""The collectives of a step by mesh axis: how many, how many bytes, how long, and how much of that computing hides.

What overlaps what is read from our compiled programs (docs/planning.md, docs/pipeline.md): in the backward pass two
gathers of a layer, or a gather and a scatter; in the ticks of a pipeline with both kinds of work what travels between
stages; under FSDP most gathers and all scatters of a layer; nothing of what ZeRO-1 does once a step.

Times are ring (bandwidth) and tree (latency) costs as in NCCL's own model: of n devices, a ring all-gather or
reduce-scatter sends (n-1)/n of the whole from each, an all-reduce twice that. A ring that crosses nodes leaves and
enters each node once, and all devices of the group in that node carry parts of it in parallel over their own network
links.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2, prod

from megajax.planning.cost.costs import Device
from megajax.planning.cost.description import BYTES, Description, pipeline_bubble
from megajax.planning.cost.work import Halves, recomputed

GATHERED_BESIDE = (0.6, 0.75)
"""Shares of a layer's weights that our FSDP gathers beside matmuls, in the forward and in the backward pass."""


@dataclass(frozen=True, slots=True)
class Span:
    """The devices of one group along a mesh axis."""

    size: int
    inside: int
    """How many of them are in one node."""

    @classmethod
    def of(cls, size: int, stride: int, per_node: int) -> "Span":
        """size: devices of the group; stride: places in the mesh from one to the next."""
        return cls(size, min(size, max(1, per_node // stride)))

    @classmethod
    def along(cls, axes: Sequence[str], mesh: Mapping[str, int], per_node: int) -> "Span":
        """Of groups along mesh axes, outermost first; mesh: axis -> size. Of several axes, their product's devices."""
        size = inside = 1
        for axis in reversed(axes):
            names = list(mesh)
            stride = prod(mesh[name] for name in names[names.index(axis) + 1 :])
            size *= mesh[axis]
            inside *= cls.of(mesh[axis], stride, per_node).inside
        return cls(size, inside)

    @property
    def nodes(self) -> int:
        """Nodes it reaches."""
        return ceil(self.size / self.inside)


def ring_rate(device: Device, span: Span) -> float:
    """Bytes per second that each device of a group sends in a ring."""
    nvlink = device.nvlink * device.nvlink_share
    if span.nodes == 1:
        return nvlink
    return min(nvlink, span.inside * device.network * device.network_share)


def seconds(kind: str, size: float, span: Span, device: Device) -> float:
    """Of one collective. size: bytes of its whole side (gathered, unreduced; of a permute, what each device sends)."""
    if span.size < 2:
        return 0.0
    if kind == "collective-permute":
        # The slowest pair is that between nodes, if there is one; each device has a network link of its own.
        between = span.nodes > 1
        speed = device.network * device.network_share if between else device.nvlink * device.nvlink_share
        return device.launch + size / speed + (device.network_latency if between else device.nvlink_latency)
    twice = 2 if kind == "all-reduce" else 1
    moved = twice * size * (span.size - 1) / span.size
    hops = (span.inside - 1) * device.nvlink_latency + (span.nodes - 1) * device.network_latency
    ring = moved / ring_rate(device, span) + twice * hops
    # A tree moves as much at the links' rate and has as many hops as the group can be halved.
    steps = ceil(log2(span.inside or 1)) * device.nvlink_latency + ceil(log2(span.nodes)) * device.network_latency
    tree = (twice * size / ring_rate(device, span)) + 2 * steps
    return device.launch + (min(ring, tree) if kind == "all-reduce" else ring)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind over one axis, of one device and one step."""

    kind: str
    axis: str
    what: str
    """What moves, in words."""
    count: float
    bytes: float
    """Of the whole side of all of them."""
    seconds: float
    """If nothing were hidden."""
    hidden: float
    """Of the seconds, what overlaps with computing."""

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed."""
        return max(0.0, self.seconds - self.hidden)

    def beside(self, computing: float) -> "Traffic":
        """The same, hidden by so many seconds of computing at most."""
        return replace(self, hidden=min(self.seconds, computing))


def traffic(run: Description, layers: Halves, held: tuple[float, float]) -> list[Traffic]:
    """Every kind of collective of a step.

    layers: computing of all layers of a device and microbatch; held: weights of the stack and all others on a device.
    """
    rows = (*_tensor(run), *_context(run, layers), *_pipeline(run, layers), *_loss(run), *_data(run, layers, held))
    return [row for row in rows if row.count]


def memory_bytes(run: Description, row: Traffic) -> float:
    """What its kernels read and write in memory: the whole side and a device's part, or the whole twice."""
    axes = row.axis.partition(" ")[0].split("+")  # a program's may be of a part of an axis
    devices = run.shards if axes == ["data"] else prod(run.sizes[axis] for axis in axes)
    return row.bytes * (1 + 1 / devices if row.kind in ("all-gather", "reduce-scatter") else 2)


def copied_weights(run: Description) -> tuple[float, float]:
    """Weights of key-value heads fewer than the devices of `tensor`: all that a device has at rest, and those copies
    that it holds during the step."""
    tensor, matmuls = run.parallel.tensor, [matmul for block in run.blocks for matmul in block.matmuls]
    rest = sum(matmul.undivided(tensor) for matmul in matmuls)
    return run.repeats * rest, run.repeats * sum(matmul.copies(tensor) for matmul in matmuls)


def _span(run: Description, axis: str) -> Span:
    """Of the groups along a mesh axis; `data` takes all devices that hold the same weights."""
    if axis == "data":
        return Span.of(run.shards, run.sizes["tensor"], run.per_node)
    return Span.along((axis,), run.sizes, run.per_node)


def _row(run: Description, named: tuple[str, str, str], count: float, size: float, hidden: float = 0.0) -> Traffic:
    """named: kind, axis, what; size: bytes of each; hidden: share of the seconds."""
    kind, axis, what = named
    total = count * seconds(kind, size, _span(run, axis), run.device)
    return Traffic(kind, axis, what, count, count * size, total, hidden * total)


def _tensor(run: Description) -> Iterator[Traffic]:
    if run.parallel.tensor == 1:
        return
    size = run.tokens * run.model.hidden * run.width
    layers = run.microbatches * run.repeats * len(run.blocks)
    kept, given = run.recomputing.policy(), run.system.tensor_hidden
    once_more = recomputed(kept, "residual")
    copied = copied_weights(run)[0] / (1 if run.parallel.data_sharding == "replicate" else run.shards)
    yield _row(run, ("all-reduce", "tensor", "gradients of copied heads, once a step"), float(copied > 0), 4 * copied)
    forward = 0.0 if given is None else given
    if run.cut == 1:
        beside = 1.0 if given is None else given
        yield _row(run, ("all-reduce", "tensor", "activations, forward"), 2 * layers, size, forward)
        yield _row(run, ("all-reduce", "tensor", "gradients, backward"), 2 * layers, size, beside)
        yield _row(run, ("all-reduce", "tensor", "activations, again"), once_more * layers, size, forward)
        return
    gathers, scatters = (2 if kept.parts is None else 4), 2 + once_more
    # Counted in compiled programs: of all that is recomputed, of norms and activations, of nothing.
    loose = (1, 1) if once_more else (0, 1) if kept.parts is None else (2, 0)
    beside_matmuls = {"all-gather": (gathers, loose[0]), "reduce-scatter": (scatters, loose[1])}
    for kind, (count, free) in beside_matmuls.items():
        yield _row(run, (kind, "tensor", "activations, forward"), 2 * layers, size, forward)
        share = free / count if given is None else given
        yield _row(run, (kind, "tensor", "activations and gradients, backward"), count * layers, size, share)
        yield _row(run, (kind, "tensor", "embeddings and outputs"), 2 * run.microbatches, size)


def _context(run: Description, layers: Halves) -> Iterator[Traffic]:
    """Ring attention: keys and values go around, and their gradients backwards."""
    devices, tensor = run.parallel.context, run.parallel.tensor
    if devices == 1:
        return
    keys = [block.elements("query_key_value") for block in run.blocks]
    size = run.tokens * sum(each.grouped / tensor + each.copied(tensor) for each in keys) * run.width
    count = 3 * (devices - 1) * run.repeats * run.microbatches
    attention = layers.forward.attention_seconds + layers.backward.attention_seconds
    row = _row(run, ("collective-permute", "context", "keys and values"), count, size)
    yield row.beside(attention * run.microbatches * (devices - 1) / devices)


def _pipeline(run: Description, layers: Halves) -> Iterator[Traffic]:
    stages, chunks = run.parallel.pipeline, run.parallel.virtual_stages
    if stages == 1:
        return
    size = run.tokens * run.model.hidden * run.width / run.cut
    schedule, span = pipeline_bubble(run), _span(run, "pipeline")
    permute = seconds("collective-permute", size, span, run.device)
    between = ("collective-permute", "pipeline", "between stages")
    if not run.system.lockstep:
        count = 2 * run.microbatches * chunks
        # All but those that fill and drain the pipeline.
        hidden = permute * (count - 2 * (stages - 1))
        yield replace(_row(run, between, count, size), hidden=max(0, hidden))
        return
    reduction = seconds("all-reduce", size, span, run.device)
    alone = schedule.alone
    both = schedule.ticks - 2 * alone
    # With one chunk all ticks of both kinds have a microbatch that enters and one that leaves, and reductions travel
    # while layers compute. With more, some ticks have: reductions are in branches, where nothing else runs.
    every = chunks == 1
    forward, backward = layers.forward.seconds / chunks, layers.backward.seconds / chunks
    beside_forward = min(1.0, forward / (permute + 3 * reduction * every))
    beside_backward = min(1.0, backward / (permute + reduction * every))
    count = 2 * schedule.ticks - 2 * alone
    yield replace(_row(run, between, count, size), hidden=both * permute * (beside_forward + beside_backward))
    # Forwards alone hide the next embedding; backwards alone hide nothing.
    hidden = reduction * (both * (3 * beside_forward + beside_backward) + alone * min(1.0, forward / reduction))
    what = "embeddings, outputs and their gradients, to all stages"
    yield _row(run, ("all-reduce", "pipeline", what), 4 * run.microbatches, size).beside(hidden * every)


def _loss(run: Description) -> Iterator[Traffic]:
    """Sums over the vocabulary: small, and nothing overlaps with them."""
    spread = run.parallel.pipeline if run.system.head == "spread" else 1
    devices = spread * run.parallel.tensor
    if devices == 1:
        return
    rows = min(run.tokens, run.model.loss_chunk)
    count = 2 * ceil(run.tokens / rows) * run.microbatches
    # Groups reach from stage to stage: as many devices of a node as `tensor` has.
    inside = min(run.parallel.tensor, run.per_node) if spread > 1 else min(devices, run.per_node)
    once = seconds("all-reduce", 6 * rows, Span(devices, inside), run.device)
    axis = "pipeline+tensor" if spread > 1 and run.parallel.tensor > 1 else "pipeline" if spread > 1 else "tensor"
    yield Traffic("all-reduce", axis, "sums of the loss", count, count * 6 * rows, count * once, 0.0)


def _data(run: Description, layers: Halves, held: tuple[float, float]) -> Iterator[Traffic]:
    if run.shards == 1:
        return
    stack, rest = held
    reduced, beside = BYTES[run.reduce or run.gradients], run.system.data_hidden
    sharding = run.parallel.data_sharding
    once = rest if sharding == "fsdp" else stack + rest
    before, after = layers.forward.seconds, layers.backward.seconds
    if sharding == "fsdp":
        forward, backward = (1.0, 1.0) if beside else GATHERED_BESIDE
        count, size = run.microbatches * run.repeats, stack * run.width / run.repeats
        for kind, what, share, room in (
            ("all-gather", "a layer's weights, forward", forward, before),
            ("all-gather", "a layer's weights, backward", backward, after / 2),
            ("reduce-scatter", "a layer's gradients", 1.0, after / 2),
        ):
            row = _row(run, (kind, "data", what), count, size)
            yield row.beside(share * min(row.seconds, room * run.microbatches))
    # The last (first) microbatches of an interleaved pipeline leave (enter) chunk after chunk, in groups of its stages.
    group = min(run.microbatches, run.parallel.pipeline) if run.parallel.virtual_stages > 1 else 1
    kinds = [("all-gather", "weights", run.width, before), ("reduce-scatter", "gradients", reduced, after)]
    if sharding == "replicate":
        kinds = [("all-reduce", "gradients", reduced, after)]
    for kind, what, width, room in kinds:
        row = _row(run, (kind, "data", f"{what}, once a step"), 1, once * width)
        yield row.beside(room * group) if beside else row
