"""The residual tower: a pattern of blocks, scanned, with what the backward pass keeps chosen by name."""

from collections.abc import Callable
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
from megajax.layers.param import Site, bind, path_of, stacked
from megajax.layers.remat import Kept, Recomputing

BLOCKS = "blocks."
"""Where a stack's weights with a leading `layer` dimension are; the others are the same for all layers."""

type Unit = Callable[[Params, Params, Array, Array, Context], Array]
"""(weights, the stack's other weights, numbers, x, ctx) -> x: repeats that are differentiated as one.

weights: by their paths in `blocks`, of one repeat a row of each, of n [n, ...]; numbers: int32 [] or [n], which they
are. One row is taken outside: taken within, it would be kept as something computed rather than as an argument.
"""


type Recipes = tuple[tuple[bool, ...], ...]
"""For each repeat of a unit, for each block of the pattern: whether it multiplies by the layout's recipe."""


class Span(NamedTuple):
    """Repeats that follow each other and keep the same for the backward pass."""

    units: int
    """How often `unit` is applied."""
    together: int
    """Repeats it takes."""
    unit: Unit
    unroll: int
    """Units written out one after another in the compiled program, in each turn of a loop over them."""


def recomputed(layer: Callable, kept: Kept) -> Callable:
    """A layer function that keeps for the backward pass only what is said."""
    policies = jax.checkpoint_policies
    if kept.parts is None:
        return layer
    if kept.moved:
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(kept.saved),
            names_which_can_be_offloaded=list(kept.moved),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        policy = policies.save_only_these_names(*kept.saved)
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


class Stack(nnx.Module):
    """pattern x repeats blocks, [B, S, D] -> [B, S, D]; each weight has a leading `layer` dimension of size repeats."""

    def __init__(self, cfg: StackConfig, site: Site, *, recomputing: Recomputing, unroll: int | None = 1):
        self.pattern, self.repeats, self.layout = len(cfg.pattern), cfg.repeats, site.layout
        self.recomputing, self.unroll = recomputing, unroll
        self.blocks = _blocks(cfg, site)
        # Structure alone: the weights are those of `blocks`.
        self.plain = (
            nnx.graphdef(_blocks(cfg, replace(site, layout=site.layout.plain()))) if site.layout.layers else None
        )
        shared = [(block.mixer.heads, bias) for block in cfg.pattern if (bias := shared_bias(block)) is not None]
        self.relative = shared[0][1].build(site, heads=shared[0][0]) if shared else None

    def __call__(self, x: Array, ctx: Context) -> Array:
        weights, first = self.in_order(), 0
        for units, together, unit, unroll in self.spans(self.repeats, 0):
            last = first + units * together
            cut = (units, together) if together > 1 else (units,)
            rows = {path: w[first:last].reshape(*cut, *w.shape[1:]) for path, w in weights.items()}
            numbers = jnp.arange(first, last).reshape(cut)

            def step(x: Array, row: tuple[Params, Array], unit: Unit = unit) -> tuple[Array, None]:
                return unit(row[0], self.common(), row[1], x, ctx), None

            x, first = jax.lax.scan(step, x, (rows, numbers), unroll=unroll)[0], last
        return x

    def spans(self, repeats: int, first: int | None = None) -> list[Span]:
        """How that many repeats in a row are differentiated: all there are, or a chunk of a stage.

        first: the number of the first, where it is the same on all devices: layers of another recipe than their
        neighbours are then spans of their own; else each layer looks at its number as it runs.
        Raises ValueError where recompute_together does not divide them.
        """
        chosen = self.recomputing
        again = repeats if chosen.layers is None else min(chosen.layers // self.pattern, repeats)
        found, done = [], 0
        for count, kept in ((again, chosen.kept()), (repeats - again, chosen.others())):
            together = max(1, kept.together // self.pattern)
            if count % together:
                raise ValueError(f"{count} repeats cannot be computed again {together} together")
            starts = range(done, done + count, together)
            for recipes, alike in groupby(self.recipes(start, together, first) for start in starts):
                units = len(list(alike))
                unroll = units if self.unroll is None else min(units, -(-self.unroll // (together * self.pattern)))
                found.append(Span(units, together, self.unit(kept, together, recipes), unroll))
            done += count
        return found

    def recipes(self, start: int, together: int, first: int | None) -> Recipes | None:
        """Of the repeats from `start` on, where they are known and not all the same."""
        if first is None or self.plain is None:
            return None
        layers = [(first + start + row) * self.pattern for row in range(together)]
        return tuple(tuple(self.layout.by_recipe(layer + place) for place in range(self.pattern)) for layer in layers)

    def unit(self, kept: Kept, together: int, recipes: Recipes | None = None) -> Unit:
        """`together` repeats of the pattern as one function, which keeps what is said."""
        named = "input" in kept.offloaded
        if together == 1:
            return recomputed(self.repeat(named, None if recipes is None else recipes[0]), kept)
        # Each is computed again and then, while it is differentiated, keeps what matmuls need.
        inner = [
            recomputed(self.repeat(named, each), Recomputing().kept())
            for each in ([None] * together if recipes is None else recipes)
        ]

        def unit(weights: Params, common: Params, numbers: Array, x: Array, ctx: Context) -> Array:
            for row, repeat in enumerate(inner):
                x = repeat({path: w[row] for path, w in weights.items()}, common, numbers[row], x, ctx)
            return x

        return recomputed(unit, kept)

    def repeat(self, named: bool, recipes: tuple[bool, ...] | None) -> Unit:
        """One repeat of the pattern, under no policy. named: x has a name, rather than being kept as an argument."""
        graph, state = nnx.split(self.blocks)
        axes = {path_of(parts, leaf): leaf.axes[1:] for parts, leaf in nnx.to_flat_state(state)}
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)

        def repeat(weights: Params, common: Params, number: Array, x: Array, ctx: Context) -> Array:
            used = {path: self.layout.gather(w, axes[path]) for path, w in weights.items()}
            x = checkpoint_name(x, "input") if named else x
            ctx = ctx._replace(bias=common.get("relative.table"))
            plain = None if self.plain is None else bind(nnx.merge(self.plain, abstract), used)
            for place, block in enumerate(bind(nnx.merge(graph, abstract), used)):
                layer = number * self.pattern + place
                if plain is not None:
                    block = self.chosen(block, plain[place], layer, None if recipes is None else recipes[place])
                x = block(x, ctx.for_layer(layer))
            return x

        return repeat

    def chosen(self, block: Callable, plain: Callable, layer: Array, by_recipe: bool | None) -> Callable:
        """The block with the recipe or without, by the layer's number where nobody knows better."""
        if by_recipe is None:
            return self.layout.either(layer, block, plain)
        return block if by_recipe else plain

    def in_order(self) -> Params:
        """The stacked weights by their paths in `self.blocks`, rows in the order of the layers."""
        return {path_of(parts, leaf): _in_order(leaf) for parts, leaf in nnx.to_flat_state(nnx.state(self.blocks))}

    def common(self) -> Params:
        """The weights that all layers share, by their paths in the stack."""
        return {} if self.relative is None else {"relative.table": self.relative.table[...]}


def _blocks(cfg: StackConfig, site: Site) -> nnx.List:
    pattern = len(cfg.pattern)
    return nnx.List(
        [
            stacked(block.build(site), tuple(range(place, cfg.layers(), pattern)))
            for place, block in enumerate(cfg.pattern)
        ]
    )


def _in_order(leaf: nnx.Param) -> Array:
    rows = [row for row, layer in enumerate(leaf.layers) if layer >= 0]
    rows.sort(key=lambda row: leaf.layers[row])
    return leaf[...] if rows == list(range(len(leaf.layers))) else leaf[...][jnp.asarray(rows)]
