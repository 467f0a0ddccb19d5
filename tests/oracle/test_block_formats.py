"""Codes, scales and products of numbers in blocks, against arrays by torchao and by DeepSeek's formulas."""

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from megatron_cases import FURTHER

from megajax.precision.block_recipes import RoundedRows, _by_reference
from megajax.precision.blocks import BlockFormat, quantize
from megajax.precision.matmul import terms

FOLDER = FURTHER / "quant"
FILES = [FOLDER / f"{name}.npz" for name in ("mx_nvfp4", "fp8_blockwise")]
if not all(path.is_file() for path in FILES):
    pytest.skip(f"no {FILES[0]}", allow_module_level=True)
CASES = {
    name: (path, meta)
    for path in FILES
    for name, meta in json.loads(path.with_suffix(".json").read_text()).items()
    if isinstance(meta, dict)
}


def format_of(meta: dict[str, Any]) -> BlockFormat:
    if "activation_tile" in meta:
        power = meta["power_of_two_scales"]
        return BlockFormat("e4m3", 128, "power_of_two" if power else "float32", "up", 1e-4 if power else 1e-12)
    if "two_level" in meta:
        return BlockFormat("e2m1", meta["block"], "nvfp4")
    mode = meta["scale_mode"].lower()
    return BlockFormat(meta["element"], meta["block"], "power_of_two", "up" if mode == "rceil" else mode)


@pytest.mark.parametrize("case", CASES)
def test_codes_scales_and_products(case: str) -> None:
    path, meta = CASES[case]
    form, operands, exact = format_of(meta), [], []
    with np.load(path) as arrays:
        expected = {key: arrays[key] for key in arrays}
    for name in ("a", "w"):
        tiles = name == "w" and "weight_tile" in meta
        blocks = jax.jit(partial(quantize, form=form, tiles=tiles))(jnp.asarray(expected[name]))
        codes, scales = np.asarray(blocks.codes), np.asarray(blocks.scales)
        of = {key.removeprefix(f"{case}/{name}_"): value for key, value in expected.items() if f"{case}/{name}_" in key}
        np.testing.assert_array_equal(codes.view(np.uint8), of["codes"])
        stored = next(of[key] for key in ("scales_e8m0", "scales_e4m3_codes", "scales") if key in of)
        np.testing.assert_array_equal(scales.view(np.uint8) if stored.dtype == np.uint8 else scales, stored)
        whole = np.float32(1) if blocks.whole is None else np.asarray(blocks.whole)
        spread = np.repeat(scales.astype(np.float32) * whole, form.size, -1)[:, : codes.shape[1]]
        spread = np.repeat(spread, form.size, 0)[: codes.shape[0]] if tiles else spread
        if "global_scale" in of:
            assert whole == of["global_scale"]
        if "dequantized" in of:
            np.testing.assert_array_equal(codes.astype(np.float32) * spread, of["dequantized"])
        # Rounded to float32 where the file has them.
        exact.append(of.get("dequantized", codes.astype(np.float64) * spread).astype(np.float64))
        operands.append(RoundedRows(blocks, form, tiles))
    product = expected[f"{case}/product"]
    np.testing.assert_allclose(exact[0] @ exact[1].T, product, rtol=1e-12, atol=1e-12 * np.abs(product).max())
    actual = _by_reference(terms("ak,wk->aw"), *operands, jnp.dtype(jnp.float32))
    actual = actual * np.prod([1 if rows.blocks.whole is None else rows.blocks.whole for rows in operands])
    np.testing.assert_allclose(actual, product, rtol=0, atol=1e-6 * np.abs(product).max())
