"""cuDNN's fused causal attention with its residuals named, so that recomputation can keep them.

jax's own rule saves the log-sum-exp of every query's scores without a name: a policy that saves by name then drops it,
and the backward pass runs the forward kernel a second time for it alone.

B rows, S positions, N query heads, K key-value heads (N a multiple of K), H head size.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

OUTPUT, STATISTICS = "attention", "attention_statistics"
"""Names of what the backward kernel needs beside queries, keys and values: the forward's output and its log-sum-exp."""


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def fused_attention(
    q: Array, k: Array, v: Array, visible: Array | None, scale: float, window: int | None = None
) -> Array:
    """softmax(q k^T * scale) v over the keys at or before each query, never holding the scores (Dao 2023).

    q [B, S, N, H], k and v [B, S, K, H] in bfloat16 or float16; visible bool [B or 1, 1, S, S] takes further keys away,
    and so does a window: of the keys before a query it leaves the last ones, skipping blocks without any.
    -> [B, S, N, H] in q's dtype. Raises RuntimeError or NotImplementedError where cuDNN is absent or can't.
    """
    return _fused(q, k, v, visible, scale, window)


def _fused(q: Array, k: Array, v: Array, visible: Array | None, scale: float, window: int | None) -> Array:
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=visible,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window, 0),
        implementation="cudnn",
    )


def _forward(
    q: Array, k: Array, v: Array, visible: Array | None, scale: float, window: int | None
) -> tuple[Array, Any]:
    """The residual is jax's own pullback: a pytree, so what it holds can be named without touching jax's internals."""
    out, pullback = jax.vjp(lambda q, k, v: _fused(q, k, v, visible, scale, window), q, k, v)
    leaves, tree = jax.tree.flatten(pullback)
    statistics = find_statistics(leaves, out)
    # Result and residual must be one named array: whichever lacked the name would have to be computed again.
    named = checkpoint_name(out, OUTPUT)
    leaves = [named if leaf is out else leaf for leaf in leaves]
    leaves[statistics] = checkpoint_name(leaves[statistics], STATISTICS)
    return named, jax.tree.unflatten(tree, leaves)


def _backward(scale: float, window: int | None, pullback: Any, cotangent: Array) -> tuple[Array, Array, Array, None]:
    del scale, window
    return *pullback(cotangent), None


fused_attention.defvjp(_forward, _backward)


def find_statistics(leaves: list[Any], out: Array) -> int:
    """Place of the log-sum-exp, float32 [B, N, S], among the residuals of `out` [B, S, N, H].

    Raises RuntimeError unless the residuals hold it once and `out` itself, as those of jax 0.11.2 and 0.12.0.1 do.
    """
    batch, queries, heads, _ = out.shape
    wanted = jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)
    places = [place for place, leaf in enumerate(leaves) if (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)]
    if len(places) != 1 or not any(leaf is out for leaf in leaves):
        held = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
        raise RuntimeError(
            f"jax {jax.__version__} saves other residuals of cuDNN attention than 0.11.2 and 0.12.0.1 do: expected its "
            f"output and one {wanted.dtype}{list(wanted.shape)}, got {held}. Set kernel=reference or use one of those."
        )
    return places[0]
