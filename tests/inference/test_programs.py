"""Compiled steps give the logits of the trainer's forward, for any mix of prompts and decoding rows."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_steps import CHUNK, Logits, Row, Step, loaded, programs_of, step_logits, whole_logits

from megajax.inference.loaded_model import LoadedModel, layers_apart
from megajax.inference.step_arrays import Bucket, buckets_up_to
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.delta.config import GatedDeltaNetConfig
from megajax.layers.mamba.config import Mamba1Config, Mamba2Config
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RelativeBiasConfig, RopeConfig
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.mesh.config import BATCH_AXES, devices_over
from megajax.models.decoder.config import DecoderConfig

BLOCK, LENGTH, VOCABULARY = 4, 32, 250
HEADS = AttentionConfig(heads=4, kv_heads=2, kernel="reference")
ROPE = RopeConfig()


def decoder(*mixers: Any, repeats: int = 1, **more: Any) -> DecoderConfig:
    """A stack of these mixers, repeated."""
    blocks = tuple(BlockConfig(mixer=mixer, mlp=GatedMLPConfig(ffn=48)) for mixer in mixers)
    stack = StackConfig(pattern=blocks, repeats=repeats)
    return DecoderConfig(
        hidden=32, vocabulary_size=VOCABULARY, sequence_length=LENGTH, stack=stack, init_std=0.3, **more
    )


def hybrid() -> DecoderConfig:
    """Layers without a repeated pattern."""
    cfg = decoder(replace(HEADS, rope=ROPE), replace(HEADS, rope=ROPE, window=5), replace(HEADS, rope=ROPE))
    return replace(cfg, stack=SegmentsConfig.of(cfg.stack.pattern))


MAMBA = Mamba2Config(heads=8, head_dim=6, state=5, groups=2, chunk=8, bias=True)


def nemotron() -> DecoderConfig:
    """Blocks of one mixer or one feed-forward each, without a repeated pattern."""
    mixer, mlp = BlockConfig(mixer=MAMBA), BlockConfig(mlp=GatedMLPConfig(ffn=48))
    attention = BlockConfig(mixer=HEADS)
    return replace(decoder(HEADS), stack=SegmentsConfig.of((mixer, mlp, mixer, mlp, mixer, attention, mlp, mixer)))


DELTA = GatedDeltaNetConfig(heads=4, key_heads=2, head_dim=6, key_dim=5, chunk=16)
LATENT = LatentAttentionConfig(
    heads=4, query_rank=24, key_value_rank=32, content_dim=16, position_dim=8, value_dim=16, kernel="reference"
)
SHARED = replace(HEADS, qk_norm=RMSNormConfig(), relative=RelativeBiasConfig(shared=True))
MODELS = {
    "gpt": decoder(replace(HEADS, kv_heads=None, bias=True), repeats=2, learned_positions=True),
    "llama": decoder(replace(HEADS, rope=ROPE), repeats=2),
    "window, sinks, gate": decoder(
        replace(HEADS, rope=ROPE, window=5, sink="learned"), replace(HEADS, sink="zero", gate=True)
    ),
    "relative biases": decoder(SHARED, repeats=2),
    "latent": decoder(LATENT, repeats=2),
    "segments": hybrid(),
    "mamba 2": decoder(MAMBA, repeats=2),
    "mamba 1": decoder(Mamba1Config(inner=48, rank=3, state=4, chunk=5, bias=True), repeats=2),
    "nemotron-h": nemotron(),
    "delta net": decoder(DELTA, replace(HEADS, gate=True)),
}


def work_of(rows: list[Row], prompts: list[int], tile: int) -> list[Step]:
    """Prompts in chunks of whole tiles while earlier rows decode; then all decode to their ends."""
    computed, steps = [0] * len(rows), []
    while any(count < len(row.tokens) for count, row in zip(computed, rows, strict=True)):
        step, tiles = Step(), CHUNK // tile
        for number, row in enumerate(rows):
            remaining, first = prompts[number] - computed[number], computed[number]
            if count := max(0, min(remaining, tiles * tile)):
                step.prompts.append((row, first, count))
                computed[number] += count
                tiles -= -(-count // tile)
            elif remaining <= 0 and first < len(row.tokens):
                step.decode.append((row, first))
                computed[number] += 1
        steps.append(step)
    return steps


def replicas(model: LoadedModel) -> int:
    """Those of a model on its mesh."""
    return devices_over(model.mesh.shape, BATCH_AXES)


def tokens_of(model: LoadedModel) -> np.ndarray:
    """Three rows for each replica."""
    return np.random.default_rng(1).integers(0, VOCABULARY, (3 * replicas(model), LENGTH)).astype(np.int32)


def steps_of(model: LoadedModel, dtype: str = "float32") -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Runs the model on `tokens_of` as prompts and single tokens; yields row, position, and the logits there.

    dtype: of the cache.
    """
    # With states of rows, a step computes one prompt.
    tile = 2 if all(leaf.per == "token" for leaf in model.cfg.cache_leaves(1)) else CHUNK
    programs = programs_of(model, [Logits()], chunks=(0, CHUNK), tile=tile, blocks=3 * LENGTH // BLOCK, dtype=dtype)
    draw, lengths, prompts, schedules, owners = np.random.default_rng(2), [LENGTH, 21, 9], [19, 3, 8], [], []
    for replica in range(replicas(model)):
        blocks, row_tokens = draw.permutation(programs.size.blocks).reshape(3, -1), tokens_of(model)[3 * replica :]
        rows = [Row(row_tokens[n, : lengths[n]].tolist(), blocks[n].tolist(), n) for n in range(3)]
        schedules.append(work_of(rows, prompts, tile))
        owners += rows
    for work in zip(*schedules, strict=True):
        for row, at, logits in step_logits(programs, work):
            yield (owners.index(row), at), logits
    assert set(programs.compiled) <= {*programs.buckets, (Bucket(3), Logits())}


def compare_steps(model: LoadedModel, expected: np.ndarray) -> None:
    """Asserts that steps give these logits [rows, positions, V], to 1e-5 of the largest."""
    compared = 0
    for place, logits in steps_of(model):
        np.testing.assert_allclose(logits[:VOCABULARY], expected[place], atol=1e-5 * np.abs(expected).max())
        compared += 1
    assert compared == 37 * replicas(model)


LAYOUTS: dict[str, dict[str, int]] = {
    "llama": {"data": 2, "tensor": 2},
    "latent": {"data": 2, "tensor": 2},
    "mamba 1": {"data": 2, "tensor": 2},
    "nemotron-h": {"data": 2, "tensor": 2},
    "mamba 2": {"tensor": 4},
    "delta net": {"data": 2, "tensor": 4},
}
QUICK = ("window, sinks, gate", "mamba 2")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_steps_give_the_logits_of_the_trainer(name: str) -> None:
    """On one device, or on those that the table names."""
    model = loaded(MODELS[name], LAYOUTS.get(name, {}))
    compare_steps(model, whole_logits(model, tokens_of(model)))


@pytest.mark.parametrize("name", ["llama", pytest.param("nemotron-h", marks=pytest.mark.slow)])
def test_rows_of_weights_as_separate_arguments_give_the_same_bits(name: str) -> None:
    """As on CPUs, where nothing copies them: neither before the steps nor in them."""
    model = loaded(MODELS[name], LAYOUTS[name])
    apart = layers_apart(model)
    for (place, expected), (other, logits) in zip(steps_of(model), steps_of(apart), strict=True):
        np.testing.assert_array_equal(logits, expected)
        assert place == other
    rows_of = {path: w for path, w in apart.weights.items() if isinstance(w, tuple)}
    # Rows that do not begin at multiples of 64 bytes are copied.
    path = next(path for path, w in rows_of.items() if w[0].addressable_shards[0].data.nbytes % 64 == 0)
    stack, rows = model.weights[path], apart.weights[path]
    assert len(rows) == len(stack) and not rows[1].sharding.is_fully_replicated
    row_bytes = rows[0].addressable_shards[0].data.nbytes
    pointers = [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in (stack, rows[1])]
    assert pointers[1] - pointers[0] == row_bytes, "rows share the memory of their stack"


@pytest.mark.parametrize("end", ["donated", "deleted"])
def test_rows_of_weights_outlive_the_stack_whose_memory_they_share(end: str) -> None:
    """A step of training takes its state, and deletes the arrays: jax then leaves the memory to the rows."""
    model = loaded(decoder(replace(HEADS, rope=ROPE), repeats=2), {})
    rows, stack = (each.weights["stack.blocks.0.mixer.query"] for each in (layers_apart(model), model))
    before, place, shape = [np.array(row) for row in rows], stack.unsafe_buffer_pointer(), stack.shape
    assert rows[0].unsafe_buffer_pointer() == place
    model.weights.clear()
    if end == "donated":
        overwritten = jax.jit(lambda stack: stack.at[1].add(5.0), donate_argnums=0)(stack)
        assert overwritten.unsafe_buffer_pointer() != place
    else:
        stack.delete()
    del stack
    new = [jnp.full(shape, number) for number in range(9)]
    assert all(array.unsafe_buffer_pointer() != place for array in new)
    for row, value in zip(rows, before, strict=True):
        np.testing.assert_array_equal(row, value)


def test_no_step_copies_a_weight_that_is_an_argument() -> None:
    model = layers_apart(loaded(replace(decoder(replace(HEADS, rope=ROPE), repeats=3), hidden=512), {}))
    (bucket,) = (programs := programs_of(model, [], chunks=(0,), blocks=3)).buckets
    temporary = programs.lowered(bucket).compile().memory_analysis().temp_size_in_bytes
    assert temporary < max(w.nbytes for w in jax.tree.leaves(model.weights))


def test_buckets() -> None:
    plain, prompts = (Bucket(2), Bucket(8)), [Bucket(rows, tiles, 4) for rows in (2, 8) for tiles in (1, 4)]
    assert buckets_up_to(8, 16, 4) == (*plain, *prompts)
    assert buckets_up_to(12, 16, 16, invariant=True) == (Bucket(12, 1, 16),)
    assert [bucket.rows for bucket in buckets_up_to(64, 4, 4)] == [4, 16, 64, 4, 64]
    assert [bucket.tokens for bucket in buckets_up_to(3, 70, 32)] == [3, 99]
    drafted = *plain, *(bucket._replace(drafts=4) for bucket in (*plain, *prompts))
    assert buckets_up_to(8, 16, 4, drafts=4) == drafted
    assert buckets_up_to(12, 16, 16, drafts=4, invariant=True) == (Bucket(12, 1, 16, 4),)
