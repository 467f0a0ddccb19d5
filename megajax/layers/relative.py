"""Learned biases of attention scores by distance (T5, Raffel et al. 2020, section 2.1)."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from megajax.layers.config import RelativeBiasConfig
from megajax.layers.param import LayerSettings, Normal, param


class RelativeBias(nnx.Module):
    """A table [buckets, N] that is cut over devices with the heads."""

    def __init__(self, cfg: RelativeBiasConfig, settings: LayerSettings, *, heads: int):
        self.table = param((cfg.buckets, heads), (None, "heads"), init=Normal(settings.std))


def biases(cfg: RelativeBiasConfig, table: Array, query_index: Array, key_index: Array) -> Array:
    """table [buckets, heads here], places in the row int32 [S] and [T] -> [heads here, S, T]."""
    values = table[bucket(cfg, key_index[None, :] - query_index[:, None])]
    return jnp.moveaxis(values, -1, 0)


def bucket(cfg: RelativeBiasConfig, after: Array) -> Array:
    """Bucket of each distance; `after` is the key's place minus the query's, int32.

    Half the buckets of a direction are of one distance each, the others grow by a constant factor up to cfg.distance.
    """
    each = cfg.buckets // 2 if cfg.both_ways else cfg.buckets
    away = jnp.abs(after) if cfg.both_ways else jnp.maximum(-after, 0)
    single = each // 2
    steps = jnp.log(jnp.maximum(away, 1).astype(jnp.float32) / single) / np.log(cfg.distance / single)
    grown = jnp.minimum(single + (steps * (each - single)).astype(jnp.int32), each - 1)
    one_way = jnp.where(away < single, away, grown)
    return jnp.where(after > 0, one_way + each, one_way) if cfg.both_ways else one_way
