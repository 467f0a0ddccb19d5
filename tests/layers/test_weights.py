"""Declarations of weights, and values that depend only on seed, path and layer."""

from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.param import ONES, ZEROS, LayerSettings, Normal, ParamSpec, bind, initial_values, param, specs
from megajax.layers.position.config import RopeConfig
from megajax.layers.recompute import Recomputing
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.training.state import parameter_shardings

HIDDEN = 16
PLAIN = BlockConfig(
    mixer=AttentionConfig(heads=4, bias=True), mlp=DenseMLPConfig(ffn=32), norm=LayerNormConfig(), dropout=0.2
)
LLAMA = BlockConfig(mixer=AttentionConfig(heads=4, kv_heads=2, rope=RopeConfig()), mlp=GatedMLPConfig(ffn=24))


def settings(parallel: ParallelConfig | None = None) -> LayerSettings:
    return LayerSettings(layout=Layout(Plan.of(parallel or ParallelConfig())), hidden=HIDDEN, std=0.5, output_std=0.1)


def abstract(*pattern: BlockConfig, repeats: int) -> nnx.Module:
    cfg = StackConfig(pattern=pattern, repeats=repeats)
    return nnx.eval_shape(lambda: cfg.build(settings(), recomputing=Recomputing(recompute="none")))


PARTS = ("mixer.key", "mixer.output", "mlp.gate", "mlp.up", "mlp_norm.gain")
"""The weights whose values are checked: each costs compile time."""


def some(*pattern: BlockConfig, repeats: int) -> dict[str, ParamSpec]:
    return {path: spec for path, spec in specs(abstract(*pattern, repeats=repeats)).items() if path.endswith(PARTS)}


@cache
def values(*pattern: BlockConfig, repeats: int) -> dict[str, np.ndarray]:
    declared = some(*pattern, repeats=repeats)
    return jax.device_get(jax.jit(lambda: initial_values(declared, 0))())


def test_specs_of_a_block_with_everything():
    actual = specs(abstract(PLAIN, LLAMA, repeats=3))
    inner, outer = Normal(0.5), Normal(0.1)
    spec = actual["blocks.0.mixer.query"]
    expected = ParamSpec(
        path="blocks.0.mixer.query",
        shape=(3, HIDDEN, 4, 4),
        axes=("layer", "embed", "heads", "head_dim"),
        init=inner,
        role="weight",
        init_path="layer.mixer.query",
        layers=(0, 2, 4),
    )
    assert spec == expected
    assert actual["blocks.1.mixer.key"].axes == ("layer", "embed", "kv_heads", "head_dim")
    assert actual["blocks.1.mixer.key"].shape == (3, HIDDEN, 2, 4)
    assert actual["blocks.1.mixer.key"].layers == (1, 3, 5)
    assert actual["blocks.1.mixer.key"].init_path == "layer.mixer.key"
    writing = {path for path, spec in actual.items() if spec.init == outer}
    assert writing == {f"blocks.{place}.{part}" for place in (0, 1) for part in ("mixer.output", "mlp.down")}
    for path, spec in actual.items():
        last = path.rsplit(".", 1)[1]
        role = "bias" if last.endswith("bias") else "gain" if last == "gain" else "weight"
        assert spec.role == role, path
        assert spec.init == {"bias": ZEROS, "gain": ONES}.get(role, spec.init), path
    assert sum(spec.role == "bias" for spec in actual.values()) == 4 + 2 + 2


def test_values_have_their_spread_and_all_differ():
    actual = values(LLAMA, repeats=4)
    for path, array in actual.items():
        if path.endswith("gain"):
            assert (array == 1).all()
            continue
        std = 0.1 if path.endswith("output") else 0.5
        assert array.dtype == np.float32
        # 512 draws or more: 15% are almost five standard deviations of their spread.
        assert abs(array.std() / std - 1) < 0.15, path
        # Float32 Gaussians come from 23 random bits: a few coincide.
        assert len(np.unique(array)) > 0.99 * array.size, path
    assert not np.array_equal(actual["blocks.0.mlp.gate"], actual["blocks.0.mlp.up"])
    up = {path: spec for path, spec in some(LLAMA, repeats=4).items() if path.endswith("up")}
    assert np.isin(np.asarray(initial_values(up, 1)["blocks.0.mlp.up"]), actual["blocks.0.mlp.up"]).mean() < 0.01


def test_values_do_not_depend_on_the_grouping_of_layers():
    single, paired = values(LLAMA, repeats=4), values(LLAMA, LLAMA, repeats=2)
    assert len(paired) == 2 * len(single) == 2 * len(PARTS)
    for path, array in paired.items():
        _, place, rest = path.split(".", 2)
        np.testing.assert_array_equal(array, single[f"blocks.0.{rest}"][int(place) :: 2], err_msg=path)


def test_values_are_the_same_on_every_layout():
    parallel = ParallelConfig(data=2, tensor=2)
    declared = some(LLAMA, repeats=4)
    mesh = build_mesh(parallel)
    shardings = parameter_shardings(declared, Plan.of(parallel).params, mesh)
    with jax.set_mesh(mesh):
        actual = jax.jit(lambda: initial_values(declared, 0), out_shardings=shardings)()
    assert actual["blocks.0.mlp.up"].addressable_shards[0].data.shape == (4, HIDDEN // 2, 12)
    for path, array in values(LLAMA, repeats=4).items():
        # The random bits are equal; the compiler's vector and scalar code for the Gaussian differ in the last bit.
        np.testing.assert_allclose(array, actual[path], rtol=5e-7, err_msg=path)
        assert np.mean(array != np.asarray(actual[path])) < 0.1, path


def test_bound_values_are_those_of_the_module():
    stack = abstract(LLAMA, repeats=2)
    numbered = {path: np.full(spec.shape, n, np.float32) for n, (path, spec) in enumerate(specs(stack).items())}
    module = bind(stack, numbered)
    assert specs(module) == specs(stack)
    np.testing.assert_array_equal(module.blocks[0].mlp.up[...], numbered["blocks.0.mlp.up"])
    with pytest.raises(KeyError, match=r"blocks\.0"):
        bind(stack, {})


def test_a_weight_needs_a_logical_axis_for_each_dimension():
    with pytest.raises(ValueError, match="differ in length"):
        param((2, 3), ("embed",), init=ZEROS)
