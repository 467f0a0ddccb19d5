"""Plans of text generation: weights and cache are those of the arrays; bounds follow from what a step reads."""

from math import prod

import jax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from megajax.config import load
from megajax.inference.programs import CacheSize, like_cache
from megajax.layers.param import specs
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.rules import Plan
from megajax.plan import main
from megajax.planning.cost.description import describe
from megajax.planning.cost.serving import CACHE_SHARE, Serving, row_counts, servings
from megajax.planning.gpus import GIB, GPUS

SIZE = CacheSize(blocks=2, block=16, slots=3)


def plans(config: str, devices: int = 8, context: int = 8192) -> list[Serving]:
    return servings(describe(load(config), GPUS["h100"], devices), devices, context)


def plan(config: str, tensor: int = 1, weights: str = "", cache: str = "", **rest) -> Serving:
    """weights and cache: dtypes, or "" for the compute dtype."""
    every = plans(config, **rest)
    dtypes = tensor, weights or every[0].run.dtype, cache or every[0].run.dtype
    return next(serving for serving in every if (serving.tensor, serving.weights, serving.cache) == dtypes)


def on_a_device(like: jax.ShapeDtypeStruct) -> int:
    return prod(like.sharding.shard_shape(like.shape)) * like.dtype.itemsize


MODELS = [
    ("llama3.py:debug", 1, ""),
    ("llama3.py:debug", 2, "int8"),
    ("gpt3.py:debug", 2, ""),
    ("deepseek.py:deepseek_v2_lite_debug", 2, "int8"),
    ("llama3.py:debug", 4, ""),
    ("mixtral.py:mixtral_8x7b_debug", 2, ""),
    ("nemotron_h.py:nemotron_h_8b_debug", 1, ""),
]


@pytest.mark.parametrize(("config", "tensor", "cache"), MODELS)
def test_weights_and_cache_are_those_of_the_arrays_on_a_device(config: str, tensor: int, cache: str) -> None:
    serving, model = plan(config, tensor, cache=cache, devices=tensor), load(config).model
    mesh = build_mesh(serving.run.parallel, jax.devices()[:tensor])
    layout = Layout(Plan.of(serving.run.parallel))

    def like(shape: tuple[int, ...], axes: tuple) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, layout.plan.compute.spec(axes))
        return jax.ShapeDtypeStruct(shape, serving.run.dtype, sharding=sharding)

    weights = specs(nnx.eval_shape(lambda: model.build(layout))).values()
    assert serving.weight_bytes == sum(on_a_device(like(weight.shape, weight.axes)) for weight in weights)
    arrays = like_cache(model.cache_leaves(tensor), SIZE, serving.cache, mesh, layout, 1).values()
    assert serving.token_bytes * SIZE.tokens() + serving.row_bytes * SIZE.slots == sum(map(on_a_device, arrays))


def test_tokens_fill_the_memory_that_weights_leave() -> None:
    serving = plan("llama3.py:llama3_8b")
    assert serving.weight_bytes == 2 * 8_030_261_248 and serving.token_bytes == 32 * 2 * 8 * 128 * 2
    assert serving.tokens == int(CACHE_SHARE * (80 * 0.99 * 0.92 * GIB - serving.weight_bytes) / serving.token_bytes)
    assert serving.rows == serving.tokens // 8192
    assert plan("llama3.py:llama3_70b").rows == 0, "weights alone are larger than the device"
    assert plan("llama3.py:llama3_70b", weights="int8", cache="int8").rows > 0
    assert plan("mamba2.py:mamba2_130m").tokens is None and plan("mamba2.py:mamba2_130m").rows > 1000


def test_bounds_of_a_step() -> None:
    """Llama-3 8B: all weights but the embedding, and the cache of each row, at 3.35 TB/s; two operations a weight."""
    serving, table = plan("llama3.py:llama3_8b"), 128_256 * 4096
    bandwidth, compute, collectives = serving.step_seconds(16)
    vectors = 65 * 4096
    step_bytes = 2 * (8_030_261_248 - table - vectors) + 16 * 8192 * serving.token_bytes
    assert bandwidth == pytest.approx(step_bytes / 3.35e12) and collectives == 0
    scores = 32 * 2 * 32 * 128 * 8192
    assert compute == pytest.approx(16 * 2 * (8_030_261_248 - table - vectors + scores) / 989.4e12)
    assert serving.tokens_per_second(16) == pytest.approx(8 * 16 / bandwidth)
    assert serving.first_token_seconds == pytest.approx(8192 * serving.token_flops(4096) / 989.4e12)
    sharded = plan("llama3.py:llama3_8b", 8)
    assert sharded.step_seconds(16)[2] > 0 and sharded.step_bytes(16) == pytest.approx(serving.step_bytes(16) / 8)


def test_few_rows_read_only_the_experts_they_choose() -> None:
    serving = plan("mixtral.py:mixtral_8x7b", 2)
    experts, cache = 32 * 8 * 3 * 4096 * 14336 / 2 * 2, 255 * 8192 * serving.token_bytes
    assert serving.step_bytes(256) - serving.step_bytes(1) - cache == pytest.approx(experts * 0.75)


def test_row_counts() -> None:
    assert row_counts(0) == [] and row_counts(1) == [1] and row_counts(52) == [1, 4, 16, 52]
    assert row_counts(64) == [1, 4, 16, 64] and row_counts(9999) == [1, 4, 16, 64, 256, 1024, 4096]


def test_the_command_prints_capacity_and_bounds(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    arguments = ["--config=llama3.py:llama3_8b", "--devices=h100:8", "--serve", "--context=2k"]
    assert main([*arguments, f"--json={tmp_path / 'plan.json'}"]) == 0
    text = capsys.readouterr().out
    assert "2,000 tokens" in text and "426,932" in text and "bounds of a step" in text
    assert '"tokens": 426932' in (tmp_path / "plan.json").read_text()
