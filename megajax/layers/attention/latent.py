"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

B rows, S positions, D hidden, N heads, R rank of a latent; a head has C content and P position elements in queries and
keys, and U in values. Latents are replicated over `tensor`, which shards the heads computed from them.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.attention.cached import attend_to_cache
from megajax.layers.attention.core import CoreAttention
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.context import Context
from megajax.layers.decoding import Cache
from megajax.layers.param import ZEROS, LayerSettings, Normal, matrix, param
from megajax.layers.position.config import YarnScalingConfig


class LatentAttention(nnx.Module):
    """Causal self-attention, [B, S, D] -> [B, S, D]."""

    def __init__(self, cfg: LatentAttentionConfig, settings: LayerSettings):
        hidden, heads, size = settings.hidden, cfg.heads, cfg.content_dim + cfg.position_dim
        self.cfg, self.layout = cfg, settings.layout
        per_head = ("heads", "head_dim")
        if cfg.query_rank is None:
            self.query = matrix(settings, (hidden, heads, size), ("embed", *per_head))
        else:
            self.query_down = matrix(settings, (hidden, cfg.query_rank), ("embed", None))
            self.query = matrix(settings, (cfg.query_rank, heads, size), (None, *per_head))
        self.down = matrix(settings, (hidden, cfg.key_value_rank), ("embed", None))
        self.position_key = matrix(settings, (hidden, cfg.position_dim), ("embed", None))
        self.key = matrix(settings, (cfg.key_value_rank, heads, cfg.content_dim), (None, *per_head))
        self.value = matrix(settings, (cfg.key_value_rank, heads, cfg.value_dim), (None, *per_head))
        self.output = matrix(
            settings, (heads, cfg.value_dim, hidden), (*per_head, "embed"), init=Normal(settings.output_std), inputs=2
        )
        if cfg.bias:
            self.output_bias = param((hidden,), ("embed",), init=ZEROS, role="bias")
        if cfg.latent_bias:
            self.down_bias = param((cfg.key_value_rank,), (None,), init=ZEROS, role="bias")
            self.position_key_bias = param((cfg.position_dim,), (None,), init=ZEROS, role="bias")
        if cfg.latent_bias and cfg.query_rank is not None:
            self.query_down_bias = param((cfg.query_rank,), (None,), init=ZEROS, role="bias")
        if cfg.norm is not None:
            self.norm = cfg.norm.build(settings, size=cfg.key_value_rank, axis=None)
        if cfg.norm is not None and cfg.query_rank is not None:
            self.query_norm = cfg.norm.build(settings, size=cfg.query_rank, axis=None)
        self.rope = None if cfg.rope is None else cfg.rope.build(cfg.position_dim, settings.length)
        self.core = CoreAttention(cfg, settings, scale=score_scale(cfg, settings))

    def __call__(self, x: Array, ctx: Context) -> Array:
        q, k, v = self.project(x, ctx)
        q, k, v = checkpoint_name(q, "query"), checkpoint_name(k, "key"), checkpoint_name(v, "value")
        return self.project_output(self.core(q, k, v, ctx))

    def step(self, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """A decoding step, [T, 1, D] -> [T, 1, D]. The cache leaf "key" holds the latent and the position part of keys.

        The latent acts as a single key-value head: the key matrix is absorbed into the queries, and the value matrix is
        applied after attention (DeepSeek-AI 2024, section 2.1.2).
        """
        heads, content = ("batch", "seq", "heads", "head_dim"), self.cfg.content_dim
        q = self.queries(x, ctx)
        q_latent = self.layout.dot("bsnc,rnc->bsnr", q[..., :content], self.key, *heads)
        q = jnp.concatenate([q_latent, q[..., content:]], axis=-1)
        new = {"key": jnp.concatenate([self.latent(x)[:, :, None], self.position_part(x, ctx)], axis=-1)}
        mixed, cache = attend_to_cache(self.core, q, new, cache, ctx, None, self.cfg.key_value_rank)
        return self.project_output(self.layout.dot("bsnr,rnu->bsnu", mixed, self.value, *heads)), cache

    def project_output(self, mixed: Array) -> Array:
        """Values of all heads [B, S, N, U] -> the layer's output [B, S, D]."""
        y = self.layout.dot("bsnu,nud->bsd", mixed, self.output, "batch", "seq_residual", "embed")
        return self.layout.add_bias(y, self.output_bias[...]) if self.cfg.bias else y

    def project(self, x: Array, ctx: Context) -> tuple[Array, Array, Array]:
        """[B, S, D] -> queries and keys [B, S, N, C + P], rotated, and values [B, S, N, U]."""
        dot, heads, latent = self.layout.dot, ("batch", "seq", "heads", "head_dim"), self.latent(x)
        k = dot("bsr,rnc->bsnc", latent, self.key, *heads)
        v = dot("bsr,rnu->bsnu", latent, self.value, *heads)
        place = self.position_part(x, ctx)
        place = jnp.broadcast_to(place, (*k.shape[:3], place.shape[-1]))
        return self.queries(x, ctx), jnp.concatenate([k, place], axis=-1), v

    def queries(self, x: Array, ctx: Context) -> Array:
        """[B, S, D] -> [B, S, N, C + P], rotated."""
        content = self.cfg.content_dim
        q = self.layout.dot("bsr,rnh->bsnh", self.query_latent(x), self.query, "batch", "seq", "heads", "head_dim")
        return jnp.concatenate([q[..., :content], self.rotated(q[..., content:], ctx)], axis=-1)

    def position_part(self, x: Array, ctx: Context) -> Array:
        """[B, S, D] -> the position part of the keys [B, S, 1, P], rotated and shared by all heads."""
        place = self.layout.dot("bsd,dp->bsp", x, self.position_key, "batch", "seq", None)
        place = (place + self.position_key_bias[...][None, None] if self.cfg.latent_bias else place)[:, :, None]
        return self.rotated(place, ctx)

    def rotated(self, x: Array, ctx: Context) -> Array:
        """Position parts [B, S, N, P], rotated if the layer has rotary positions."""
        return x if self.rope is None else self.rope(x, ctx.positions)

    def latent(self, x: Array) -> Array:
        """[B, S, D] -> the latent of keys and values [B, S, R]."""
        latent = self.layout.dot("bsd,dr->bsr", x, self.down, "batch", "seq", None)
        latent = latent + self.down_bias[...][None, None] if self.cfg.latent_bias else latent
        return checkpoint_name(latent if self.cfg.norm is None else self.norm(latent), "latent")

    def query_latent(self, x: Array) -> Array:
        """[B, S, D] -> the latent of queries [B, S, R], or x itself without `query_rank`."""
        if self.cfg.query_rank is None:
            return x
        latent = self.layout.dot("bsd,dr->bsr", x, self.query_down, "batch", "seq", None)
        latent = latent + self.query_down_bias[...][None, None] if self.cfg.latent_bias else latent
        return checkpoint_name(latent if self.cfg.norm is None else self.query_norm(latent), "latent")


def score_scale(cfg: LatentAttentionConfig, settings: LayerSettings) -> float:
    """Factor on scores. YaRN's mscale_all scales both queries and keys, including their content parts."""
    if cfg.scale is not None:
        return cfg.scale
    yarn = cfg.rope and cfg.rope.scaling
    longer = yarn.mscale_factor(yarn.mscale_all or 0.0) if isinstance(yarn, YarnScalingConfig) else 1.0
    return longer**2 * settings.score_scale(cfg.content_dim + cfg.position_dim)
