"""Engines with experts sharded over devices give the answers of one device, whatever the other replicas compute."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_steps import loaded
from flax import nnx
from test_engine import Client, demand_equal, serve
from test_programs import LENGTH, MODELS, VOCABULARY

from megajax.inference.assembly import make_engine
from megajax.inference.config import GenerationConfig, InferenceConfig, InferenceParallelConfig
from megajax.inference.engine import Engine
from megajax.layers.context import Context
from megajax.layers.decoding import StepRows
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig
from megajax.layers.param import LayerSettings, Observation, bind, initial_values, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.presets.llama import llama3
from megajax.tokenizers.config import ByteTokenizerConfig

SETTINGS = InferenceConfig(rows=2, chunk=8, block=4, cache_tokens=3 * LENGTH, compute="float32")
LENGTHS = (11, 3, 1, 7, 19, 2, 5)


def engine_on(name: str, **sizes: int) -> Engine:
    """An engine of a model of `MODELS` on a mesh."""
    tokenizer = ByteTokenizerConfig().build()
    model = loaded(MODELS[name], sizes)
    return make_engine(model, SETTINGS, tokenizer, end_tokens=(), length=LENGTH, queue=64)


def prompts() -> list[list[int]]:
    draw = np.random.default_rng(3)
    return [draw.integers(0, VOCABULARY, count).tolist() for count in LENGTHS]


def answers(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Client]:
    """Greedy answers of different lengths, so that replicas run out of rows at different times."""
    clients = [Client(prompt, max_tokens=4 + 2 * number, logprobs=0) for number, prompt in enumerate(prompts)]
    serve(engine, *clients)
    return clients


@cache
def answers_of_one_device(name: str) -> list[Client]:
    return answers(engine_on(name), prompts())


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mixture", {"expert": 2, "tensor": 2}),
        pytest.param("deepseek", {"expert": 4, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_answers_of_sharded_experts_are_those_of_one_device(name: str, sizes: dict[str, int]) -> None:
    engine = engine_on(name, **sizes)
    replicas = sizes.get("data", 1) * sizes["expert"]
    assert engine.device.replicas == replicas and len(engine.schedulers) == replicas
    experts = next(w for path, w in engine.device.programs.weights.items() if path.endswith("mlp.experts.up"))
    stored = jax.tree.leaves(experts)[0]
    assert stored.size == stored.addressable_shards[0].data.size * sizes["expert"] * sizes.get("tensor", 1)
    demand_equal(answers(engine, prompts()), answers_of_one_device(name))
    # One replica works, the others are idle.
    demand_equal(answers(engine, prompts()[:1]), answers_of_one_device(name)[:1])


@pytest.mark.slow
def test_padding_of_steps_goes_to_no_expert() -> None:
    """A row of the step that has no token, and tokens past a row's end, give zeros; the others their outputs."""
    cfg = MoEConfig(experts=4, top_k=2, expert=GatedMLPConfig(ffn=8))
    settings = LayerSettings(layout=Layout(Plan.of(ParallelConfig())), hidden=16, std=0.3, output_std=0.3)
    abstract = nnx.eval_shape(lambda: cfg.build(settings))
    layer: Any = bind(abstract, initial_values({**specs(abstract), **specs(abstract, Observation)}, 0))
    rows = StepRows(
        groups=((2, 1), (2, 3)),
        kernel="tiled",
        slots=jnp.zeros(8, jnp.int32),
        tables=(jnp.zeros((2, 1), jnp.int32),) * 2,
        counts=(jnp.asarray([1, 0]), jnp.asarray([2, 0])),
        states=(jnp.zeros(2, jnp.int32),) * 2,
        layer=jnp.int32(0),
    )
    ctx = Context(jnp.zeros((8, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    x = np.random.default_rng(0).normal(size=(8, 1, 16)).astype(np.float32)
    whole, step = layer(x, ctx), layer(x, ctx._replace(rows=rows))
    real = np.asarray([True, False, True, True, False, False, False, False])
    np.testing.assert_array_equal(rows.real(), real)
    np.testing.assert_allclose(step[real], whole[real], atol=1e-6)
    assert not np.any(step[~real]) and np.abs(whole[~real]).min() > 0


def test_layouts_that_do_not_fit() -> None:
    """The number of experts and the number of devices are each checked."""
    config = GenerationConfig(model=MODELS["mixture"], parallel=InferenceParallelConfig(expert=3, tensor=2))
    (problem,) = config.problems()
    assert problem.setting.startswith("model.") and "not divisible by parallel.expert=3" in problem.message
    config = GenerationConfig(model=MODELS["mixture"], parallel=InferenceParallelConfig(expert=4, tensor=2))
    assert not config.problems(8) and not config.problems(16)
    assert "multiply to 8 devices (expert 4 x tensor 2), there are 4" in config.problems(4)[0].message
    dense = GenerationConfig(model=llama3("debug"), parallel=InferenceParallelConfig(expert=2))
    assert not dense.problems(2), "in a model without experts, `expert` is like `data`"
