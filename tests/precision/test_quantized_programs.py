"""Products with quantized matrices in compiled GPU programs: for virtual H100s, with the extra aot."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from megajax.config.errors import UserError
from megajax.layers.quantization.config import QuantizationConfig
from megajax.layers.quantization.layers import demand_device
from megajax.layers.quantization.weights import Quantized, form_of
from megajax.mesh.xla import GPU, INFERENCE
from megajax.models.presets.llama import llama3
from megajax.planning.virtual_devices import prepare, read_cluster, virtual_devices

LAYERS, SIDE, MIB = 8, 4096, 2**20
LAYER = SIDE * SIDE * 2
"""Bytes of a layer's matrix in bfloat16."""


class OldGPU:
    platform, device_kind, compute_capability = "gpu", "NVIDIA A100", "8.0"


def test_GPUs_without_8_bit_matmuls_are_refused() -> None:
    device: Any = OldGPU()
    model: Any = llama3("8b")
    for quantization in (None, QuantizationConfig(weights="fp8")):
        demand_device(type("Model", (), {"quantization": quantization}), device)
    eight = QuantizationConfig(weights="fp8", activations="fp8")
    with pytest.raises(UserError, match=r"model.quantization.activations: NVIDIA A100 has compute capability 8.0"):
        demand_device(type("Model", (), {"quantization": eight}), device)
    demand_device(model, device)


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "activations"), [("int8", False), ("int4", False), ("fp8", False), ("fp8", True)])
def test_a_loop_over_layers_dequantizes_one_matrix_at_a_time(
    weights: str, activations: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip("needs the compiler for GPUs: the extra aot")
    for name in ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        monkeypatch.setenv(name, "")
    prepare()
    cluster, _ = read_cluster("h100:1")
    assert cluster is not None
    sharding = SingleDeviceSharding(virtual_devices(cluster)[0])
    quantized = Quantized(form_of(weights, 128, 1, 1), activations=activations)
    declared = quantized.declared((LAYERS, SIDE, SIDE), ("layer", "embed", "mlp"))
    leaves = {end: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for end, (shape, _, dtype) in declared.items()}
    x = jax.ShapeDtypeStruct((64, 1, SIDE), jnp.bfloat16, sharding=sharding)

    def layers(leaves: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, layer: (quantized.product("bsd,df->bsf", x, layer), None), x, leaves)[0]

    options = {option.name: option.value for option in (*GPU, *INFERENCE)} | {"xla_gpu_autotune_level": 0}
    compiled = jax.jit(layers).lower(leaves, x).compile(compiler_options=options)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.temp_size_in_bytes < LAYER + 16 * MIB
    assert memory.argument_size_in_bytes < LAYERS * LAYER * (0.27 if weights == "int4" else 0.51)
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == activations
