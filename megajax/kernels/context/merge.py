"""Joining attention over different keys by their log-sum-exps (Liu et al. 2023, "Ring Attention")."""

from functools import reduce

import jax.numpy as jnp
from jax import Array


def merged(*parts: tuple[Array, Array]) -> tuple[Array, Array]:
    """Outputs [B, S, N, U] over different keys, with log-sum-exps float32 [B, N, S] -> over all keys, in float32.

    A query that sees none of the keys of a part has the log-sum-exp -inf there.
    """
    lse = parts[0][1]
    for _, each in parts[1:]:
        lse = jnp.logaddexp(lse, each)
    base = jnp.where(jnp.isneginf(lse), 0, lse)
    shares = (jnp.exp(each - base).transpose(0, 2, 1)[..., None] for _, each in parts)
    outs = [out.astype(jnp.float32) * share for (out, _), share in zip(parts, shares, strict=True)]
    return reduce(jnp.add, outs), lse
