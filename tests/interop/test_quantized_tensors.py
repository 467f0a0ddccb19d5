"""Quantized tensors read as bfloat16: equal to numbers of ml_dtypes times their scales, one by one."""

import ml_dtypes
import numpy as np
import pytest
from hugging_face_folders import Arrays
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.interop.huggingface.family import Settings
from megajax.interop.huggingface.quantized import BFLOAT16, dequantizer

DRAW = np.random.default_rng(0)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 3], "activation_scheme": "dynamic"}


def read(config: dict, **arrays: np.ndarray):
    return dequantizer(Settings({"quantization_config": config}))(Arrays(arrays))


def test_fp8_in_blocks_with_parts_of_blocks_at_the_ends() -> None:
    numbers = DRAW.normal(size=(10, 7)).astype(ml_dtypes.float8_e4m3fn)
    scales = DRAW.uniform(0.5, 2, (3, 3)).astype(np.float32)
    norm = np.ones(3, ml_dtypes.bfloat16)
    tensors = read(FP8, weight=numbers, weight_scale_inv=scales, norm=norm)
    assert {name: (entry.shape, entry.dtype) for name, entry in tensors.entries.items()} == {
        "weight": ((10, 7), BFLOAT16),
        "norm": ((3,), BFLOAT16),
    }
    factors = np.repeat(np.repeat(scales, 4, 0), 3, 1)[:10, :7]
    np.testing.assert_array_equal(tensors.read("weight"), (numbers.astype(np.float32) * factors).astype(BFLOAT16))
    assert tensors.read("norm") is norm


def test_mxfp4_of_experts() -> None:
    halves = DRAW.integers(0, 16, (2, 5, 3, 32), np.uint8)
    scales = DRAW.integers(118, 137, (2, 5, 3), np.uint8)
    blocks = halves[..., ::2] | halves[..., 1::2] << 4
    tensors = read({"quant_method": "mxfp4"}, **{"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales})
    assert {name: entry.shape for name, entry in tensors.entries.items()} == {"gate_up_proj": (2, 96, 5)}
    numbers = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    expected = numbers * scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None]
    actual = tensors.read("gate_up_proj")
    assert actual.dtype == BFLOAT16
    np.testing.assert_array_equal(actual.astype(np.float32), expected.reshape(2, 5, 96).swapaxes(1, 2))


def test_all_scales_that_do_not_fit_are_listed() -> None:
    numbers = np.zeros((8, 6), ml_dtypes.float8_e4m3fn)
    arrays = {"a": numbers, "a_scale_inv": np.ones((2, 3)), "b_scale_inv": np.ones((1, 1)), "c": numbers}
    with pytest.raises(UserError) as error:
        read(FP8, **arrays)
    assert "a_scale_inv: scales [2, 3], but [2, 2] by the blocks" in str(error.value)
    assert "b_scale_inv: b is missing" in str(error.value) and "c: it has no scales" in str(error.value)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8"},
        {**FP8, "fmt": "e5m2"},
        {**FP8, "weight_block_size": [128, 0]},
        {**FP8, "weight_block_size": ["128", 128]},
    ],
)
def test_other_formats_are_refused(config: dict) -> None:
    settings = Settings({"quantization_config": config})
    dequantizer(settings)
    with user_error("config.json"):
        settings.finish()
