"""Steps of every kind of block give the logits of the trainer's forward; experts accept all tokens of a step."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_steps import loaded, whole_logits
from flax import nnx
from test_programs import HEADS, LENGTH, ROPE, VOCABULARY, compare_steps, decoder, steps_of, tokens_of

from megajax.inference.programs import step_rows
from megajax.inference.step_arrays import Bucket, pack
from megajax.layers.block.config import BlockConfig
from megajax.layers.context import Context
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import CapacityConfig, DispatchConfig, MoEConfig, RouterConfig
from megajax.layers.norm.config import LayerScaleConfig, RMSNormConfig
from megajax.layers.param import LayerSettings, Observation, bind, initial_values, specs
from megajax.layers.position.config import Llama3ScalingConfig, RopeConfig, YarnScalingConfig
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.rules import Plan
from megajax.models.decoder.config import DecoderConfig, WidthScalingConfig
from megajax.models.presets.deepseek import deepseek
from megajax.models.presets.windowed import gpt_oss

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
MODELS = {
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
LAYOUTS: dict[str, dict[str, int]] = {
    "mixture": {"expert": 2},
    "deepseek": {"expert": 2, "data": 2},
    "gpt-oss": {"expert": 2, "tensor": 2},
    "tied, norms over all heads": {"tensor": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_steps_give_the_logits_of_the_trainer(name: str) -> None:
    """On one device, or on those that the table names."""
    model = loaded(MODELS[name], LAYOUTS.get(name, {}))
    compare_steps(model, whole_logits(model, tokens_of(model)))


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


@pytest.mark.slow
def test_bfloat16_has_the_likeliest_tokens_of_the_trainer() -> None:
    model = loaded(MODELS["gpt-oss"], {})
    model = replace(model, weights=jax.tree.map(lambda w: w.astype("bfloat16"), model.weights))
    expected = whole_logits(model, tokens_of(model))
    for place, logits in steps_of(model, "bfloat16"):
        assert logits[:VOCABULARY].argmax() == expected[place].argmax()
