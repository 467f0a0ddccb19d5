"""A stack of residual blocks: scanned patterns, with saved activations chosen by name."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.batch import Params
from megajax.layers.cache_facts import below
from megajax.layers.configs import StackConfig, shared_bias
from megajax.layers.context import Context
from megajax.layers.decoding import Cache
from megajax.layers.lora.module import drop_inputs
from megajax.layers.param import LayerSettings, bind, path_of, stacked
from megajax.layers.stack.recompute import checkpointed
from megajax.layers.stack.remat import Recomputing, SavePolicy
from megajax.layers.stack.runs import common_runs
from megajax.layers.stack.segments import SegmentsConfig
from megajax.mesh.layout import Layout

BLOCKS = "blocks."
"""Path prefix of the weights with a leading `layer` dimension; the other weights are shared by all layers."""

type Unit = Callable[[Params, Params, Array, Array, Context], Array]
"""(weights, shared weights of the stack, numbers, x, ctx) -> x: repeats that are differentiated together.

weights: one row of each for one repeat, [n, ...] for n, by the place of the block in the pattern and the path in it:
"0.mixer.query"; numbers: int32 [] or [n], the first layer of each repeat. A single row is indexed outside: indexed
inside, it would be saved as an intermediate result rather than as an argument.
"""


type BlockStep = Callable[[Any, Array, Cache, Context], tuple[Array, Cache]]
"""(block, x, the cache of the block, ctx) -> x and that cache."""

type Fp8Layers = tuple[tuple[bool, ...], ...]
"""For each repeat of a unit and each block of the pattern: whether it multiplies in 8 bits."""

type PerChunk = int | np.ndarray
"""Equal in all chunks of a pipeline, or int32 [chunks] in the order of the model."""


class Segment(NamedTuple):
    """Layers whose blocks repeat a pattern."""

    blocks: tuple[int, ...]
    """The pattern: numbers of stacked blocks."""
    repeats: int
    layer: int
    """Number of the first layer."""


class Place(NamedTuple):
    """Rows of the stacked weights for a block of a pattern: unit n has the rows from start + n * stride."""

    block: int
    """Number of the stacked block."""
    start: PerChunk
    """Counted from the first row of the chunk."""
    stride: int
    rows: int
    """Rows of a chunk."""


class Span(NamedTuple):
    """Consecutive repeats with one save policy."""

    units: int
    """How often `unit` is applied: the maximum over chunks."""
    repeats: int
    """Repeats per unit."""
    unit: Unit
    unroll: int
    """Units per iteration of the compiled loop."""
    segment: Segment
    places: tuple[Place, ...]
    """For each block of the pattern."""
    layer: PerChunk | None
    """Number of the first layer; None: given by the row of the first weight."""
    counts: PerChunk
    """How often each chunk applies `unit`."""
    ring: int
    """Spans in different chunks with equal rings share the buffer of saved tensors."""
    kept_at: PerChunk = 0
    """Index of the first unit in that buffer."""


RECOMPUTING = Recomputing()
"""The default save policy of layers."""


class Stack(nnx.Module):
    """Consecutive blocks, [B, S, D] -> [B, S, D], in segments: a pattern and its repeats.

    Each weight of a block has a leading `layer` dimension with one row per repeat.
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
        self.recomputing, self.unroll, self.segmented = recomputing, unroll, isinstance(cfg, SegmentsConfig)
        self.numbers = tuple(layers for _, layers in cfg.stored())
        self.blocks = _blocks(cfg, settings)
        shared = [bias for block in cfg.pattern if (bias := shared_bias(block)) is not None]
        self.relative = shared[0][1].build(settings, heads=shared[0][0]) if shared else None

    def __call__(self, x: Array, ctx: Context) -> Array:
        weights = self.in_order()
        for span in self.spans(self.repeats, 0):
            assert span.layer is not None and span.counts == span.units, "one chunk"
            size, shape = len(span.places), (span.units, span.repeats) if span.repeats > 1 else (span.units,)
            rows = {}
            for number, place in enumerate(span.places):
                # The places of a unit with several repeats have all rows; those of one repeat may share rows.
                unit_rows = slice(place.start, place.start + span.units * place.stride, place.stride // span.repeats)
                for path, w in weights.items():
                    block, _, rest = path.partition(".")
                    if int(block) == place.block:
                        rows[f"{number}.{rest}"] = w[unit_rows].reshape(*shape, *w.shape[1:])
            layers = jnp.asarray(
                span.layer + size * np.arange(span.units * span.repeats, dtype=np.int32).reshape(shape)
            )

            def step(x: Array, row: tuple[Params, Array], unit: Unit = span.unit) -> tuple[Array, None]:
                return unit(row[0], self.common(), row[1], x, ctx), None

            x = jax.lax.scan(step, x, (rows, layers), unroll=span.unroll)[0]
        return x

    def step(self, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """The tokens of a decoding step, [T, 1, D] -> [T, 1, D]; cache: leaves by block, "0.mixer.key".

        The scans carry the cache: as their input and output it would be copied.
        """
        for segment in self.segments:
            x, cache = self.segment_step(segment, lambda block, *inputs: block.step(*inputs), x, dict(cache), ctx)
        return x, cache

    def remember(self, cache: Cache, ctx: Context) -> Cache:
        """The cache with the state that layers derive from `ctx.memory` for the rows of the step."""

        def keep(block: Any, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
            return x, block.remember(cache, ctx)

        for segment in self.segments:
            cache = self.segment_step(segment, keep, jnp.zeros(()), dict(cache), ctx)[1]
        return cache

    def segment_step(
        self, segment: Segment, apply: BlockStep, x: Array, cache: Cache, ctx: Context
    ) -> tuple[Array, Cache]:
        """`apply` to the layers of one segment."""
        weights, ctx = self.in_order(), ctx._replace(bias=self.common().get("relative.table"))
        places = self.places(segment, 0, 1, segment.repeats)
        parts = [nnx.split(self.blocks[place.block]) for place in places]

        def repeat(number: Array, carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
            x, cache = carry
            for place, (graph, state) in zip(places, parts, strict=True):
                row, used = place.start + number * place.stride, {}
                for names, leaf in nnx.to_flat_state(state):
                    path = path_of(names, leaf)
                    w = jax.lax.dynamic_index_in_dim(weights[f"{place.block}.{path}"], row, keepdims=False)
                    used[path] = self.layout.gather(w, leaf.axes[1:])
                block, layer_cache = bind(nnx.merge(graph, state), used), below(cache, str(place.block))
                x, layer_cache = apply(block, x, layer_cache, ctx._replace(rows=replace(ctx.rows, layer=row)))
                cache = {**cache, **{f"{place.block}.{name}": leaf for name, leaf in layer_cache.items()}}
            return x, cache

        # On GPUs, cuBLAS reads a row of a stack in place if the loop counter indexes it.
        return jax.lax.fori_loop(0, segment.repeats, repeat, (x, cache))

    def spans(self, repeats: int, first: int | None = None) -> list[Span]:
        """The spans of all layers, or of a pipeline chunk with this many repeats.

        first: number of the first repeat if it is the same on all devices: layers with another recipe than their
        neighbours then form their own spans; None: each layer checks its number at run time.
        Raises ValueError if layers_per_checkpoint does not divide the repeats.
        """
        if not self.segmented:
            return self.spans_of(self.segments[0], repeats, first)
        spans: list[Span] = []
        for segment in self.segments:
            spans += self.spans_of(segment, segment.repeats, 0, len(spans))
        return spans

    def chunk_spans(self, chunks: Sequence[range], rows: int) -> list[Span]:
        """The spans of the chunks of a pipeline: one program for all chunks.

        chunks: layer numbers of each chunk, in the order of the model; rows: maximum number of repeats in a chunk.
        """
        if not self.segmented:
            return self.spans(rows)
        block_of = {layer: block for block, layers in enumerate(self.numbers) for layer in layers}
        runs = common_runs([[block_of[layer] for layer in chunk] for chunk in chunks])
        rows_used = np.array([[0] * len(self.numbers)] * len(chunks))
        total = [max(sum(layer in chunk for layer in layers) for chunk in chunks) for layers in self.numbers]
        layer, offsets, rings, spans = np.array([chunk.start for chunk in chunks]), {}, {}, []
        for pattern, repeats in runs:
            counts, places = np.array(repeats), []
            for number, block in enumerate(pattern):
                start = rows_used[:, block] + pattern[:number].count(block)
                places.append(Place(block, _collapse(start), pattern.count(block), total[block]))
            ring, before = rings.setdefault(pattern, len(rings)), offsets.get(pattern, 0)
            segment = Segment(pattern, int(counts.max()), 0)
            unit = self.unit(segment, self.recomputing.policy(), 1)
            varying = _collapse(layer), _collapse(counts), ring, _collapse(before + 0 * counts)
            spans.append(Span(segment.repeats, 1, unit, 1, segment, tuple(places), *varying))
            for block in pattern:
                rows_used[:, block] += counts
            layer, offsets[pattern] = layer + counts * len(pattern), before + counts
        return [span._replace(units=int(np.max(offsets[span.segment.blocks]))) for span in spans]

    def spans_of(self, segment: Segment, repeats: int, first: int | None, rings: int = 0) -> list[Span]:
        """The spans of `repeats` repeats of a segment. rings: number of rings of earlier spans."""
        pattern, config = len(segment.blocks), self.recomputing
        recomputing = repeats if config.layers is None else min(config.layers // pattern, repeats)
        spans, start_repeat = [], 0
        for count, policy in ((recomputing, config.policy()), (repeats - recomputing, config.lighter_policy())):
            group = max(1, policy.layers_per_checkpoint // pattern)
            if count % group:
                raise ValueError(f"{count} repeats are no multiple of the {group} of a checkpoint")
            starts = range(start_repeat, start_repeat + count, group)
            for fp8_layers, alike in groupby(starts, lambda start: self.fp8_layers(segment, start, group, first)):  # noqa: B023
                begin, *more = alike
                units = 1 + len(more)
                unroll = units if self.unroll is None else min(units, -(-self.unroll // (group * pattern)))
                unit = self.unit(segment, policy, group, fp8_layers)
                layer = None if first is None else segment.layer + (first + begin) * pattern
                places = self.places(segment, begin, group, repeats)
                spans.append(Span(units, group, unit, unroll, segment, places, layer, units, rings + len(spans)))
            start_repeat += count
        return spans

    def places(self, segment: Segment, begin: int, group: int, repeats: int) -> tuple[Place, ...]:
        """Rows of the weights of repeats from `begin`, with `group` repeats per unit."""
        places = []
        for number, block in enumerate(segment.blocks):
            per_repeat = segment.blocks.count(block)
            before = sum(layer < segment.layer for layer in self.numbers[block])
            start = before + segment.blocks[:number].count(block) + begin * per_repeat
            places.append(Place(block, start, group * per_repeat, repeats))
        return tuple(places)

    def fp8_layers(self, segment: Segment, start: int, repeats: int, first: int | None) -> Fp8Layers | None:
        """The 8-bit layers of the repeats from `start`; None if they are unknown or all layers are alike."""
        if first is None or self.layout.fp8_layers is None:
            return None
        pattern = len(segment.blocks)
        layers = [segment.layer + (first + start + row) * pattern for row in range(repeats)]
        return tuple(tuple(self.layout.in_fp8(layer + place) for place in range(pattern)) for layer in layers)

    def unit(self, segment: Segment, policy: SavePolicy, repeats: int, fp8_layers: Fp8Layers | None = None) -> Unit:
        """`repeats` repeats of a segment's pattern as one function under the save policy."""
        name_input = "input" in policy.offloaded
        if repeats == 1:
            return checkpointed(self.repeat(segment, name_input, None if fp8_layers is None else fp8_layers[0]), policy)
        # Each repeat is recomputed, and saves the inputs of matmuls while it is differentiated.
        inner = [
            checkpointed(self.repeat(segment, name_input, layers), Recomputing().policy())
            for layers in ([None] * repeats if fp8_layers is None else fp8_layers)
        ]

        def unit(weights: Params, common: Params, numbers: Array, x: Array, ctx: Context) -> Array:
            for row, repeat in enumerate(inner):
                x = repeat({path: w[row] for path, w in weights.items()}, common, numbers[row], x, ctx)
            return x

        return checkpointed(unit, policy)

    def repeat(self, segment: Segment, name_input: bool, fp8_layers: tuple[bool, ...] | None) -> Unit:
        """One repeat of a segment's pattern, without a policy. name_input: save x by name, not as an argument."""
        parts = [nnx.split(self.blocks[block]) for block in segment.blocks]
        axes, abstract = [], []
        for _, state in parts:
            axes.append({path_of(names, leaf): leaf.axes[1:] for names, leaf in nnx.to_flat_state(state)})
            abstract.append(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state))

        def repeat(weights: Params, common: Params, number: Array, x: Array, ctx: Context) -> Array:
            x = checkpoint_name(x, "input") if name_input else x
            ctx = ctx._replace(bias=common.get("relative.table"))
            gathered = [
                {
                    path: self.layout.gather(weights[f"{place}.{path}"], leaf_axes)
                    for path, leaf_axes in block_axes.items()
                }
                for place, block_axes in enumerate(axes)
            ]
            for place, (graph, _) in enumerate(parts):
                block, layer = bind(nnx.merge(graph, abstract[place]), gathered[place]), number + place
                of_layer = ctx.for_layer(layer)
                drop_inputs(block, of_layer)
                apply = self.select_recipe(block, layer, None if fp8_layers is None else fp8_layers[place])
                x = apply(x, of_layer)
            return x

        return repeat

    def select_recipe(self, block: nnx.Module, layer: Array, in_fp8: bool | None) -> Callable:
        """The block with or without the recipe; if in_fp8 is None, by the number of the layer at run time."""
        if in_fp8 or self.layout.fp8_layers is None:
            return block
        plain = _without_recipe(block)
        return self.layout.fp8_or_plain(layer, block, plain) if in_fp8 is None else plain

    def in_order(self) -> Params:
        """The stacked weights by path in `self.blocks`, with rows in the order of the layers."""
        return {path_of(parts, leaf): _in_order(leaf) for parts, leaf in nnx.to_flat_state(nnx.state(self.blocks))}

    def common(self) -> Params:
        """The weights that all layers share, by path in the stack."""
        return {} if self.relative is None else {"relative.table": self.relative.table[...]}


def _without_recipe[M: nnx.Module](block: M) -> M:
    """A copy of the layers whose layout multiplies by einsum."""
    plain = nnx.merge(*nnx.split(block))
    for _, node in nnx.iter_graph(plain):
        if isinstance(getattr(node, "layout", None), Layout):
            node.layout = node.layout.plain()
    return plain


def _segments(cfg: StackConfig | SegmentsConfig) -> tuple[Segment, ...]:
    block_of = {layer: block for block, (_, layers) in enumerate(cfg.stored()) for layer in layers}
    segments, layer = [], 0
    for part in cfg.parts():
        pattern = tuple(block_of[layer + place] for place in range(len(part.pattern)))
        segments.append(Segment(pattern, part.repeats, layer))
        layer += part.layers()
    return tuple(segments)


def _blocks(cfg: StackConfig | SegmentsConfig, settings: LayerSettings) -> nnx.List:
    """The blocks, with weights stacked over their layers."""
    return nnx.List([stacked(block.build(settings), layers) for block, layers in cfg.stored()])


def _collapse(values: np.ndarray) -> PerChunk:
    """An int if all values are equal, otherwise the array."""
    return int(values[0]) if (values == values[0]).all() else values.astype(np.int32)


def _in_order(leaf: nnx.Param) -> Array:
    rows = [row for row, layer in enumerate(leaf.layers) if layer >= 0]
    rows.sort(key=lambda row: leaf.layers[row])
    return leaf[...] if rows == list(range(len(leaf.layers))) else leaf[...][jnp.asarray(rows)]
