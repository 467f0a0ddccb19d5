"""A cache in 8 bits against a float cache; steps of a model that reads a text with an encoder against its forward."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from compiled_steps import CHUNK, Logits, Row, Step, loaded, programs_of, step_logits, whole_logits
from test_programs import HEADS, LATENT, LENGTH, ROPE, VOCABULARY, decoder

from megajax.inference.loaded_model import CacheSize, LoadedModel
from megajax.layers.attention.cached import in_cache
from megajax.layers.attention.config import CrossAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.cache_spec import CacheLeaf
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import LayerNormConfig, RMSNormConfig
from megajax.layers.position.config import RelativeBiasConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.t5.config import T5Config

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
    ("dtype", "kernel", "tensor"), [("int8", "tiled", 1), pytest.param("fp8", "reference", 2, marks=pytest.mark.slow)]
)
def test_logits_are_near_those_of_a_float_cache(dtype: str, kernel: str, tensor: int) -> None:
    model = loaded(decoder(replace(HEADS, rope=ROPE), LATENT), {"tensor": tensor})
    tokens = np.random.default_rng(2).integers(0, VOCABULARY, 14).astype(np.int32)
    expected = whole_logits(model, tokens[None])[0, [7, 12, 13]]
    small = logits(model, tokens, dtype, kernel)
    error = np.abs(small - expected).max() / np.abs(expected).max()
    assert 1e-5 < error < (0.03 if dtype == "int8" else 0.15)


TEXT = 21
CROSS = CrossAttentionConfig(heads=4, kv_heads=2, kernel="reference", bias=True)
NORM = LayerNormConfig()
MLP = GatedMLPConfig(ffn=48)
FROM_BOTH_SIDES = replace(HEADS, causal=False, relative=RelativeBiasConfig(shared=True, both_ways=True))
DECODING = BlockConfig(mixer=replace(HEADS, relative=RelativeBiasConfig(shared=True)), cross=CROSS, mlp=MLP, norm=NORM)
NORMS_AND_SINKS = replace(CROSS, qk_norm=RMSNormConfig(), sink="learned")
T5 = T5Config(
    hidden=32,
    vocabulary_size=VOCABULARY,
    sequence_length=LENGTH,
    encoder_length=TEXT,
    encoder=StackConfig(pattern=(BlockConfig(mixer=FROM_BOTH_SIDES, mlp=MLP, norm=NORM),), repeats=1),
    stack=StackConfig(pattern=(DECODING, replace(DECODING, cross=NORMS_AND_SINKS)), repeats=1),
    init_std=0.3,
)


def forward(model: LoadedModel, rows: list[Row]) -> np.ndarray:
    """The logits of the trainer's forward pass over texts and answers, [rows, positions, V]."""

    def padded(all_tokens: list[list[int]], length: int) -> np.ndarray:
        return np.asarray([tokens + [0] * (length - len(tokens)) for tokens in all_tokens], np.int32)

    lengths = np.asarray([len(row.memory) for row in rows])
    leaves = {"encoder_tokens": padded([row.memory for row in rows], TEXT)}
    leaves["encoder_segment_ids"] = (np.arange(TEXT)[None] < lengths[:, None]).astype(np.int32)
    leaves["tokens"] = padded([row.tokens for row in rows], CHUNK)
    return whole_logits(model, **leaves, segment_ids=np.ones_like(leaves["tokens"]))


@pytest.mark.parametrize(
    ("sizes", "drafts"), [({}, 1), pytest.param({"data": 2, "tensor": 2}, 0, marks=pytest.mark.slow)]
)
def test_rows_read_their_texts(sizes: dict[str, int], drafts: int) -> None:
    """Steps have drafts, all of which are wrong."""
    model, draw = loaded(T5, sizes), np.random.default_rng(3)
    programs = programs_of(model, [Logits()], rows=2, blocks=12, drafts=drafts)
    assert not programs.prefix_sharing
    replicas = sizes.get("data", 1)

    def rows(text: int, tokens: int, blocks: list[int], slot: int) -> list[Row]:
        new = [[draw.integers(1, VOCABULARY, n).tolist() for n in (text, tokens)] for _ in range(replicas)]
        return [Row(answer, blocks, slot, memory, draft=[7] * drafts) for memory, answer in new]

    # The third rows take the slots and blocks of the first, as later requests do.
    first, second, third = rows(TEXT, 3, [0], 1), rows(5, 7, [3, 1], 0), rows(9, 3, [0], 1)
    begun, ended = list(zip(first, second, strict=True)), list(zip(third, second, strict=True))
    work = [
        [Step(prompts=[(row, 0, 2)]) for row in first],
        [Step(decode=[(short, 2)], prompts=[(long, 0, 5)]) for short, long in begun],
        [Step(decode=[(long, 5)], prompts=[(short, 0, 1)]) for short, long in ended],
        [Step(decode=[(long, 6), (short, 1)]) for short, long in ended],
        [Step(decode=[(short, 2)]) for short in third],
    ]
    every = [*first, *second, *third]
    expected = dict(zip(every, forward(model, every), strict=True))
    for steps in work:
        for row, at, logits in step_logits(programs, steps):
            scale = np.abs(expected[row]).max()
            np.testing.assert_allclose(logits[:VOCABULARY], expected[row][at], atol=1e-5 * scale)
