"""Adapters beside quantized matrices have the gradients of adapters beside the dequantized ones, on any layout."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import ONE, QUICK, assert_close, build_program, llama, place, rows, start, within

from megajax.interop.weights.quantize_on_load import quantized_matrices
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.quantization.config import QuantizationConfig
from megajax.layers.quantized import Quantized
from megajax.mesh.config import ParallelConfig
from megajax.training.program import Program

LORA = LoRAConfig(rank=4, alpha=8.0)
DORA = replace(LORA, decomposed=True)
SHARDED = ParallelConfig(data=2, tensor=2, data_sharding="fsdp", sequence=True)
NF4 = QuantizationConfig(weights="nf4", group=4, double=True)
TILES = QuantizationConfig(weights="fp8_blocks")


def program_of(parallel: ParallelConfig, quantization: QuantizationConfig | None, lora: LoRAConfig) -> Program:
    model = replace(llama(), lora=lora)
    plain = build_program(model, parallel, microbatches=4)
    return Program.of(plain.cfg.but(model=replace(model, quantization=quantization)), plain.mesh)


@cache
def stored(
    quantization: QuantizationConfig, lora: LoRAConfig
) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
    """Weights with quantized matrices, and the same weights with dequantized ones."""
    state = start(program_of(ONE, None, lora))
    plain = {path: np.asarray(w) for path, w in state.params.items()}
    quantized = dict(plain)
    for path, matrix in quantized_matrices(replace(llama(), lora=lora, quantization=quantization)).items():
        leaves = jax.jit(Quantized.quantized, static_argnums=0)(matrix, plain[path])
        quantized |= {path + suffix: np.asarray(leaf) for suffix, leaf in leaves.items()}
        plain[path] = np.asarray(jax.jit(Quantized.whole, static_argnums=0)(matrix, leaves))
    return quantized, plain


def gradients(program: Program, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of the adapters, and the loss."""
    state: Any = program.state_like()
    placed = {path: jax.device_put(weights[path], like.sharding) for path, like in state.params.items()}
    with within(program):
        step = jax.jit(program.grad_fn())
        batch = place(program, rows())
        result = step.lower(placed, batch, np.float32(1)).compile(compiler_options=dict(QUICK))(
            placed, batch, np.float32(1)
        )
    return {path: np.asarray(g) for path, g in result.grads.items()} | {"loss": np.asarray(result.loss_sum)}


@pytest.mark.parametrize(
    ("parallel", "quantization", "lora"),
    [
        (ONE, NF4, LORA),
        pytest.param(SHARDED, NF4, DORA, marks=pytest.mark.slow),
        pytest.param(SHARDED, TILES, LORA, marks=pytest.mark.slow),
    ],
    ids=["nf4", "nf4, dora, fsdp and tensor", "fp8_blocks, fsdp and tensor"],
)
def test_gradients_equal_those_beside_dequantized_matrices(
    parallel: ParallelConfig, quantization: QuantizationConfig, lora: LoRAConfig
) -> None:
    quantized, plain = stored(quantization, lora)
    expected = gradients(program_of(ONE, None, lora), plain)
    actual = gradients(program_of(parallel, quantization, lora), quantized)
    assert_close(actual, expected)
