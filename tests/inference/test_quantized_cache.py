"""A cache in 8 bits: stored values, bytes, and logits compared with those of a float cache."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from compiled_steps import Logits, Row, Step, loaded, programs_of, step_logits, whole_logits
from test_programs import HEADS, LATENT, ROPE, VOCABULARY, decoder

from megajax.inference.loaded_model import CacheSize, LoadedModel
from megajax.layers.attention.cached import in_cache
from megajax.layers.cache_spec import CacheLeaf

SIZE = CacheSize(blocks=8, block=4, slots=2)
LEAVES = (CacheLeaf("0.mixer.key", (2, 64), ("kv_heads", None), layers=3), CacheLeaf("state", (5,), (None,), per="row"))


@pytest.mark.parametrize(("dtype", "bound"), [("int8", 1 / 254), ("float8_e4m3fn", 1 / 28)])
def test_a_head_is_off_by_half_a_step_of_its_largest_number(dtype: str, bound: float) -> None:
    x = np.random.default_rng(0).normal(0, 1, (6, 2, 16)).astype(np.float32) * np.float32([[[100.0], [0.01]]])
    x[0, 0] = 0
    cache = {"key": jnp.zeros((1, 4, 4, 2, 16), dtype), "key_scale": jnp.zeros((1, 4, 4, 2))}
    stored = in_cache("key", jnp.asarray(x), cache)
    assert stored["key"].dtype == dtype
    assert stored["key_scale"].shape == (6, 2)
    dequantized = np.asarray(stored["key"], np.float32) * np.asarray(stored["key_scale"])[..., None]
    # In e4m3 the largest step, 32 of 448, is that of numbers above 256.
    assert (np.abs(dequantized - x) <= np.abs(x).max(-1, keepdims=True) * bound * (1 + 1e-5)).all()
    assert list(in_cache("key", jnp.asarray(x), {"key": cache["key"]})) == ["key"]


def test_bytes_of_a_cache() -> None:
    model = loaded(decoder(HEADS), {})
    for dtype, token_bytes in (("bfloat16", 3 * 2 * 64 * 2), ("int8", 3 * 2 * (64 + 4)), ("fp8", 3 * 2 * (64 + 4))):
        arrays = model.like_cache(LEAVES[:1], SIZE, dtype).values()
        assert sum(array.size * array.dtype.itemsize for array in arrays) == token_bytes * SIZE.tokens()
    like = model.like_cache(LEAVES, SIZE, "fp8")
    assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in like.items()} == {
        "0.mixer.key": ((3, 8, 4, 2, 64), "float8_e4m3fn"),
        "0.mixer.key_scale": ((3, 8, 4, 2), "float32"),
        "state": ((1, 2, 5), "float32"),
    }


def logits(model: LoadedModel, tokens: np.ndarray, dtype: str, kernel: str) -> np.ndarray:
    """The logits of the last token of a prompt, and of the token after it."""
    programs = programs_of(model, [Logits()], rows=2, blocks=8, dtype=dtype, kernel=kernel)
    row = Row(tokens.tolist(), [5, 1, 2, 3, 4, 0, 6, 7], 0)
    steps = Step(prompts=[(row, 0, 8)]), Step(prompts=[(row, 8, 5)]), Step(decode=[(row, 13)])
    return np.stack([step_logits(programs, [step])[0][2][:VOCABULARY] for step in steps])


@pytest.mark.parametrize(
    ("dtype", "kernel", "tensor"),
    [
        ("int8", "tiled", 1),
        pytest.param("fp8", "tiled", 1, marks=pytest.mark.slow),
        pytest.param("int8", "reference", 2, marks=pytest.mark.slow),
    ],
)
def test_logits_are_near_those_of_a_float_cache(dtype: str, kernel: str, tensor: int) -> None:
    model = loaded(decoder(replace(HEADS, rope=ROPE), LATENT), {"tensor": tensor})
    tokens = np.random.default_rng(2).integers(0, VOCABULARY, 14).astype(np.int32)
    expected = whole_logits(model, tokens[None])[0, [7, 12, 13]]
    small = logits(model, tokens, dtype, kernel)
    error = np.abs(small - expected).max() / np.abs(expected).max()
    assert 1e-5 < error < (0.03 if dtype == "int8" else 0.15)
