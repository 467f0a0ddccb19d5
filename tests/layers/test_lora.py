"""Low-rank adapters: what they add to every kind of matrix, and that nothing else of a model changes."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_runs import QUICK
from user_errors import user_error

from megajax.config.compose import problems_of
from megajax.interop.weights.adapters import leading, merge
from megajax.kernels.grouped.capability import GroupedSizes, capable_grouped
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.context import Context
from megajax.layers.delta.config import GatedDeltaNetConfig
from megajax.layers.lora.add_adapters import drop_inputs
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.low_rank import LORA_A, LORA_B, MAGNITUDE, Decomposed
from megajax.layers.mamba.config import Mamba1Config, Mamba2Config
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, SharedExpertConfig
from megajax.layers.param import (
    Adapter,
    LayerSettings,
    Matrix,
    Observation,
    Uniform,
    bind,
    initial_values,
    matrix,
    specs,
)
from megajax.layers.position.config import RopeConfig
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.decoder.config import DecoderConfig

LAYOUT = Layout(Plan.of(ParallelConfig(data=1)))
LORA = LoRAConfig(rank=3, alpha=6.0)
DORA = replace(LORA, targets=("*.mixer.*", "*.mlp.up", "*.mlp.down", "*.mlp.gate"), decomposed=True)
PEFT = json.loads(Path(__file__).with_name("peft_adapters.json").read_text())
MLP = GatedMLPConfig(ffn=24)
EXPERTS = MoEConfig(experts=4, top_k=2, expert=MLP, shared=SharedExpertConfig(mlp=MLP))
MIXERS = (
    AttentionConfig(heads=4, kv_heads=2, rope=RopeConfig(), gate=True, bias=True),
    LatentAttentionConfig(heads=2, query_rank=6, key_value_rank=5, content_dim=6, position_dim=4, value_dim=7),
    Mamba2Config(heads=4, head_dim=6, state=5, chunk=4),
    Mamba1Config(inner=20, rank=3, state=4, chunk=4),
    GatedDeltaNetConfig(heads=4, key_heads=2, head_dim=6, key_dim=5),
)


def model(lora: LoRAConfig | None = LORA) -> DecoderConfig:
    """One layer of each kind of mixer, one of experts among their MLPs."""
    mlps = (EXPERTS, MLP, None, None, None)
    blocks = [BlockConfig(mixer=mixer, mlp=mlp) for mixer, mlp in zip(MIXERS, mlps, strict=True)]
    return DecoderConfig(
        hidden=16,
        vocabulary_size=61,
        vocabulary_multiple=1,
        sequence_length=12,
        stack=StackConfig(pattern=tuple(blocks), repeats=1),
        init_std=0.2,
        lora=lora,
    )


@cache
def abstract(lora: LoRAConfig | None) -> Any:
    return nnx.eval_shape(lambda: model(lora).build(LAYOUT))


@cache
def forward(lora: LoRAConfig | None) -> Any:
    """(weights by path) -> logits, compiled."""
    module = abstract(lora)
    like = {path: jax.ShapeDtypeStruct(spec.shape, "float32") for path, spec in specs(module).items()}
    zeros = {path: np.zeros(spec.shape, np.float32) for path, spec in specs(module, Observation).items()}
    tokens = np.random.default_rng(0).integers(0, 61, (2, 12))
    with jax.default_matmul_precision("highest"):
        lowered = jax.jit(lambda values: bind(module, {**values, **zeros})(tokens)).lower(like)
    return lowered.compile(compiler_options=dict(QUICK))


def weights(lora: LoRAConfig = LORA, *, fresh: bool = False) -> dict[str, np.ndarray]:
    """Random weights of the model with adapters. fresh: B and magnitudes are zero, as at the start."""
    rng = np.random.default_rng(1)
    values = {path: rng.normal(0, 0.2, spec.shape).astype(np.float32) for path, spec in specs(abstract(lora)).items()}
    return {path: w * np.float32(not (fresh and path.endswith((LORA_B, MAGNITUDE)))) for path, w in values.items()}


def merged(params: dict[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    """The weights without adapters, plus the products of the adapters."""
    declared = specs(abstract(None))

    def adapter(path: str) -> tuple[Any, ...]:
        return (
            params[path + LORA_A],
            params[path + LORA_B],
            scale,
            leading(declared[path]),
            params.get(path + MAGNITUDE),
        )

    return {
        path: merge(params[path], *adapter(path)) if path + LORA_A in params else params[path]
        for path in specs(abstract(None))
    }


@pytest.mark.parametrize("lora", [LORA, pytest.param(DORA, marks=pytest.mark.slow)], ids=["lora", "dora"])
def test_adapters_of_every_kind_of_matrix_equal_merged_weights(lora: LoRAConfig) -> None:
    params = weights(lora)
    adapted, plain = forward(lora)(params), forward(None)(merged(params, lora.scale()))
    np.testing.assert_allclose(adapted, plain, rtol=0, atol=1e-5 * np.abs(plain).max())
    base = forward(None)(merged(params, 0.0))
    assert np.abs(base - plain).max() > 0.1 * np.abs(plain).max()


@pytest.mark.parametrize("lora", [LORA, pytest.param(DORA, marks=pytest.mark.slow)], ids=["lora", "dora"])
def test_fresh_adapters_leave_logits_bit_equal(lora: LoRAConfig) -> None:
    params = weights(lora, fresh=True)
    plain = {path: params[path] for path in specs(abstract(None))}
    np.testing.assert_array_equal(forward(lora)(params), forward(None)(plain))


@pytest.mark.parametrize("stored", PEFT, ids=lambda stored: f"dora={stored['dora']} rslora={stored['rslora']}")
def test_outputs_and_gradients_equal_those_of_peft(stored: dict[str, Any]) -> None:
    """make_peft_adapters.py wrote the arrays, with the paper's gradient, which leaves out that of the norm."""
    rank = len(stored["a"])
    cfg = LoRAConfig(rank=rank, alpha=stored["alpha"], rank_stabilized=stored["rslora"], decomposed=stored["dora"])
    arrays = {name: np.array(values, np.float32) for name, values in stored.items() if isinstance(values, list)}
    layer = matrix(LayerSettings(layout=LAYOUT, hidden=4, std=1.0, output_std=1.0), arrays["w"].T.shape, (None, None))
    layer.adapt(rank, cfg.scale(), 0.0, decomposed=cfg.decomposed)
    module, norms = nnx.Module(), np.linalg.norm(arrays["w"], axis=1)
    module.layer = layer
    leaves = {"lora_a": arrays["a"].T, "lora_b": arrays["b"].T}
    if cfg.decomposed:
        leaves["lora_magnitude"] = arrays["magnitude"] - norms

    def outputs(x: Any, leaves: dict[str, Any]) -> Any:
        bound = bind(module, {"layer": arrays["w"].T, **{f"layer.{name}": leaf for name, leaf in leaves.items()}})
        return LAYOUT.dot("bsd,df->bsf", x, bound.layer, "batch", "seq", "mlp")

    y, gradient = jax.vjp(outputs, arrays["x"][None], leaves)
    np.testing.assert_allclose(y[0], arrays["y"], rtol=1e-5, atol=1e-5)
    dx, actual = gradient(arrays["dy"][None])
    np.testing.assert_allclose(dx[0], arrays["dx"], rtol=1e-5, atol=1e-5)
    for name, gradient_of_leaf in actual.items():
        expected = arrays[name.replace("lora_", "d")]
        np.testing.assert_allclose(gradient_of_leaf.T, expected, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_outputs_of_zeros_have_finite_gradients() -> None:
    """Rows of padding in stacks are such outputs, whose norm is zero."""
    term = Decomposed(2.0, (None,))
    a, b, change = jnp.ones((3, 2)), jnp.zeros((2, 4)), jnp.zeros(4)
    factor, gradient = jax.value_and_grad(lambda change: term.factor(jnp.zeros((3, 4)), a, b, change).sum())(change)
    assert factor == 4 and np.isfinite(gradient).all()


def test_an_equation_that_sums_over_other_dimensions_is_refused() -> None:
    settings = LayerSettings(layout=LAYOUT, hidden=6, std=1.0, output_std=1.0)
    layer = matrix(settings, (2, 3, 10), (None, None, None))
    layer.adapt(2, 1.0, 0.0)
    with pytest.raises(ValueError, match="does not sum over the first 1 dimensions"):
        LAYOUT.dot("bsnh,nhd->bsd", jnp.zeros((1, 1, 2, 3)), layer, "batch", "seq", None)


def test_initial_values_and_layout_are_those_of_peft_and_of_the_matrix() -> None:
    declared = specs(abstract(LORA))
    a, b = (declared[f"stack.blocks.0.mixer.output{end}"] for end in (LORA_A, LORA_B))
    assert (a.shape, a.axes) == ((1, 4, 4, 3), ("layer", "heads", "head_dim", "rank"))
    assert (b.shape, b.axes) == ((1, 3, 16), ("layer", "rank", "embed"))
    assert a.init == Uniform(-0.25, 0.25) and a.init_path == "layer.mixer.output.lora_a"
    values = initial_values({"a": a, "b": b}, 0)
    assert np.abs(values["a"]).max() < 0.25 and values["a"].std() == pytest.approx(0.5 / 12**0.5, rel=0.2)
    assert not values["b"].any()
    up = declared[f"stack.blocks.0.mlp.experts.up{LORA_A}"]
    assert (up.shape, up.axes) == ((1, 4, 16, 3), ("layer", "expert", "embed", "rank"))
    assert set(specs(abstract(LORA), Adapter)) == {path for path in declared if ".lora_" in path}


def test_targets_choose_matrices() -> None:
    targeted = specs(abstract(replace(LORA, targets=("*.mixer.query", "*.experts.down"))), Adapter)
    matrices = {path.rpartition(".lora_")[0].partition("blocks.")[2] for path in targeted}
    assert matrices == {"0.mixer.query", "1.mixer.query", "0.mlp.experts.down"}


def test_invalid_targets_are_refused() -> None:
    with user_error("model.lora.targets"):
        abstract(replace(LORA, targets=("*.quary",)))
    with user_error("model.lora.dropout"):
        abstract(replace(LORA, dropout=0.1))
    with user_error("model.lora.decomposed"):
        abstract(replace(LORA, decomposed=True))
    with user_error("model.lora.rank"):
        abstract(replace(LORA, rank=500))
    problems = problems_of(LoRAConfig(rank=0, alpha=-1.0, targets=(), dropout=1.0))
    assert [problem.setting for problem in problems] == ["rank", "alpha", "targets", "dropout"]
    assert replace(LORA, rank=4, alpha=8.0, rank_stabilized=True).scale() == 4


def test_dropout_zeroes_the_input_of_each_adapter_by_the_keys_of_rows() -> None:
    settings = LayerSettings(layout=LAYOUT, hidden=64, std=1.0, output_std=1.0)
    block = GatedMLPConfig(ffn=64).build(settings)
    for adapted in (block.gate, block.up):
        adapted.adapt(64, 1.0, 0.25)
    x, eye = jnp.ones((2, 8, 64)), jnp.eye(64)

    def dropped(adapted: Matrix, keys: np.ndarray | None) -> np.ndarray:
        index = jnp.arange(8)
        drop_inputs(block, Context(jnp.broadcast_to(index, (2, 8)), index, row_keys=keys))
        return np.asarray(adapted.low_rank(LAYOUT, "bsd,df->bsf", x, eye, eye, "batch", "seq", "mlp"))

    np.testing.assert_array_equal(dropped(block.up, None), x)
    keys = np.array([[1, 2], [3, 4]], np.uint32)
    up, gate = dropped(block.up, keys), dropped(block.gate, keys)
    assert set(np.unique(up)) == {0, np.float32(1 / 0.75)} and (up == 0).mean() == pytest.approx(0.25, abs=0.05)
    assert (up != gate).any() and (up[0] != up[1]).any()
    np.testing.assert_array_equal(up, dropped(block.up, keys))


@pytest.mark.parametrize(("rank", "kernel"), [(64, "mosaic"), (16, "reference")])
def test_adapters_of_experts_use_the_next_kernel_that_supports_their_rank(rank: int, kernel: str) -> None:
    assert capable_grouped("mosaic", "bfloat16", GroupedSizes(4096, 8, 512, rank)) == kernel
    assert capable_grouped("auto", "bfloat16", GroupedSizes(4096, 8, 512, rank)) == "auto"
