"""A stack of residual blocks.

Blocks are not modules in a list of layers. The weights of all layers with equal blocks are one array with a leading
`layer` dimension, one row a layer, and each loop over layers compiles a block once. A stack is a sequence of segments;
a segment is a pattern of blocks and how often it repeats: (dense, moe) x 16, or [attention] x 1, [mamba, mlp] x 4 of
a hybrid. `megajax.layers.stack.spans` says which rows a layer has.

There are three loops over layers, because they do different things with the rows:

- `Stack.__call__` scans over rows as inputs, so that `jax.grad` stacks their gradients. A loop that indexes the rows
  would add a gradient of the size of all layers in each iteration, and save a copy of each row.
- `Stack.step` and `remember` carry caches, which a loop updates in place, and index the rows, which a GPU's matmul
  reads in place. A scan would copy the rows of patterns with equal blocks, in every decoding step.
- `megajax.pipeline.layer_forward_backward` trains: it runs `jax.vjp` layer by layer, and adds gradients in place.

All call the same blocks. Training differentiates units, functions of the weights of the repeats that are recomputed
together under a save policy. A span is a run of units that differ in nothing but their rows.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.batch import Params
from megajax.layers.block.config import shared_bias
from megajax.layers.cache_spec import below
from megajax.layers.context import Context
from megajax.layers.decoding import Cache, in_layer, rows_of
from megajax.layers.lora.add_adapters import choose_adapters, drop_inputs
from megajax.layers.param import LayerSettings, bind, give_operands, path_of, stacked
from megajax.layers.recompute import Recomputing, SavePolicy
from megajax.layers.remat import checkpointed
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.layers.stack.spans import Segment, Span, Unit
from megajax.mesh.layout import Layout

type RecipeLayers = tuple[tuple[bool, ...], ...]
"""For each repeat of a unit and each block of the pattern: whether it multiplies in 8 bits."""


def unit_of(
    blocks: Sequence[nnx.Module],
    layout: Layout,
    policy: SavePolicy,
    repeats: int = 1,
    recipe_layers: RecipeLayers | None = None,
) -> Unit:
    """`repeats` repeats of these blocks. recipe_layers: None if all layers are alike or differ between devices."""
    recipes = (None,) * repeats if recipe_layers is None else recipe_layers
    if repeats == 1:
        return checkpointed(_repeat(blocks, layout, policy, recipes[0]), policy)
    # Each repeat is recomputed, and saves the inputs of matmuls while it is differentiated.
    inner = [checkpointed(_repeat(blocks, layout, policy, recipe), Recomputing().policy()) for recipe in recipes]

    def unit(weights: Params, common: Params, numbers: Array, x: Array, ctx: Context) -> Array:
        for row, repeat in enumerate(inner):
            x = repeat(jax.tree.map(lambda w, row=row: w[row], dict(weights)), common, numbers[row], x, ctx)
        return x

    return checkpointed(unit, policy)


def _repeat(
    blocks: Sequence[nnx.Module], layout: Layout, policy: SavePolicy, recipe_layers: tuple[bool, ...] | None
) -> Unit:
    """One repeat, without the policy; it names its input if that is offloaded, since arguments can't be."""
    name_input, parts = "input" in policy.offloaded, [nnx.split(block) for block in blocks]
    axes, abstract = [], []
    for _, state in parts:
        axes.append({path_of(names, leaf): leaf.axes[1:] for names, leaf in nnx.to_flat_state(state)})
        abstract.append(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state))

    def repeat(weights: Params, common: Params, number: Array, x: Array, ctx: Context) -> Array:
        x = checkpoint_name(x, "input") if name_input else x
        ctx = ctx._replace(bias=common.get("relative.table"))
        gathered = [
            {path: layout.gather(weights[f"{place}.{path}"], leaf_axes) for path, leaf_axes in block_axes.items()}
            for place, block_axes in enumerate(axes)
        ]
        for place, (graph, _) in enumerate(parts):
            block, layer = bind(nnx.merge(graph, abstract[place]), gathered[place]), number + place
            give_operands(block, weights, f"{place}.")
            of_layer = ctx.for_layer(layer)
            drop_inputs(block, of_layer)
            x = _with_recipe(block, layout, layer, None if recipe_layers is None else recipe_layers[place])(x, of_layer)
        return x

    return repeat


def _with_recipe(block: nnx.Module, layout: Layout, layer: Array, in_recipe: bool | None) -> Callable[..., Array]:
    """The block with or without the 8-bit recipe; None: by the number of the layer at run time."""
    if in_recipe or layout.recipe_layers is None:
        return block
    plain = nnx.merge(*nnx.split(block))
    for _, node in nnx.iter_graph(plain):
        if isinstance(getattr(node, "layout", None), Layout):
            node.layout = node.layout.plain()
    return layout.recipe_or_plain(layer, block, plain) if in_recipe is None else plain


BLOCKS = "blocks."
"""Path prefix of the weights with a leading `layer` dimension; the other weights are shared by all layers."""

type BlockStep = Callable[[Any, Array, Cache, Context], tuple[Array, Cache]]
"""(block, x, the cache of the block, ctx) -> x and that cache."""

RECOMPUTING = Recomputing()
"""The default save policy of layers."""


class Stack(nnx.Module):
    """Consecutive blocks, [B, S, D] -> [B, S, D], in segments: a pattern and its repeats.

    Attributes:
        blocks: the blocks of the patterns, each with a row per layer on every weight.
        numbers: for each block, the numbers of its layers, in the order of the model.
        segmented: whether a pipeline may cut between any layers, otherwise between repeats.
    """

    def __init__(
        self,
        cfg: StackConfig | SegmentsConfig,
        settings: LayerSettings,
        *,
        recomputing: Recomputing = RECOMPUTING,
        unroll: int | None = 1,
    ):
        """unroll: layers per iteration of a compiled loop; None: all layers."""
        self.numbers = tuple(layers for _, layers in cfg.stored())
        self.segments, self.segmented = _segments(cfg, self.numbers), isinstance(cfg, SegmentsConfig)
        self.layout, self.recomputing, self.unroll = settings.layout, recomputing, unroll
        self.blocks = nnx.List([stacked(block.build(settings), layers) for block, layers in cfg.stored()])
        shared = [bias for block in cfg.pattern if (bias := shared_bias(block)) is not None]
        self.relative = shared[0][1].build(settings, heads=shared[0][0]) if shared else None

    def __call__(self, x: Array, ctx: Context) -> Array:
        weights = self.in_order()
        for span in self.spans():
            assert span.layer is not None
            size, shape = len(span.places), (span.units, span.repeats)[: 1 + (span.repeats > 1)]
            rows = {}
            for inside, (path, number) in span.used(weights).items():
                # The places of a unit with several repeats have all rows; those of one repeat may share rows.
                place, w = span.places[number], weights[path]
                unit_rows = slice(place.start, place.start + span.units * place.stride, place.stride // span.repeats)
                rows[inside] = w[unit_rows].reshape(*shape, *w.shape[1:])
            layers = jnp.asarray(
                span.layer + size * np.arange(span.units * span.repeats, dtype=np.int32).reshape(shape)
            )

            def step(x: Array, row: tuple[Params, Array], unit: Unit = span.unit) -> tuple[Array, None]:
                return unit(row[0], self.common(), row[1], x, ctx), None

            x = jax.lax.scan(step, x, (rows, layers), unroll=span.unroll)[0]
        return x

    def step(self, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """The tokens of a decoding step, [T, 1, D] -> [T, 1, D]; cache: leaves by block, "0.mixer.key"."""
        return self._with_cache(lambda block, *inputs: block.step(*inputs), x, cache, ctx)

    def remember(self, cache: Cache, ctx: Context) -> Cache:
        """The cache with the state that layers derive from `ctx.memory` for the rows of the step."""

        def keep(block: Any, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
            return x, block.remember(cache, ctx)

        return self._with_cache(keep, jnp.zeros(()), cache, ctx)[1]

    def _with_cache(self, apply: BlockStep, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """`apply` to all layers. The loops carry the cache: as their input and output it would be copied."""
        weights, ctx, cache = self.in_order(), ctx._replace(bias=self.common().get("relative.table")), dict(cache)
        for segment in self.segments:
            parts = [(place, *nnx.split(self.blocks[place.block])) for place in segment.places()]

            def repeat(
                number: Array | int, carry: tuple[Array, Cache], parts: list = parts, first: int = segment.layer
            ) -> tuple[Array, Cache]:
                x, cache = carry
                for at, (place, graph, state) in enumerate(parts):
                    row, used = place.start + number * place.stride, {}
                    for names, leaf in nnx.to_flat_state(state):
                        path = path_of(names, leaf)
                        w = jax.lax.dynamic_index_in_dim(weights[f"{place.block}.{path}"], row, keepdims=False)
                        used[path] = self.layout.gather(w, leaf.axes[1:])
                    block, layer_cache = bind(nnx.merge(graph, state), used), below(cache, str(place.block))
                    choose_adapters(block, rows_of(ctx).columns)
                    of_layer = in_layer(ctx, row).for_layer(first + number * len(parts) + at)
                    x, layer_cache = apply(block, x, layer_cache, of_layer)
                    cache = {**cache, **{f"{place.block}.{name}": leaf for name, leaf in layer_cache.items()}}
                return x, cache

            # On GPUs, cuBLAS reads a row of a stack in place if the counter of a compiled loop indexes it.
            x, cache = rows_of(ctx).loop(segment.repeats, repeat, (x, cache))
        return x, cache

    def spans(self) -> list[Span]:
        """The spans of all layers. Raises ValueError if layers_per_checkpoint does not divide the repeats."""
        spans = (span for segment in self.segments for span in self.segment_spans(segment))
        return [span._replace(ring=ring) for ring, span in enumerate(spans)]

    def segment_spans(self, segment: Segment, *, numbered: bool = True) -> Iterator[Span]:
        """The spans of a segment, divided where the save policy changes.

        numbered: layers have the same numbers on all devices, so those with another recipe than their neighbours form
        their own spans; otherwise each layer checks its number at run time.
        """
        pattern, config, begin = len(segment.blocks), self.recomputing, 0
        recomputing = segment.repeats if config.layers is None else min(config.layers // pattern, segment.repeats)
        policies = (recomputing, config.policy()), (segment.repeats - recomputing, config.lighter_policy())
        for count, policy in policies:
            group = max(1, policy.layers_per_checkpoint // pattern)
            if count % group:
                raise ValueError(f"{count} repeats are no multiple of the {group} of a checkpoint")
            recipes = [
                self._recipe_layers(segment, start, group) if numbered else None
                for start in range(begin, begin + count, group)
            ]
            for recipe_layers, alike in groupby(recipes):
                units = len(list(alike))
                unroll = units if self.unroll is None else min(units, -(-self.unroll // (group * pattern)))
                unit = self.unit(segment.blocks, policy, group, recipe_layers)
                layer = segment.layer + begin * pattern if numbered else None
                yield Span(units, group, unit, unroll, segment.places(begin, group), layer, units)
                begin += units * group

    def unit(
        self, blocks: tuple[int, ...], policy: SavePolicy, repeats: int = 1, recipe_layers: RecipeLayers | None = None
    ) -> Unit:
        """`repeats` repeats of a pattern as one function under the save policy."""
        return unit_of([self.blocks[block] for block in blocks], self.layout, policy, repeats, recipe_layers)

    def in_order(self) -> Params:
        """The stacked weights by path in `blocks`, with rows in the order of the layers."""
        return {path_of(parts, leaf): _in_order(leaf) for parts, leaf in nnx.to_flat_state(nnx.state(self.blocks))}

    def common(self) -> Params:
        """The weights that all layers share, by path in the stack."""
        return {} if self.relative is None else {"relative.table": self.relative.table[...]}

    def _recipe_layers(self, segment: Segment, start: int, repeats: int) -> RecipeLayers | None:
        """The 8-bit layers of the repeats from `start`; None if all layers of the model are alike."""
        if self.layout.recipe_layers is None:
            return None
        pattern = len(segment.blocks)
        layers = [segment.layer + repeat * pattern for repeat in range(start, start + repeats)]
        return tuple(tuple(self.layout.in_recipe(layer + place) for place in range(pattern)) for layer in layers)


def _segments(cfg: StackConfig | SegmentsConfig, numbers: tuple[tuple[int, ...], ...]) -> tuple[Segment, ...]:
    row_of = {layer: (block, row) for block, layers in enumerate(numbers) for row, layer in enumerate(layers)}
    segments, layer = [], 0
    for part in cfg.parts():
        blocks, starts = zip(*[row_of[layer + place] for place in range(len(part.pattern))], strict=True)
        segments.append(Segment(blocks, part.repeats, layer, starts))
        layer += part.layers()
    return tuple(segments)


def _in_order(leaf: nnx.Param) -> Array:
    rows = sorted((row for row, layer in enumerate(leaf.layers) if layer >= 0), key=lambda row: leaf.layers[row])
    return leaf[...] if rows == list(range(len(leaf.layers))) else leaf[...][jnp.asarray(rows)]
