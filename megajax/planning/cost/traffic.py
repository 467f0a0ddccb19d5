"""The collectives of a step by mesh axis: how many, how many bytes, how long, and how much of that computing hides.

What is hidden behind what is read from our compiled programs (docs/planning.md, docs/pipeline.md): in the backward pass
two gathers of a layer, or a gather and a scatter; in the ticks of a pipeline with both kinds of work all that travels
between stages; under FSDP most gathers and all scatters of a layer; nothing of what ZeRO-1 does once a step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod

from megajax.planning.cost.block_work import BlockWork, again, kept_whole
from megajax.planning.cost.description import BYTES, Description
from megajax.planning.cost.links import Span, seconds
from megajax.planning.cost.pipeline_bubble import bubble
from megajax.planning.cost.work import Halves

GATHERED_BESIDE = (0.6, 0.75)
"""Shares of a layer's weights that our FSDP gathers beside matmuls, in the forward and in the backward pass."""


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
    """Of the seconds, what runs beside computing."""

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed."""
        return max(0.0, self.seconds - self.hidden)


@dataclass(frozen=True, slots=True)
class Times:
    """Computing of one microbatch on one device, in seconds."""

    blocks: tuple[tuple[BlockWork, Halves], ...]
    """Of the pattern, each with the time of one repeat."""
    repeats: int
    """Of the pattern, on the device."""
    attention: float
    """Of all layers, forward and backward."""

    @property
    def forward(self) -> float:
        return self.repeats * sum(halves.forward.total for _, halves in self.blocks)

    @property
    def backward(self) -> float:
        return self.repeats * sum(halves.backward.total for _, halves in self.blocks)


def span(run: Description, axis: str) -> Span:
    """Of the groups along a mesh axis; `data` takes all devices that hold the same weights."""
    sizes = run.sizes
    if axis == "data":
        return Span.of(run.shards, sizes["tensor"], run.per_node)
    strides = {"tensor": 1, "context": sizes["tensor"]}
    strides["pipeline"] = sizes["tensor"] * sizes["context"] * sizes["expert"] * sizes["data"]
    return Span.of(sizes[axis], strides[axis], run.per_node)


def memory_bytes(run: Description, row: Traffic) -> float:
    """What its kernels read and write in memory: the whole side and a device's part, or the whole twice."""
    axes = row.axis.partition(" ")[0].split("+")  # a program's may be of a part of an axis
    devices = run.shards if axes == ["data"] else prod(run.sizes[axis] for axis in axes)
    return row.bytes * (1 + 1 / devices if row.kind in ("all-gather", "reduce-scatter") else 2)


def traffic(run: Description, times: Times, held: tuple[float, float]) -> list[Traffic]:
    """Every kind of collective of a step. held: weights of the stack and all others on one device, unspread."""
    found = [*_tensor(run, times), *_context(run, times), *_pipeline(run, times), *_loss(run), *_data(run, times, held)]
    return [one for one in found if one.count]


def _row(run: Description, named: tuple[str, str, str], count: float, size: float, hidden: float) -> Traffic:
    """hidden: share."""
    kind, axis, what = named
    total = count * seconds(kind, size, span(run, axis), run.device)
    return Traffic(kind, axis, what, count, count * size, total, hidden * total)


def _tensor(run: Description, times: Times) -> Iterator[Traffic]:
    if run.parallel.tensor == 1:
        return
    size = run.tokens * run.model.hidden * run.width
    layers = run.microbatches * times.repeats * len(times.blocks)
    kept, given = run.recomputing.kept(), run.system.tensor_hidden
    once_more = again(kept, "residual")
    copied = kept_whole(run)[0] / (1 if run.parallel.data_sharding == "replicate" else run.shards)
    yield _row(
        run, ("all-reduce", "tensor", "gradients of copied heads, once a step"), float(copied > 0), 4 * copied, 0.0
    )
    forward = 0.0 if given is None else given
    if run.cut == 1:
        beside = 1.0 if given is None else given
        yield _row(run, ("all-reduce", "tensor", "activations, forward"), 2 * layers, size, forward)
        yield _row(run, ("all-reduce", "tensor", "gradients, backward"), 2 * layers, size, beside)
        yield _row(run, ("all-reduce", "tensor", "activations, again"), once_more * layers, size, forward)
        return
    gathers, scatters = (2 if kept.parts is None else 4), 2 + once_more
    # Counted in compiled programs: of all that is computed again, of norms and activations, of nothing.
    loose = (1, 1) if once_more else (0, 1) if kept.parts is None else (2, 0)
    beside_matmuls = {"all-gather": (gathers, loose[0]), "reduce-scatter": (scatters, loose[1])}
    for kind, (count, free) in beside_matmuls.items():
        yield _row(run, (kind, "tensor", "activations, forward"), 2 * layers, size, forward)
        share = free / count if given is None else given
        yield _row(run, (kind, "tensor", "activations and gradients, backward"), count * layers, size, share)
        yield _row(run, (kind, "tensor", "embeddings and outputs"), 2 * run.microbatches, size, 0.0)


def _context(run: Description, times: Times) -> Iterator[Traffic]:
    """Ring attention: keys and values go around, and their gradients backwards."""
    devices = run.parallel.context
    if devices == 1:
        return
    tensor = run.parallel.tensor
    keys = sum(block.keys / tensor + block.copied(tensor) for block, _ in times.blocks)
    size = run.tokens * keys * run.width
    count = 3 * (devices - 1) * times.repeats * run.microbatches
    row = _row(run, ("collective-permute", "context", "keys and values"), count, size, 0.0)
    beside = min(row.seconds, times.attention * run.microbatches * (devices - 1) / devices)
    yield Traffic(row.kind, row.axis, row.what, row.count, row.bytes, row.seconds, beside)


def _pipeline(run: Description, times: Times) -> Iterator[Traffic]:
    stages, chunks = run.parallel.pipeline, run.parallel.virtual_stages
    if stages == 1:
        return
    size = run.tokens * run.model.hidden * run.width / run.cut
    schedule, where = bubble(run), span(run, "pipeline")
    permute = seconds("collective-permute", size, where, run.device)
    if not run.system.lockstep:
        count = 2 * run.microbatches * chunks
        # All but those that fill and drain the pipeline.
        hidden = permute * (count - 2 * (stages - 1))
        yield Traffic(
            "collective-permute", "pipeline", "between stages", count, count * size, permute * count, max(0, hidden)
        )
        return
    reduction = seconds("all-reduce", size, where, run.device)
    alone = schedule.alone
    both = schedule.ticks - 2 * alone
    # With one chunk all ticks of both kinds have a microbatch that enters and one that leaves, and reductions travel
    # while layers compute. With more, some ticks have: reductions are in branches, where nothing else runs.
    every = chunks == 1
    forward, backward = times.forward / chunks, times.backward / chunks
    beside_forward = min(1.0, forward / (permute + 3 * reduction * every))
    beside_backward = min(1.0, backward / (permute + reduction * every))
    hidden = both * permute * (beside_forward + beside_backward)
    count = 2 * schedule.ticks - 2 * alone
    yield Traffic("collective-permute", "pipeline", "between stages", count, count * size, count * permute, hidden)
    # Forwards alone hide the next embedding; backwards alone hide nothing.
    hidden = reduction * (both * (3 * beside_forward + beside_backward) + alone * min(1.0, forward / reduction))
    count = 4 * run.microbatches
    what = "embeddings, outputs and their gradients, to all stages"
    total = count * reduction
    yield Traffic("all-reduce", "pipeline", what, count, count * size, total, min(total, hidden) * every)


def _loss(run: Description) -> Iterator[Traffic]:
    """Sums over the vocabulary: small, and nothing runs beside them."""
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


def _data(run: Description, times: Times, held: tuple[float, float]) -> Iterator[Traffic]:
    if run.shards == 1:
        return
    stack, rest = held
    reduced, beside = BYTES[run.reduce or run.gradients], run.system.data_hidden
    sharding = run.parallel.data_sharding
    once = rest if sharding == "fsdp" else stack + rest
    if sharding == "fsdp":
        forward, backward = (1.0, 1.0) if beside else GATHERED_BESIDE
        count = run.microbatches * times.repeats
        size = stack * run.width / times.repeats
        for kind, what, share, room in (
            ("all-gather", "a layer's weights, forward", forward, times.forward),
            ("all-gather", "a layer's weights, backward", backward, times.backward / 2),
            ("reduce-scatter", "a layer's gradients", 1.0, times.backward / 2),
        ):
            row = _row(run, (kind, "data", what), count, size, share)
            room *= run.microbatches
            yield Traffic(kind, "data", what, row.count, row.bytes, row.seconds, min(row.hidden, share * room))
    # The last (first) microbatches of an interleaved pipeline leave (enter) chunk after chunk, in groups of its stages.
    group = min(run.microbatches, run.parallel.pipeline) if run.parallel.virtual_stages > 1 else 1
    kinds = [
        ("all-gather", "weights", run.width, times.forward * group),
        ("reduce-scatter", "gradients", reduced, times.backward * group),
    ]
    if sharding == "replicate":
        kinds = [("all-reduce", "gradients", reduced, times.backward * group)]
    for kind, what, width, room in kinds:
        row = _row(run, (kind, "data", f"{what}, once a step"), 1, once * width, 0.0)
        hidden = min(row.seconds, room) if beside else 0.0
        yield Traffic(kind, "data", row.what, row.count, row.bytes, row.seconds, hidden)
