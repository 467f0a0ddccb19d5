"""The Triton kernels of a paged cache: interpreted against the reference, and compiled for virtual GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.kernels.paged import Pools, reference
from megajax.kernels.paged_triton import paged_attention

BLOCK, TABLE = 16, 36
"""A table of 576 positions: three splits."""


def step(width: int, heads: int, groups: int, size: int, *, latent: int | None = None, stored: str = "float32"):
    """Queries of five rows and their cache. Row 0 is full, row 1 begins, row 2 is half a step, row 4 is no row."""
    draw = np.random.default_rng(width + heads + size)
    rows, blocks = 5, 5 * TABLE + 3

    def pool(*rest: int) -> jax.Array:
        return jnp.asarray(draw.standard_normal((blocks, BLOCK, groups, *rest)), "float32")

    q = jnp.asarray(draw.standard_normal((rows, width, heads, size)), "float32")
    keys, values = pool(size), None if latent else pool(size)
    scales = (None, None)
    if stored != "float32":
        keys, values = ((10 * x).astype(stored) for x in (keys, values))
        scales = jnp.abs(pool()) / 10, jnp.abs(pool()) / 10
    table = draw.permutation(blocks)[: rows * TABLE].reshape(rows, TABLE)
    first = np.array([TABLE * BLOCK - width, 0, 300, 255, 0])
    positions = first[:, None] + np.arange(width)
    positions[2, (width + 1) // 2 :] = positions[4] = -1
    pools = Pools(keys, values, latent or size, *scales)
    return q, pools, jnp.asarray(table, jnp.int32), jnp.asarray(positions, jnp.int32)


CASES = {
    "one query a row": {"width": 1, "heads": 4, "groups": 2, "size": 16},
    "prompts": {"width": 40, "heads": 2, "groups": 1, "size": 16},
    "a window and sinks": {"width": 1, "heads": 6, "groups": 2, "size": 48, "window": 300, "sinks": True},
    "prompts with a window and sinks": {"width": 20, "heads": 4, "groups": 2, "size": 32, "window": 100, "sinks": True},
    "values inside keys": {"width": 1, "heads": 20, "groups": 1, "size": 80, "latent": 64},
    "prompts with values inside keys": {"width": 17, "heads": 2, "groups": 1, "size": 48, "latent": 32},
    "int8": {"width": 2, "heads": 4, "groups": 2, "size": 16, "stored": "int8"},
    "float8": {"width": 2, "heads": 4, "groups": 2, "size": 16, "stored": "float8_e4m3fn"},
}
FAST = ["a window and sinks"]


@pytest.mark.parametrize(
    "case", [*FAST, *(pytest.param(one, marks=pytest.mark.slow) for one in CASES if one not in FAST)]
)
def test_the_interpreted_kernels_equal_the_reference(case: str) -> None:
    rest = dict(CASES[case])
    window, sinks = rest.pop("window", None), rest.pop("sinks", False)
    q, pools, table, positions = step(**rest)
    sink = jnp.linspace(-1, 2, q.shape[2]) if sinks else None
    arguments = {"scale": 0.3, "window": window, "sink": sink}
    expected = reference(q, pools, table, positions, **arguments)
    actual = paged_attention(q, pools, table, positions, interpret=True, **arguments)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert not np.asarray(actual[4]).any()
