"""The repeats of a pattern of blocks as one function of their weights, under a save policy."""

from collections.abc import Callable, Sequence

import jax
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.batch import Params
from megajax.layers.context import Context
from megajax.layers.lora.add_adapters import drop_inputs
from megajax.layers.param import bind, path_of
from megajax.layers.recompute import Recomputing, SavePolicy
from megajax.layers.remat import checkpointed
from megajax.layers.stack.spans import Unit
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
            x = repeat({path: w[row] for path, w in weights.items()}, common, numbers[row], x, ctx)
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
