"""The decoder: causality, positions, padding, and plain jax.jit on a mesh."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.context import Context
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.param import bind, specs
from megajax.layers.position.config import RopeConfig
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.models.decoder.config import DecoderConfig, WidthScalingConfig
from megajax.training.state import parameter_shardings

pytestmark = pytest.mark.smoke

ROWS, LENGTH, VOCABULARY = 2, 12, 50
GPT = DecoderConfig(
    hidden=16,
    vocabulary_size=VOCABULARY,
    sequence_length=LENGTH,
    stack=StackConfig(
        pattern=(
            BlockConfig(mixer=AttentionConfig(heads=4, bias=True), mlp=DenseMLPConfig(ffn=24), norm=LayerNormConfig()),
        ),
        repeats=2,
    ),
    norm=LayerNormConfig(),
    learned_positions=True,
    tied=True,
)
LLAMA = DecoderConfig(
    hidden=16,
    vocabulary_size=VOCABULARY,
    sequence_length=LENGTH,
    stack=StackConfig(
        pattern=(
            BlockConfig(mixer=AttentionConfig(heads=4, kv_heads=2, rope=RopeConfig()), mlp=GatedMLPConfig(ffn=24)),
        ),
        repeats=2,
    ),
)
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
SEGMENTS = np.repeat([[0] * 5 + [1] * 4 + [2] * 3], ROWS, axis=0).astype(np.int32)
NONE = np.zeros_like(SEGMENTS)
POSITIONS = np.repeat(np.arange(LENGTH, dtype=np.int32)[None], ROWS, axis=0)


@cache
def abstract(cfg: DecoderConfig, parallel: ParallelConfig) -> nnx.Module:
    return nnx.eval_shape(lambda: cfg.build(Layout(Plan.of(parallel))))


@cache
def weights(cfg: DecoderConfig) -> dict[str, np.ndarray]:
    """Wide enough that attention is far from uniform; biases and gains are not at their initial values."""
    rng = np.random.default_rng(1)
    declared = specs(abstract(cfg, ParallelConfig())).items()
    return {path: rng.normal(spec.role == "gain", 0.3, spec.shape).astype(np.float32) for path, spec in declared}


@cache
def forward(cfg: DecoderConfig):
    """Compiled (tokens, positions, segments) -> logits on one device."""
    model = abstract(cfg, ParallelConfig())

    @jax.jit
    def call(tokens, positions, segments):
        with jax.default_matmul_precision("highest"):
            return bind(model, jax.tree.map(jnp.asarray, weights(cfg)))(tokens, positions, segments)

    return call


def changed(place: int) -> np.ndarray:
    tokens = TOKENS.copy()
    tokens[0, place] = (tokens[0, place] + 1) % VOCABULARY
    return tokens


def test_a_token_affects_only_later_positions_of_its_own_row():
    before, after = (np.asarray(forward(LLAMA)(tokens, POSITIONS, NONE)) for tokens in (TOKENS, changed(4)))
    assert before.shape == (ROWS, LENGTH, VOCABULARY)
    assert before.dtype == np.float32
    np.testing.assert_array_equal(before[0, :4], after[0, :4])
    np.testing.assert_array_equal(before[1], after[1])
    assert (np.abs(before[0, 4:] - after[0, 4:]).max(-1) > 1e-4).all()


def test_isolated_documents_do_not_see_each_other():
    before, after = (np.asarray(forward(LLAMA)(tokens, POSITIONS, SEGMENTS)) for tokens in (TOKENS, changed(6)))
    np.testing.assert_array_equal(before[0, 9:], after[0, 9:])
    np.testing.assert_array_equal(before[0, :6], after[0, :6])
    assert (np.abs(before[0, 6:9] - after[0, 6:9]).max(-1) > 1e-4).all()
    open_before, open_after = (np.asarray(forward(LLAMA)(tokens, POSITIONS, NONE)) for tokens in (TOKENS, changed(6)))
    assert (np.abs(open_before[0, 9:] - open_after[0, 9:]).max(-1) > 1e-4).all()


def test_an_isolated_document_equals_one_on_its_own():
    """Rotary positions depend on distances only, so that it may be anywhere in the row."""
    moved = TOKENS.copy()
    moved[:, :4] = TOKENS[:, 5:9]
    packed = forward(LLAMA)(TOKENS, POSITIONS, SEGMENTS)
    np.testing.assert_allclose(packed[:, 5:9], forward(LLAMA)(moved, POSITIONS, NONE)[:, :4], atol=2e-5)


def test_rotary_positions_count_by_distance():
    start, shifted, doubled = (forward(LLAMA)(TOKENS, p, NONE) for p in (POSITIONS, POSITIONS + 37, 2 * POSITIONS))
    np.testing.assert_allclose(start, shifted, atol=5e-5)
    assert np.abs(np.asarray(start - doubled)).max() > 1e-2


def test_learned_positions_are_read_by_number():
    positions = POSITIONS.copy()
    positions[0, 7] = 2
    start, moved = (np.asarray(forward(GPT)(TOKENS, p, NONE)) for p in (POSITIONS, positions))
    np.testing.assert_array_equal(start[0, :7], moved[0, :7])
    assert (np.abs(start[0, 7:] - moved[0, 7:]).max(-1) > 1e-4).all()


def test_the_factor_on_embeddings_includes_learned_positions():
    """Megatron-LM's --mup-embedding-mult does so too."""
    scaled = replace(GPT, width_scaling=WidthScalingConfig(base_hidden=GPT.hidden, embedding=3.0))
    plain, tripled = (bind(abstract(cfg, ParallelConfig()), weights(GPT)) for cfg in (GPT, scaled))
    ctx = Context(jnp.asarray(POSITIONS), jnp.arange(LENGTH))
    first, second = (model.enter(model.embed_tokens(jnp.asarray(TOKENS)), ctx) for model in (plain, tripled))
    np.testing.assert_allclose(second, 3 * first, rtol=1e-6)


@pytest.mark.parametrize("cfg", [GPT, LLAMA], ids=["tied", "untied"])
def test_token_losses_are_of_the_logits(cfg):
    model = bind(abstract(cfg, ParallelConfig()), weights(cfg))
    labels = RNG.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    hidden = jnp.asarray(RNG.normal(size=(ROWS, LENGTH, 16)), jnp.float32)
    with jax.default_matmul_precision("highest"):
        logits, losses = model.logits(hidden), -model.token_scores(hidden, labels)[0]
    table = weights(cfg)["tokens" if cfg.tied else "head"][:VOCABULARY]
    np.testing.assert_allclose(logits, np.asarray(hidden, np.float64) @ table.T, rtol=1e-5, atol=1e-5)
    expected = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cfg", [GPT, LLAMA], ids=["gpt", "llama"])
def test_plain_jit_on_a_mesh_is_one_device(cfg):
    """A notebook calls it without a surrounding shard_map, with weights sharded over data and tensor at rest."""
    parallel = ParallelConfig(data=2, tensor=2, sequence=cfg is LLAMA, data_sharding="fsdp")
    model, mesh, plan = abstract(cfg, parallel), build_mesh(parallel), Plan.of(parallel)
    placed = jax.device_put(weights(cfg), parameter_shardings(specs(model), plan.params, mesh))
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        actual = jax.jit(lambda values: bind(model, values)(TOKENS))(placed)
    np.testing.assert_allclose(actual, forward(cfg)(TOKENS, POSITIONS, NONE), atol=1e-5, rtol=1e-5)


def test_bfloat16_stays_in_the_residual_stream_and_leaves_logits_and_loss_in_float32():
    model = abstract(LLAMA, ParallelConfig())
    low = {path: jax.ShapeDtypeStruct(value.shape, jnp.bfloat16) for path, value in weights(LLAMA).items()}

    def parts(values):
        bound = bind(model, values)
        x = bound.enter(bound.embed_tokens(TOKENS), Context(jnp.asarray(POSITIONS), jnp.arange(LENGTH)))
        y = bound.final_norm(bound.stack(x, Context(jnp.asarray(POSITIONS), jnp.arange(LENGTH))))
        return (
            x,
            y,
            bound.logits(y),
            bound.vocabulary_loss(y, TOKENS, jnp.ones(TOKENS.shape)).minimised,
            bound.token_scores(y, TOKENS)[0],
        )

    dtypes = [str(array.dtype) for array in jax.eval_shape(parts, low)]
    assert dtypes == ["bfloat16", "bfloat16", "float32", "float32", "float32"]
