"""The residual tower: a pattern of blocks, scanned, with what the backward pass keeps chosen by name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.layers.config import Recompute, StackConfig
from megajax.layers.context import Context
from megajax.layers.param import Site, stacked

MATMUL_ENDS = ("query", "key", "value", "attention", "mlp", "residual")
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
        graph, weights = nnx.split(self.blocks)
        axes = [leaf.axes[1:] for _, leaf in nnx.to_flat_state(weights)]
        leaves, tree = jax.tree.flatten(weights)

        def repeat(x: Array, slices: tuple[list[Array], Array], ctx: Context) -> Array:
            held, number = slices
            used = [self.layout.gather(w, names) for w, names in zip(held, axes, strict=True)]
            for place, block in enumerate(nnx.merge(graph, jax.tree.unflatten(tree, used))):
                x = block(x, ctx.for_layer(number * self.pattern + place))
            return x

        body = recomputed(repeat, self.recompute)

        def step(x: Array, slices: Any) -> tuple[Array, None]:
            return body(x, slices, ctx), None

        return jax.lax.scan(step, x, (leaves, jnp.arange(self.repeats)))[0]
