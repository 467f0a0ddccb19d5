"""A stack of residual blocks: patterns that are scanned, with what the backward pass saves chosen by name."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.batch import Params
from megajax.layers.config import StackConfig, shared_bias
from megajax.layers.context import Context
from megajax.layers.param import LayerSettings, bind, path_of, stacked
from megajax.layers.remat import Recomputing, SavePolicy
from megajax.layers.segments import SegmentsConfig

BLOCKS = "blocks."
"""Where a stack's weights with a leading `layer` dimension are; the others are the same for all layers."""

type Unit = Callable[[Params, Params, Array, Array, Context], Array]
"""(weights, the stack's other weights, numbers, x, ctx) -> x: repeats that are differentiated as one.

weights: by their paths in `blocks`, of one repeat a row of each, of n [n, ...]; numbers: int32 [] or [n], which they
are. One row is taken outside: taken within, it would be kept as something computed rather than as an argument.
"""


type Fp8Layers = tuple[tuple[bool, ...], ...]
"""For each repeat of a unit, for each block of the pattern: whether it multiplies in 8 bits."""


class Segment(NamedTuple):
    """Layers whose blocks are a pattern, repeated."""

    number: int
    """Its place in the stack."""
    blocks: range
    """Where the pattern is among the blocks of the stack."""
    repeats: int
    layer: int
    """Number of the first layer."""

    def names(self) -> tuple[str, ...]:
        return tuple(map(str, self.blocks))


class Span(NamedTuple):
    """Consecutive repeats that save the same for the backward pass."""

    units: int
    """How often `unit` is applied."""
    repeats: int
    """Repeats it takes."""
    unit: Unit
    unroll: int
    """Units written out one after another in the compiled program, in each turn of a loop over them."""
    start: int
    """Row of the first repeat in the stacked weights; in a pipeline counted from the first row of the chunk."""
    segment: Segment

    def weights[T](self, by_path: Mapping[str, T]) -> dict[str, T]:
        """Of the stacked weights, by their paths in `blocks`, those of its blocks."""
        names = self.segment.names()
        return {path: w for path, w in by_path.items() if path.partition(".")[0] in names}


def recomputed(layer: Callable, policy: SavePolicy) -> Callable:
    """A layer function that saves for the backward pass only what the policy says."""
    policies = jax.checkpoint_policies
    if policy.parts is None:
        return layer
    if policy.moved:
        saveable = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(policy.saved),
            names_which_can_be_offloaded=list(policy.moved),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        saveable = policies.save_only_these_names(*policy.saved)
    return jax.checkpoint(layer, policy=saveable, prevent_cse=False)


RECOMPUTING = Recomputing()
"""What layers save unless the model says otherwise."""


class Stack(nnx.Module):
    """Blocks one after another, [B, S, D] -> [B, S, D], in segments of a pattern and its repeats.

    Each weight of a block has a leading `layer` dimension with a row for each repeat.
    """

    def __init__(
        self,
        cfg: StackConfig | SegmentsConfig,
        settings: LayerSettings,
        *,
        recomputing: Recomputing = RECOMPUTING,
        unroll: int | None = 1,
    ):
        self.segments, self.repeats, self.layout = _segments(cfg), cfg.repeats, settings.layout
        self.recomputing, self.unroll = recomputing, unroll
        self.blocks = _blocks(cfg, settings)
        # Structure alone: the weights are those of `blocks`.
        plain = _blocks(cfg, replace(settings, layout=settings.layout.plain())) if settings.layout.fp8_layers else None
        self.plain = None if plain is None else tuple(nnx.graphdef(_part(plain, each)) for each in self.segments)
        shared = [bias for block in cfg.pattern if (bias := shared_bias(block)) is not None]
        self.relative = shared[0][1].build(settings, heads=shared[0][0]) if shared else None

    def __call__(self, x: Array, ctx: Context) -> Array:
        weights = self.in_order()
        for span in self.spans(self.repeats, 0):
            first, last = span.start, span.start + span.units * span.repeats
            shape = (span.units, span.repeats) if span.repeats > 1 else (span.units,)
            rows = {path: w[first:last].reshape(*shape, *w.shape[1:]) for path, w in span.weights(weights).items()}

            def step(x: Array, row: tuple[Params, Array], unit: Unit = span.unit) -> tuple[Array, None]:
                return unit(row[0], self.common(), row[1], x, ctx), None

            x = jax.lax.scan(step, x, (rows, jnp.arange(first, last).reshape(shape)), unroll=span.unroll)[0]
        return x

    def spans(self, repeats: int, first: int | None = None) -> list[Span]:
        """How layers are differentiated: all there are, or in a pipeline a chunk of that many repeats.

        first: the number of the first repeat, where it is the same on all devices: layers whose recipe differs from
        their neighbours' are then spans of their own; else each layer looks at its number as it runs.
        Raises ValueError where layers_per_checkpoint does not divide the repeats.
        """
        if len(self.segments) == 1:
            return self.spans_of(self.segments[0], repeats, first)
        return [span for each in self.segments for span in self.spans_of(each, each.repeats, first)]

    def spans_of(self, segment: Segment, repeats: int, first: int | None) -> list[Span]:
        """Those of that many repeats of a segment."""
        pattern, chosen = len(segment.blocks), self.recomputing
        recomputing = repeats if chosen.layers is None else min(chosen.layers // pattern, repeats)
        spans, done = [], 0
        for count, policy in ((recomputing, chosen.policy()), (repeats - recomputing, chosen.lighter_policy())):
            group = max(1, policy.layers_per_checkpoint // pattern)
            if count % group:
                raise ValueError(f"{count} repeats are no multiple of the {group} of a checkpoint")
            starts = range(done, done + count, group)
            for fp8_layers, alike in groupby(starts, lambda start: self.fp8_layers(segment, start, group, first)):  # noqa: B023
                begin, *more = alike
                units = 1 + len(more)
                unroll = units if self.unroll is None else min(units, -(-self.unroll // (group * pattern)))
                unit = self.unit(segment, policy, group, fp8_layers)
                spans.append(Span(units, group, unit, unroll, begin, segment))
            done += count
        return spans

    def fp8_layers(self, segment: Segment, start: int, repeats: int, first: int | None) -> Fp8Layers | None:
        """Of the repeats from `start` on, where they are known and not all the same."""
        if first is None or self.plain is None:
            return None
        pattern = len(segment.blocks)
        layers = [segment.layer + (first + start + row) * pattern for row in range(repeats)]
        return tuple(tuple(self.layout.in_fp8(layer + place) for place in range(pattern)) for layer in layers)

    def unit(self, segment: Segment, policy: SavePolicy, repeats: int, fp8_layers: Fp8Layers | None = None) -> Unit:
        """That many repeats of a segment's pattern as one function, which saves what the policy says."""
        named = "input" in policy.offloaded
        if repeats == 1:
            return recomputed(self.repeat(segment, named, None if fp8_layers is None else fp8_layers[0]), policy)
        # Each is computed again and then, while it is differentiated, saves what matmuls need.
        inner = [
            recomputed(self.repeat(segment, named, each), Recomputing().policy())
            for each in ([None] * repeats if fp8_layers is None else fp8_layers)
        ]

        def unit(weights: Params, common: Params, numbers: Array, x: Array, ctx: Context) -> Array:
            for row, repeat in enumerate(inner):
                x = repeat({path: w[row] for path, w in weights.items()}, common, numbers[row], x, ctx)
            return x

        return recomputed(unit, policy)

    def repeat(self, segment: Segment, named: bool, fp8_layers: tuple[bool, ...] | None) -> Unit:
        """One repeat of a segment's pattern, under no policy. named: x is saved by its name, not as an argument."""
        graph, state = nnx.split(_part(self.blocks, segment))
        axes = {path_of(parts, leaf): leaf.axes[1:] for parts, leaf in nnx.to_flat_state(state)}
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)

        def repeat(weights: Params, common: Params, repeat: Array, x: Array, ctx: Context) -> Array:
            used = {path: self.layout.gather(w, axes[path]) for path, w in weights.items()}
            x = checkpoint_name(x, "input") if named else x
            ctx = ctx._replace(bias=common.get("relative.table"))
            blocks = bind(nnx.merge(graph, abstract), used)
            plain = None if self.plain is None else bind(nnx.merge(self.plain[segment.number], abstract), used)
            for place, name in enumerate(segment.names()):
                block, layer = blocks[name], segment.layer + repeat * len(segment.blocks) + place
                if plain is not None:
                    block = self.chosen(block, plain[name], layer, None if fp8_layers is None else fp8_layers[place])
                x = block(x, ctx.for_layer(layer))
            return x

        return repeat

    def chosen(self, block: Callable, plain: Callable, layer: Array, in_fp8: bool | None) -> Callable:
        """The block with the recipe or without; where it is not known while tracing, by the layer's number."""
        if in_fp8 is None:
            return self.layout.either(layer, block, plain)
        return block if in_fp8 else plain

    def in_order(self) -> Params:
        """The stacked weights by their paths in `self.blocks`, rows in the order of the layers."""
        return {path_of(parts, leaf): _in_order(leaf) for parts, leaf in nnx.to_flat_state(nnx.state(self.blocks))}

    def common(self) -> Params:
        """The weights that all layers share, by their paths in the stack."""
        return {} if self.relative is None else {"relative.table": self.relative.table[...]}


def _segments(cfg: StackConfig | SegmentsConfig) -> tuple[Segment, ...]:
    segments, block, layer = [], 0, 0
    for number, part in enumerate(cfg.parts()):
        segments.append(Segment(number, range(block, block + len(part.pattern)), part.repeats, layer))
        block, layer = block + len(part.pattern), layer + part.layers()
    return tuple(segments)


def _blocks(cfg: StackConfig | SegmentsConfig, settings: LayerSettings) -> nnx.List:
    """The blocks of all patterns, one after another, with their weights stacked over the repeats."""
    blocks = []
    for part, segment in zip(cfg.parts(), _segments(cfg), strict=True):
        for place, block in enumerate(part.pattern):
            first, end = segment.layer + place, segment.layer + part.layers()
            blocks.append(stacked(block.build(settings), tuple(range(first, end, len(part.pattern)))))
    return nnx.List(blocks)


def _part(blocks: nnx.List, segment: Segment) -> nnx.Dict:
    """A segment's blocks, by the paths they have among all."""
    return nnx.Dict({name: blocks[number] for name, number in zip(segment.names(), segment.blocks, strict=True)})


def _in_order(leaf: nnx.Param) -> Array:
    rows = [row for row, layer in enumerate(leaf.layers) if layer >= 0]
    rows.sort(key=lambda row: leaf.layers[row])
    return leaf[...] if rows == list(range(len(leaf.layers))) else leaf[...][jnp.asarray(rows)]
