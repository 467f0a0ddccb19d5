"""min_p, top_k and top_p: which tokens may be drawn.

Each keeps the tokens with a logit of at least a threshold per row. The thresholds of top_k and top_p are found by
bisection over the 32 bits of a float: 32 passes over the row that count or sum, instead of a sort. This is exact for
any k and p, devices exchange one number per row and pass, and a sharded vocabulary is never gathered. Of equal logits,
either all are kept or none.

The order is that of vLLM (vllm/v1/sample/sampler.py, `Sampler`): temperature, min_p, top_k, top_p. `transformers`
applies min_p last; the two differ only where min_p and top_p are combined.
"""

import jax
import jax.numpy as jnp
from jax import Array

from megajax.inference.sampling.rows import Drawing
from megajax.inference.sampling.vocabulary import order_of, threshold
from megajax.kernels.cross_entropy import VocabularyShard


def keep_mask(x: Array, drawing: Drawing, shard: VocabularyShard) -> Array:
    """Which tokens may be drawn, bool [R, V].

    x: float32 [R, V], logits divided by the temperature, less the largest of the row; -inf for forbidden tokens.

    - min_p (Nguyen et al. 2024): tokens at least min_p times as likely as the most likely one.
    - top_k: the k most likely of these; with more tokens equal to the k-th, those as well (as `transformers` does).
    - top_p (Holtzman et al. 2019): the smallest set of the most likely of these whose probabilities, renormalized over
      these, sum to at least p.

    A filter that no row needs is skipped.
    """
    sampled = drawing.temperature > 0
    keep = (x >= jnp.log(drawing.min_p)[:, None]) & (x > -jnp.inf)
    top_k_rows = sampled & (drawing.top_k > 0) & (drawing.top_k < shard.size)
    keep = jax.lax.cond(top_k_rows.any(), lambda: _top_k(x, keep, top_k_rows, drawing.top_k, shard), lambda: keep)
    nucleus = sampled & (drawing.top_p < 1)
    return jax.lax.cond(nucleus.any(), lambda: _top_p(x, keep, nucleus, drawing.top_p, shard), lambda: keep)


def _top_k(x: Array, keep: Array, rows: Array, k: Array, shard: VocabularyShard) -> Array:
    order = order_of(x)
    lowest = threshold(order, lambda part: shard.sum((part & keep).sum(-1, dtype=jnp.int32)) >= k)
    return keep & (order >= jnp.where(rows, lowest, 0)[:, None])


def _top_p(x: Array, keep: Array, rows: Array, p: Array, shard: VocabularyShard) -> Array:
    order, weights = order_of(x), jnp.where(keep, jnp.exp(x), 0)
    enough = p * shard.sum(weights.sum(-1))
    lowest = threshold(order, lambda part: shard.sum(jnp.where(part, weights, 0).sum(-1)) >= enough)
    return keep & (order >= jnp.where(rows, lowest, 0)[:, None])
