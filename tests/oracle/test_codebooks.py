"""NF4, doubly quantized scales and their tables, against arrays that bitsandbytes made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from megatron_cases import FURTHER

from megajax.precision.codebooks import NF4, DoubleScales, NormalFloat, dynamic_map
from megajax.precision.quantization import GroupedCodes, unpack

FILE = FURTHER / "quant" / "bnb_4bit_8bit.npz"
if not FILE.is_file():
    pytest.skip(f"no {FILE}", allow_module_level=True)
ARRAYS = np.load(FILE)
FORM = GroupedCodes(64, NormalFloat(), inputs=1, outputs=1)


def test_tables() -> None:
    np.testing.assert_array_equal(np.array(NF4, np.float32), ARRAYS["nf4_table"])
    np.testing.assert_allclose(dynamic_map(), ARRAYS["dynamic_map_signed"], rtol=1e-6, atol=0)


def test_codes_and_scales_of_rows_that_blocks_divide() -> None:
    values, scale = jax.jit(FORM.quantized)(jnp.asarray(ARRAYS["nf4_b64/x"].T))
    np.testing.assert_array_equal(np.asarray(unpack(values, 0) & 15).T, ARRAYS["nf4_b64/codes"])
    np.testing.assert_array_equal(np.asarray(scale)[0], ARRAYS["nf4_b64/absmax"])
    np.testing.assert_allclose(FORM.dequantized(values, scale).T, ARRAYS["nf4_b64/dequantized"], rtol=1e-6, atol=0)


def test_double_quantization_of_a_matrix_with_one_output() -> None:
    expected = {name: ARRAYS[f"nf4_b64_double/{name}"] for name in ("x", "codes", "dequantized", "absmax_codes")}
    values, scale = jax.jit(FORM.quantized)(jnp.asarray(expected["x"].reshape(-1, 1)))
    codes, largest, mean = DoubleScales().quantized(scale, (0,))
    np.testing.assert_array_equal(np.asarray(codes)[:, 0], expected["absmax_codes"])
    np.testing.assert_allclose(largest, ARRAYS["nf4_b64_double/absmax_absmax"], rtol=1e-6)
    np.testing.assert_allclose(mean, ARRAYS["nf4_b64_double/absmax_offset"], rtol=1e-6)
    dequantized = FORM.dequantized(values, DoubleScales().dequantized(codes, largest, mean, (0,)))
    np.testing.assert_array_equal(np.asarray(unpack(values, 0) & 15).ravel(), expected["codes"].ravel())
    np.testing.assert_allclose(dequantized, expected["dequantized"].reshape(-1, 1), rtol=1e-5, atol=1e-6)
