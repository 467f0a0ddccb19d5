"""Plans of text generation: weights and cache are those of the arrays; the speed follows from what a step reads."""

from math import prod

import jax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from megajax.command_line.parser import parse
from megajax.config import load
from megajax.config.config_files import Source
from megajax.config.errors import UserError
from megajax.inference.loaded_model import CacheSize, LoadedModel
from megajax.layers.param import specs
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.plan import main
from megajax.planning.compiled.devices import GIB, GPUS
from megajax.planning.cost.description import describe
from megajax.planning.cost.serving import CACHE_SHARE, Serving, by_preference, servings
from megajax.server.config import ServingConfig

SIZE = CacheSize(blocks=2, block=16, slots=3)


def plans(config: str, devices: int = 8, context: int = 8192) -> list[Serving]:
    return servings(describe(load(config), GPUS["h100"], devices), devices, context)


def plan(config: str, tensor: int = 1, weights: str = "", cache: str = "", expert: int = 1, **rest) -> Serving:
    """weights and cache: dtypes, or "" for the compute dtype."""
    every = plans(config, **rest)
    wanted = tensor, expert, weights or every[0].run.dtype, cache or every[0].run.dtype
    return next(serving for serving in every if (serving.tensor, serving.expert, *serving.dtypes) == wanted)


def on_a_device(like: jax.ShapeDtypeStruct) -> int:
    return prod(like.sharding.shard_shape(like.shape)) * like.dtype.itemsize


MODELS = [
    ("llama3.py:debug", 1, 1, ""),
    ("llama3.py:debug", 2, 1, "int8"),
    ("gpt3.py:debug", 2, 1, ""),
    ("deepseek.py:deepseek_v2_lite_debug", 2, 1, "int8"),
    ("deepseek.py:deepseek_v3_debug", 2, 4, "int8"),
    ("llama3.py:debug", 4, 1, ""),
    ("mixtral.py:mixtral_8x7b_debug", 2, 1, ""),
    ("mixtral.py:mixtral_8x7b_debug", 1, 4, ""),
    ("nemotron_h.py:nemotron_h_8b_debug", 1, 1, ""),
]


@pytest.mark.parametrize(("config", "tensor", "expert", "cache"), MODELS)
def test_weights_and_cache_are_those_of_the_arrays_on_a_device(
    config: str, tensor: int, expert: int, cache: str
) -> None:
    devices = tensor * expert
    serving = plan(config, tensor, cache=cache, expert=expert, devices=devices)
    model = load(config).model
    mesh = build_mesh(serving.run.parallel, jax.devices()[:devices])
    layout = Layout(Plan.of(serving.run.parallel))

    def like(shape: tuple[int, ...], axes: tuple) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, layout.plan.compute.spec(axes))
        return jax.ShapeDtypeStruct(shape, serving.run.dtype, sharding=sharding)

    weights = specs(nnx.eval_shape(lambda: model.build(layout))).values()
    assert serving.weight_bytes == sum(on_a_device(like(weight.shape, weight.axes)) for weight in weights)
    loaded = LoadedModel(model, nnx.Module(), {}, mesh, layout)
    arrays = loaded.like_cache(model.cache_leaves(tensor), SIZE, serving.cache).values()
    assert serving.token_bytes * SIZE.tokens() + serving.row_bytes * SIZE.slots == sum(map(on_a_device, arrays))


def test_layouts_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek-V3 needs its experts sharded further than over the devices of a node."""
    fitting = {(one.tensor, one.expert, *one.dtypes) for one in plans("deepseek.py:deepseek_v3", 32) if one.rows}
    assert (8, 4, "bfloat16", "bfloat16") in fitting and (8, 1, "bfloat16", "int8") not in fitting
    assert all(tensor * expert >= 32 for tensor, expert, weights, _ in fitting if weights == "bfloat16")
    sixteen = [one for one in plans("deepseek.py:deepseek_v3", 16) if one.rows]
    assert {one.weights for one in sixteen} == {"int8", "int4"}
    assert by_preference(sixteen)[0].dtypes == ("int8", "int8")
    wide = plan("deepseek.py:deepseek_v3", 1, expert=64, devices=64)
    left = wide.run.usable_gib * GIB - wide.weight_bytes
    # Each token may choose 4 experts of a device.
    assert wide.buffer_bytes > 64 * 544 * 4 * (7168 + 4096) * 2 > 0.1 * left
    assert wide.room + wide.buffer_bytes <= left and wide.memory_share < CACHE_SHARE
    message = r"no layout on 4 x h100 has room .*\n.*of which 72\.9 GiB are usable\nUse 8 dev"
    with pytest.raises(UserError, match=message):
        main(["--config=deepseek.py:deepseek_v3", "--devices=h100:4", "--serve"])
    assert main(["--config=deepseek.py:deepseek_v3", "--devices=h100:16", "--serve"]) == 0
    assert "fit  12 of 56 layouts and dtypes" in capsys.readouterr().out


def test_devices_of_experts_read_what_all_replicas_choose() -> None:
    """Each device has 2 of 8 experts: 4 rows of 4 replicas choose nearly all of them."""
    one, four = (plan("mixtral.py:mixtral_8x7b", 1, expert=expert) for expert in (1, 4))
    experts = 32 * 8 * 3 * 4096 * 14336 * 2
    assert one.weight_bytes - four.weight_bytes == experts * 3 / 4
    cache = 4 * 8192 * one.token_bytes
    others = four.step_bytes(4) - cache - (1 - 0.75**16) * experts / 4
    assert others == pytest.approx(one.step_bytes(4) - cache - (1 - 0.75**4) * experts)


def test_tokens_fill_the_memory_that_weights_leave() -> None:
    serving = plan("llama3.py:llama3_8b")
    assert serving.weight_bytes == 2 * 8_030_261_248 and serving.token_bytes == 32 * 2 * 8 * 128 * 2
    assert serving.tokens == int(CACHE_SHARE * (80 * 0.99 * 0.92 * GIB - serving.weight_bytes) / serving.token_bytes)
    assert serving.rows == serving.tokens // 8192
    assert plan("llama3.py:llama3_70b").rows == 0, "weights alone are larger than the device"
    assert plan("llama3.py:llama3_70b", weights="int8", cache="int8").rows > 0
    assert plan("mamba2.py:mamba2_130m").tokens is None and plan("mamba2.py:mamba2_130m").rows > 1000


def test_a_step_reads_weights_once_and_the_cache_of_each_row() -> None:
    """Llama-3 8B: all weights but the embedding, at 3.35 TB/s, on eight replicas."""
    serving, table, vectors = plan("llama3.py:llama3_8b"), 128_256 * 4096, 65 * 4096
    step_bytes = 2 * (8_030_261_248 - table - vectors) + serving.rows * 8192 * serving.token_bytes
    assert serving.step_bytes(serving.rows) == pytest.approx(step_bytes)
    assert serving.tokens_per_second == pytest.approx(8 * serving.rows * 3.35e12 / step_bytes)
    assert plan("llama3.py:llama3_8b", 8).step_bytes(16) == pytest.approx(serving.step_bytes(16) / 8)


def test_the_command_prints_capacity_and_speed(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    arguments = ["--config=llama3.py:llama3_8b", "--devices=h100:8", "--serve", "--context=2k"]
    assert main([*arguments, f"--json={tmp_path / 'plan.json'}"]) == 0
    text = capsys.readouterr().out
    assert "2,000 tokens" in text and "426,932" in text
    assert '"tokens": 426932' in (tmp_path / "plan.json").read_text()
    assert "settings of serve  --parallel.tensor=8 --inference.compute=bfloat16 --inference.length=2000\n" in text


def test_flags_of_a_layout_are_settings_of_serve() -> None:
    layout = plan("mixtral.py:debug", 2, weights="int8", cache="int8", expert=2, context=32)
    base = Source("a run", ServingConfig(model=load("mixtral.py:debug").model))
    options = {"verb": "serve", "flags": (), "description": "", "root": ServingConfig}
    config = parse(layout.flags, **options, base=lambda flags: base).config
    assert (config.parallel.tensor, config.parallel.expert) == (2, 2)
    assert (config.inference.compute, config.inference.cache_dtype) == (layout.run.dtype, "int8")
    assert config.model.quantization.weights == "int8" and config.length() == layout.context
