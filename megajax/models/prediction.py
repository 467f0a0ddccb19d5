"""Heads that predict tokens further ahead (DeepSeek-AI 2024, DeepSeek-V3, section 2.2).

B rows, S positions, D hidden.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.layers.config import BlockConfig, NormConfig
from megajax.layers.context import Context
from megajax.layers.param import Normal, Site, maxima, param
from megajax.models.config import PredictionConfig


class Prediction(nnx.Module):
    """One of them: merges the state before it with the embedding of the token it may see, then a block.

    number: of its block, counted on from the stack's, for dropout.
    """

    def __init__(self, cfg: PredictionConfig, site: Site, *, block: BlockConfig, norm: NormConfig, number: int):
        del cfg
        self.layout, self.number = site.layout, number
        self.embedding_norm, self.state_norm = norm.build(site), norm.build(site)
        shape, axes = (site.hidden, site.hidden), ("embed", "mlp")
        self.from_embedding = param(shape, axes, init=Normal(site.std))
        self.from_state = param(shape, axes, init=Normal(site.std))
        self.maxima = maxima(site, "from_embedding", "from_state")
        self.block = block.build(site)
        self.norm = norm.build(site)

    def __call__(self, x: Array, embedded: Array, ctx: Context) -> Array:
        """State before [B, S, D] and embeddings [B, S, D] -> normalised state [B, S, D]."""
        merged = self.part(self.embedding_norm(embedded), "from_embedding")
        merged = merged + self.part(self.state_norm(x), "from_state")
        x = self.block(self.layout.act(merged, "batch", "seq_residual", "embed"), ctx.for_layer(self.number))
        return self.norm(x)

    def part(self, x: Array, name: str) -> Array:
        """[B, S, D] times the weight of that name -> [B, S, D], cut over devices by columns."""
        x, w, seen = self.layout.act(x, "batch", "seq", "embed"), getattr(self, name)[...], self.maxima.get(name)
        return self.layout.dot("bsd,de->bse", x, w, "batch", "seq", "mlp", maxima=seen)


def ahead(x: Array, segments: Array | None) -> Array:
    """[B, S] -> what stands one place further on in the row, and document where they are apart; zero at the end."""
    last = jnp.zeros_like(x[:, :1])
    if segments is None:
        return jnp.concatenate([x[:, 1:], last], axis=1)
    inside = segments[:, 1:] == segments[:, :-1]
    return jnp.concatenate([jnp.where(inside, x[:, 1:], 0), last], axis=1)
