"""The residual tower: a pattern of blocks, scanned, with what the backward pass keeps chosen by name."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.batch import Params
from megajax.layers.config import Recompute, StackConfig
from megajax.layers.context import Context
from megajax.layers.param import Site, bind, dotted, stacked

MATMUL_ENDS = ("query", "key", "value", "attention", "attention_statistics", "gate", "mlp", "residual")
"""Names layers give to the tensors that matmuls produce or need; `selective` keeps these and recomputes the rest."""


def recomputed(layer: Callable, recompute: Recompute) -> Callable:
    """A layer function that keeps for the backward pass only what the policy names."""
    match recompute:
        case "none":
            return layer
        case "selective":
            policy = jax.checkpoint_policies.save_only_these_names(*MATMUL_ENDS)
        case "full":
            policy = jax.checkpoint_policies.nothing_saveable
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


class Stack(nnx.Module):
    """pattern x repeats blocks, [B, S, D] -> [B, S, D]; each weight has a leading `layer` dimension of size repeats."""

    def __init__(self, cfg: StackConfig, site: Site, *, recompute: Recompute):
        self.pattern, self.repeats, self.layout, self.recompute = len(cfg.pattern), cfg.repeats, site.layout, recompute
        self.blocks = nnx.List(
            [
                stacked(block.build(site), tuple(range(place, cfg.layers(), self.pattern)))
                for place, block in enumerate(cfg.pattern)
            ]
        )

    def __call__(self, x: Array, ctx: Context) -> Array:
        body = self.layer()

        def step(x: Array, row: tuple[Params, Array]) -> tuple[Array, None]:
            weights, number = row
            return body(weights, number, x, ctx), None

        return jax.lax.scan(step, x, (self.in_order(), jnp.arange(self.repeats)))[0]

    def layer(self) -> Callable[[Params, Array, Array, Context], Array]:
        """(weights, number, x, ctx) -> x: one repeat of the pattern, under the recompute policy.

        weights: by their paths in `self.blocks`, one row of each; number: int32 [], which repeat of the model it is.
        """
        graph, state = nnx.split(self.blocks)
        axes = {dotted(path): leaf.axes[1:] for path, leaf in nnx.to_flat_state(state)}
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)

        def repeat(weights: Params, number: Array, x: Array, ctx: Context) -> Array:
            used = {path: self.layout.gather(w, axes[path]) for path, w in weights.items()}
            for place, block in enumerate(bind(nnx.merge(graph, abstract), used)):
                x = block(x, ctx.for_layer(number * self.pattern + place))
            return x

        return recomputed(repeat, self.recompute)

    def in_order(self) -> Params:
        """The stacked weights by their paths in `self.blocks`, rows in the order of the layers."""
        return {dotted(path): _in_order(leaf) for path, leaf in nnx.to_flat_state(nnx.state(self.blocks))}


def _in_order(leaf: nnx.Param) -> Array:
    rows = [row for row, layer in enumerate(leaf.layers) if layer >= 0]
    rows.sort(key=lambda row: leaf.layers[row])
    return leaf[...] if rows == list(range(len(leaf.layers))) else leaf[...][jnp.asarray(rows)]
