"""Compiled steps give the logits of the trainer's forward, for any mix of prompts and decoding rows.

Of every kind of block; experts accept all tokens of a step.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_steps import CHUNK, Logits, Row, Step, loaded, programs_of, step_logits, whole_logits
from flax import nnx

from megajax.inference.loaded_model import LoadedModel, layers_apart
from megajax.inference.programs import step_rows
from megajax.inference.step_arrays import Bucket, buckets_up_to, pack
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.context import Context
from megajax.layers.delta.config import GatedDeltaNetConfig
from megajax.layers.mamba.config import Mamba1Config, Mamba2Config
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import CapacityConfig, DispatchConfig, MoEConfig, RouterConfig
from megajax.layers.norm.config import LayerScaleConfig, RMSNormConfig
from megajax.layers.param import LayerSettings, Observation, bind, initial_values, specs
from megajax.layers.position.config import Llama3ScalingConfig, RelativeBiasConfig, RopeConfig, YarnScalingConfig
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.mesh.config import BATCH_AXES, ParallelConfig, devices_over
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.decoder.config import DecoderConfig, WidthScalingConfig
from megajax.models.presets.deepseek import deepseek
from megajax.models.presets.windowed import gpt_oss

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
ROTATED = replace(HEADS, rope=ROPE)
SHORT = {"sequence_length": LENGTH, "vocabulary_size": VOCABULARY}


def of_block(cfg: DecoderConfig, **changes: object) -> DecoderConfig:
    """The model with these settings of its blocks."""
    (block,) = cfg.stack.pattern
    return replace(cfg, stack=StackConfig(pattern=(replace(block, **changes),), repeats=2))


def mixture(**settings: object) -> DecoderConfig:
    """A mixture of experts in every block."""
    moe = MoEConfig(experts=8, top_k=2, expert=GatedMLPConfig(ffn=16), **settings)
    return of_block(decoder(ROTATED), mlp=moe)


def post_norm() -> DecoderConfig:
    block = BlockConfig(norm_placement="post", mixer=ROTATED, mlp=GatedMLPConfig(ffn=48))
    return replace(decoder(ROTATED), stack=StackConfig(pattern=(block,), repeats=2))


SCALINGS = YarnScalingConfig(factor=4.0, original=8), Llama3ScalingConfig(factor=4.0, original=8)
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
    "mixture": mixture(),
    "deepseek": replace(deepseek("debug", **SHORT, yarn=True), init_std=0.1),
    "gpt-oss": replace(gpt_oss("debug", **SHORT, window=6), init_std=0.1),
    "post-norm": post_norm(),
    "layer scale, muP, float32 residual": replace(
        of_block(decoder(ROTATED, tied=True, residual="float32"), layer_scale=LayerScaleConfig(initial=0.3)),
        width_scaling=WidthScalingConfig(base_hidden=16, base_head_dim=4, embedding=3.0),
    ),
    "tied, norms over all heads": decoder(
        replace(ROTATED, kv_heads=None, qk_norm=RMSNormConfig(), qk_norm_over="heads"), repeats=2, tied=True
    ),
    # From rows of 8 tokens to longer ones.
    "yarn, llama 3": decoder(*(replace(HEADS, rope=RopeConfig(scaling=scaling)) for scaling in SCALINGS)),
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


def padded(rows: Iterable[Sequence[int]]) -> np.ndarray:
    """Rows of LENGTH tokens, zeros behind the given ones."""
    return np.asarray([[*row, *[0] * (LENGTH - len(row))] for row in rows], np.int32)


def replicas(model: LoadedModel) -> int:
    """The number of replicas of a model on its mesh."""
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
    "mixture": {"expert": 2},
    "deepseek": {"expert": 2, "data": 2},
    "gpt-oss": {"expert": 2, "tensor": 2},
    "tied, norms over all heads": {"tensor": 2},
}
QUICK = ("window, sinks, gate",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_steps_give_the_logits_of_the_trainer(name: str) -> None:
    """The model is on one device, or on those that the table names."""
    model = loaded(MODELS[name], LAYOUTS.get(name, {}))
    compare_steps(model, whole_logits(model, tokens_of(model)))


@pytest.mark.parametrize("name", ["llama", pytest.param("nemotron-h", marks=pytest.mark.slow)])
def test_rows_of_weights_as_separate_arguments_give_the_same_bits(name: str) -> None:
    """On CPUs nothing copies these rows, neither before the steps nor in them."""
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


def test_steps_have_no_capacity() -> None:
    """A trainer drops tokens depending on the rest of the batch.

    A step keeps all of them, as a trainer without limits.
    """
    free = MoEConfig(experts=4, top_k=2, expert=GatedMLPConfig(ffn=8))
    capacity = replace(free, router=RouterConfig(capacity=CapacityConfig(factor=0.5)))
    settings = LayerSettings(layout=Layout(Plan.of(ParallelConfig())), hidden=16, std=0.3, output_std=0.3)
    x = np.random.default_rng(0).normal(size=(24, 1, 16)).astype(np.float32)
    ctx = Context(jnp.zeros((24, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    arrays = pack(None, Bucket(24), block=1, width=1)._replace(counts=(np.ones(24, np.int32),))
    rows = step_rows(arrays, ((24, 1),), "tiled", loaded(MODELS["mixture"], {}))

    @partial(jax.jit, static_argnums=(0, 1))
    def run(cfg: MoEConfig, decoding: bool) -> jax.Array:
        abstract = nnx.eval_shape(lambda: cfg.build(settings))
        values = initial_values({**specs(abstract), **specs(abstract, Observation)}, 0)
        return bind(abstract, values)(x, ctx._replace(rows=rows if decoding else None))

    every = run(free, False)
    np.testing.assert_array_equal(run(free, True), every)
    assert np.abs(run(capacity, False) - every).max() > 0.1
    np.testing.assert_array_equal(run(capacity, True), every)
    assert replace(free, dispatch=DispatchConfig(room=1.0)).decoding() == free
