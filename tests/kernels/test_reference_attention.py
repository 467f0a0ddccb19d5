"""Attention against a loop in float64, and its dropout against the masks that every layout must share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.kernels.attention.attention import Mask, reference_attention
from megajax.kernels.attention.dropout import AttentionDropout

ROWS, LENGTH, SIZE = 2, 9, 6
SCALE = SIZE**-0.5


class Inputs(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    segments: np.ndarray


def inputs(heads: int, groups: int) -> Inputs:
    rng = np.random.default_rng(heads)
    q, k, v = (rng.normal(size=(ROWS, LENGTH, n, SIZE)).astype(np.float32) for n in (heads, groups, groups))
    return Inputs(q, k, v, np.sort(rng.integers(0, 3, (ROWS, LENGTH)), axis=1).astype(np.int32))


def looped(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    segments: np.ndarray | None,
    *,
    window: int = LENGTH,
    sink: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """One query of one head after another, in float64."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    share = q.shape[2] // k.shape[2]
    for b, s, n in np.ndindex(*q.shape[:3]):
        visible = [t for t in range(s + 1) if segments is None or segments[b, t] == segments[b, s]]
        visible = [t for t in visible if s - t <= window]
        scores = k[b, visible, n // share].astype(np.float64) @ q[b, s, n] * SCALE
        scores = scores if bias is None else scores + bias[n, s, visible]
        weights = np.exp(scores)
        rest = 0 if sink is None else np.exp(sink[n])
        out[b, s, n] = weights / (weights.sum() + rest) @ v[b, visible, n // share]
    return out


def whole_row(segments: np.ndarray | None = None) -> Mask:
    index = jnp.arange(LENGTH)
    return Mask(index, index, segments, segments)


SINK = np.array([-2.0, 0.0, 1.0, 3.0], np.float32)
BIAS = np.random.default_rng(1).normal(size=(4, LENGTH, LENGTH)).astype(np.float32)


@pytest.mark.parametrize(
    ("heads", "groups", "isolated", "options"),
    [
        (4, 4, False, {}),
        (4, 2, True, {}),
        (3, 1, True, {"window": 0}),
        (4, 2, True, {"window": 3}),
        (4, 2, False, {"window": 3, "sink": SINK}),
        (4, 2, False, {"bias": BIAS, "wide": 4}),
    ],
)
def test_matches_a_float64_loop(heads: int, groups: int, isolated: bool, options: dict) -> None:
    """A window counts the keys before the query; a sink adds to the denominator only."""
    arrays, options = inputs(heads, groups), dict(options)
    qkv = *arrays[:2], arrays.v[..., : options.pop("wide", SIZE)]
    segments = arrays.segments if isolated else None
    expected = looped(*qkv, segments, **options)
    mask = whole_row(segments)._replace(window=options.pop("window", None))
    with jax.default_matmul_precision("highest"):
        actual = reference_attention(*qkv, mask, scale=SCALE, **options)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_rounds_only_inputs_and_outputs():
    arrays = inputs(4, 2)
    low = [jnp.asarray(x, jnp.bfloat16) for x in arrays[:3]]
    actual = reference_attention(*low, whole_row(), scale=SCALE)
    exact = looped(*[np.asarray(x, np.float32) for x in low], None)
    assert actual.dtype == jnp.bfloat16
    # Weights and output are rounded to 8 bits each; rounding scores would be several times less accurate.
    np.testing.assert_allclose(np.asarray(actual, np.float32), exact, atol=2**-7)


def dropout(rate: float, rows: np.ndarray, heads: np.ndarray, queries: np.ndarray) -> AttentionDropout:
    keys = jax.vmap(lambda n: jax.random.key_data(jax.random.fold_in(jax.random.key(3), n)))(jnp.asarray(rows))
    return AttentionDropout(rate, keys, jnp.asarray(heads), jnp.asarray(queries))


@pytest.mark.slow
def test_dropout_is_the_same_for_a_part_of_the_heads():
    """A device with some rows, heads and queries draws the same numbers for them as one device would."""
    weights = jnp.ones((3, 4, 8, 16))
    first_draw = dropout(0.5, np.arange(3), np.arange(4), np.arange(8)).apply(weights)
    second_draw = dropout(0.5, np.arange(3), np.arange(4), np.arange(8)).apply(weights)
    part = dropout(0.5, np.arange(1, 3), np.arange(2, 4), np.arange(4, 8)).apply(weights[1:, 2:, 4:])
    np.testing.assert_array_equal(first_draw, second_draw)
    np.testing.assert_array_equal(first_draw[1:, 2:, 4:], part)
    # No two rows, heads or queries share a mask.
    assert len(np.unique(np.asarray(first_draw).reshape(-1, 16), axis=0)) > 90


def test_dropout_zeroes_its_share_and_keeps_the_mean():
    weights = jnp.full((8, 4, 32, 32), 0.25)
    dropped = np.asarray(dropout(0.1, np.arange(8), np.arange(4), np.arange(32)).apply(weights))
    # 32,768 draws: three standard deviations of the share are 0.005.
    assert abs((dropped == 0).mean() - 0.1) < 0.005
    np.testing.assert_allclose(dropped[dropped > 0], 0.25 / 0.9, rtol=1e-6)
