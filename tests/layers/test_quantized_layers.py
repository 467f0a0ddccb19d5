"""Quantized matrices in models: every layer with a matrix, on one device and on two."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from test_lora import model
from tiny_runs import ONE, QUICK, wide
from user_errors import user_error

from megajax.layers.param import Observation, bind, matrices_of, specs
from megajax.layers.quantization.config import QuantizationConfig
from megajax.layers.quantized import Quantized
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.models.decoder.config import DecoderConfig

ODD = ("stack.blocks.1.mixer.*", "stack.blocks.3.mixer.up_dt")
"""Matrices of these with an odd number of inputs do not fit int4."""
HOW = {
    "int8": QuantizationConfig(weights="int8", balanced=True),
    "fp8": QuantizationConfig(weights="fp8"),
    "fp8_blocks": QuantizationConfig(weights="fp8_blocks"),
    "int4": QuantizationConfig(weights="int4", group=2, exclude=ODD),
    "nf4": QuantizationConfig(weights="nf4", group=2, double=True, exclude=ODD),
}
EVERY_LAYER = model(None)


@cache
def abstract(cfg: DecoderConfig, parallel: ParallelConfig = ONE) -> Any:
    return nnx.eval_shape(lambda: cfg.build(Layout(Plan.of(parallel))))


def random_values(cfg: DecoderConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {path: rng.normal(0, 0.2, spec.shape).astype(np.float32) for path, spec in specs(abstract(cfg)).items()}


def quantized(
    cfg: DecoderConfig, how: QuantizationConfig, params: dict[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of the quantized model, and the float weights that they represent."""
    stored, dequantized = dict(params), dict(params)
    for path, matrix in matrices_of(abstract(replace(cfg, quantization=how))).items():
        if isinstance(matrix.quantized, Quantized):
            shape = params[path].shape[: params[path].ndim - matrix.quantized.form.outputs]
            factor = np.random.default_rng(2).uniform(0.5, 2, shape).astype(np.float32)
            factor, amax = factor if matrix.quantized.balanced else None, jnp.full(shape[:1], 4.0)
            leaves = matrix.quantized.quantized(params[path], factor, amax if matrix.quantized.static else None)
            stored |= {path + end: leaf for end, leaf in leaves.items()}
            dequantized[path] = matrix.quantized.whole(leaves)
    return stored, dequantized


@cache
def forward(cfg: DecoderConfig, parallel: ParallelConfig) -> Any:
    """(weights by path) -> logits of two rows of tokens, compiled."""
    tokens = np.random.default_rng(0).integers(0, 61, (2, 12)).astype(np.int32)
    mesh, module = build_mesh(parallel, jax.devices()[: parallel.tensor]), abstract(cfg, parallel)
    rules, declared = Plan.of(parallel).compute, specs(module)
    like = {
        path: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=NamedSharding(mesh, rules.spec(spec.axes)))
        for path, spec in declared.items()
    }
    zeros = {path: np.zeros(spec.shape, np.float32) for path, spec in specs(module, Observation).items()}
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        run = jax.jit(lambda values: bind(module, {**values, **zeros})(tokens)).lower(like)
        compiled = run.compile(compiler_options=dict(QUICK))
    return lambda values: np.asarray(
        compiled({path: jax.device_put(x, like[path].sharding) for path, x in values.items()})
    )


def logits(cfg: DecoderConfig, values: dict[str, Any], parallel: ParallelConfig = ONE) -> np.ndarray:
    return forward(cfg, parallel)(values)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "fp8_blocks", "nf4"])
def test_every_kind_of_matrix_multiplies_like_its_dequantized_one(name: str) -> None:
    params, cfg = random_values(EVERY_LAYER), replace(EVERY_LAYER, quantization=HOW[name])
    stored, dequantized = quantized(EVERY_LAYER, HOW[name], params)
    declared = specs(abstract(cfg))
    assert {path: (spec.shape, spec.dtype) for path, spec in declared.items()} == {
        path: (value.shape, value.dtype.name) for path, value in stored.items()
    }
    expected, plain = logits(EVERY_LAYER, dequantized), logits(EVERY_LAYER, params)
    largest = np.abs(expected).max()
    np.testing.assert_allclose(logits(cfg, stored), expected, rtol=0, atol=1e-5 * largest)
    assert np.abs(expected - plain).max() > 1e-3 * largest
    # Everything except tables, norms, routers, biases and the parameters of a recurrence.
    float_weights = {path for path in params if declared[path].dtype == "float32"} - {"tokens", "head", "norm.gain"}
    unquantized = ("norm", "bias", "router", "a_log", "skip", "filter", "gain", "conv", "dt", "4.mixer.in_a")
    unquantized += ("4.mixer.in_b",)
    unexpected = [path for path in float_weights if not any(word in path for word in unquantized)]
    assert "4" in name or not unexpected


@pytest.mark.parametrize(
    "how",
    [
        QuantizationConfig(weights="int4", group=16),
        pytest.param(QuantizationConfig(weights="fp8_blocks"), marks=pytest.mark.slow),
        pytest.param(QuantizationConfig(weights="fp8", activations="fp8", static=True), marks=pytest.mark.slow),
    ],
)
def test_two_devices_of_tensor_give_the_logits_of_one(how: QuantizationConfig) -> None:
    plain = wide()
    cfg, params = replace(plain, quantization=how), random_values(plain)
    stored, _ = quantized(plain, how, params)
    expected = logits(cfg, stored)
    two = logits(cfg, stored, ParallelConfig(data=1, tensor=2, data_sharding="replicate"))
    np.testing.assert_allclose(two, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_weights_that_do_not_fit_are_refused() -> None:
    def build(**settings: Any) -> Any:
        return abstract(replace(EVERY_LAYER, quantization=QuantizationConfig(**settings)))

    with user_error() as raised:
        build(weights="int4", group=2)
    assert "stack.blocks.1.mixer.output: 7 inputs are odd" in str(raised.value)
    assert "leave them out with model.quantization.exclude" in str(raised.value)
    with user_error():
        build(weights="int4", group=16, exclude=ODD)
    with user_error("model.quantization.exclude"):
        build(exclude=("stack.blocks.0.mixer.querry",))
    with user_error("model.quantization"):
        build(exclude=("*",))
    matrices = matrices_of(build(exclude=("*.mixer.*",)))
    plain = {path for path, matrix in matrices.items() if matrix.quantized is None}
    assert plain == {path for path in matrices if ".mixer." in path}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"weights": "int4", "group": 7}, "group"),
        ({"weights": "int4", "group": 0}, "group"),
        ({"weights": "int8", "activations": "fp8"}, "activations"),
        ({"weights": "fp8", "double": True}, "double"),
        ({"weights": "fp8", "static": True}, "static"),
    ],
)
def test_settings_that_exclude_each_other(settings: dict[str, Any], name: str) -> None:
    assert [problem.setting for problem in QuantizationConfig(**settings).problems()] == [name]
