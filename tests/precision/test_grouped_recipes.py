"""Products of experts in each recipe: against a loop of products of each expert alone, and over devices."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_blocks import draw

from megajax.kernels.grouped.capability import GroupedKernel, GroupedSizes
from megajax.kernels.grouped.matmul import capable
from megajax.layers.context import Context
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig
from megajax.layers.param import LayerSettings, Observation, bind, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.precision.block_recipes import fp8_blocks, mxfp8, nvfp4
from megajax.precision.config import (
    Fp8BlocksConfig,
    Fp8DelayedConfig,
    Mxfp8Config,
    Nvfp4Config,
)
from megajax.precision.fp8 import AmaxHistory, PerTensor
from megajax.precision.matmul import Recipe, RoundedMatmul

DELAYED = Fp8DelayedConfig()
RECIPES: dict[str, Recipe] = {
    "fp8_delayed": PerTensor(DELAYED, AmaxHistory(DELAYED, 1.0)),
    "fp8_blocks": fp8_blocks(Fp8BlocksConfig()),
    "mxfp8": mxfp8(Mxfp8Config(format="hybrid")),
    "nvfp4": nvfp4(Nvfp4Config(stochastic=False)),
}
"""Stochastic rounding depends on the place of a number, so it is off."""
SIZES = 33, 0, 150
"""Of groups: none a multiple of a block, one empty, one longer than a block. Rows past them are NaN."""
ROWS, INNER, OUTER = 192, 96, 160


@cache
def case() -> tuple[np.ndarray, ...]:
    """x, w, the gradient of the result, and the expected amax of delayed scaling."""
    x, dy = draw((ROWS, INNER), 0, 3), draw((ROWS, OUTER), 2, 3)
    # Groups of different sizes of numbers, as experts have.
    factors = np.repeat(2.0 ** np.arange(len(SIZES)), SIZES)[:, None]
    x[: sum(SIZES)] *= factors
    x[sum(SIZES) :] = dy[sum(SIZES) :] = np.nan
    amax = np.float32([[2, 16, 3]]) * np.arange(1, len(SIZES) + 1, dtype=np.float32)[:, None]
    return x, draw((len(SIZES), INNER, OUTER), 1, 3), dy, amax


def gradients(multiply: Any, dy: Any, *inputs: Any) -> tuple[jax.Array, ...]:
    y, pull = jax.vjp(multiply, *inputs)
    return y, *pull(dy)


def grouped(matmul: RoundedMatmul, sizes: Any, x: Any, w: Any, amax: Any = None, rounded: Any = None) -> jax.Array:
    return matmul.grouped(
        x, w, sizes, partial(capable, "reference", GroupedSizes(ROWS, *w.shape)), amax, rounded=rounded
    )


def alone(matmul: RoundedMatmul, x: Any, w: Any, dy: Any, *amax: Any) -> list[tuple[jax.Array, ...]]:
    """The same of each expert alone, its rows padded with zeros to whole blocks; the results without the padding."""
    results, start, block = [], 0, matmul.recipe.row_block
    for expert, size in enumerate(SIZES):
        padding = ((0, -size % block if size else block), (0, 0))
        own, of_own = (jnp.pad(array[start : start + size], padding) for array in (x, dy))
        multiply = partial(matmul, "tk,kn->tn")
        y, dx, *others = gradients(multiply, of_own, own, w[expert], *(magnitudes[expert] for magnitudes in amax))
        results.append((y[:size], dx[:size], *others))
        start += size
    return results


@pytest.mark.parametrize(
    "name", ["fp8_delayed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8_blocks", "nvfp4"))]
)
def test_each_expert_is_multiplied_as_if_it_were_alone(name: str) -> None:
    """Results, gradients and observed magnitudes are equal."""
    matmul, (x, w, dy, amax) = RoundedMatmul(RECIPES[name]), case()
    more = (amax,) if name == "fp8_delayed" else ()
    actual = jax.jit(partial(gradients, partial(grouped, matmul, jnp.int32(SIZES))))(dy, x, w, *more)
    expected = [*zip(*jax.jit(partial(alone, matmul))(x, w, dy, *more), strict=True)]
    for number, (array, parts) in enumerate(zip(actual, expected, strict=True)):
        reference = np.concatenate(parts) if number < 2 else np.stack(parts)
        np.testing.assert_allclose(array[: len(reference)], reference, rtol=0, atol=1e-6 * np.abs(reference).max())


@pytest.mark.parametrize("name", ["fp8_delayed", pytest.param("fp8_blocks", marks=pytest.mark.slow)])
def test_matrices_that_a_step_has_rounded_before(name: str) -> None:
    matmul, (x, w, dy, amax) = RoundedMatmul(RECIPES[name]), case()
    more = (amax,) if name == "fp8_delayed" else ()
    multiply = partial(grouped, matmul, jnp.int32(SIZES))

    def both(x: Any, w: Any, dy: Any, *amax: Any) -> list[Any]:
        of_rounded = partial(multiply, rounded=matmul.matrices(w, *amax))
        # The product reads nothing of the matrices but what was made of them.
        return [gradients(multiply, dy, x, w, *amax), gradients(of_rounded, dy, x, 0 * w, *amax)]

    expected, actual = jax.jit(both)(x, w, dy, *more)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def trained(
    recipe: Recipe, parallel: ParallelConfig, hidden: int = 64, kernel: GroupedKernel = "auto"
) -> dict[str, np.ndarray]:
    """Gradients of a mixture of experts on the devices of a layout, and what its experts observe, by path."""
    matmul, devices = RoundedMatmul(recipe), parallel.expert * parallel.tensor
    layout = Layout(Plan.of(parallel), matmul, grouped=matmul.grouped, beside=matmul.beside)
    cfg = MoEConfig(experts=4, expert=GatedMLPConfig(ffn=256), kernel=kernel)
    module: Any = nnx.eval_shape(
        lambda: cfg.build(LayerSettings(layout=layout, hidden=hidden, std=0.3, output_std=0.3))
    )
    declared = {**specs(module), **specs(module, Observation)}
    rng = np.random.default_rng(0)
    values = {path: rng.normal(size=spec.shape).astype(np.float32) / 4 for path, spec in declared.items()}
    values |= {path: np.full(spec.shape, 8, np.float32) for path, spec in declared.items() if path.endswith("amax.max")}
    x, index = rng.normal(size=(4, 16, hidden)).astype(np.float32), jnp.arange(16)

    def loss(values: Any, x: Any) -> jax.Array:
        return jnp.sum(bind(module, values)(x, Context(jnp.broadcast_to(index, (4, 16)), index)) ** 2)

    with jax.set_mesh(build_mesh(parallel, jax.devices()[:devices])):
        # On all devices: an interpreted kernel that still runs on one would wait for the next program for ever.
        of_values, of_x = jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1)))(values, x))
    return {"x": np.asarray(of_x)} | {path: np.asarray(gradient) for path, gradient in of_values.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_blocks", "nvfp4"])
def test_experts_over_devices_are_those_of_one(name: str) -> None:
    """Experts over two devices, and the matrices of each over two: magnitudes are those of whole tensors.

    Sums of numbers with float32 scales depend on their order, and one last bit can round a gradient to another code.
    """
    expected = trained(RECIPES[name], ParallelConfig(data=1))
    actual = trained(RECIPES[name], ParallelConfig(data=1, expert=2, tensor=2))
    assert (name == "fp8_delayed") == ("experts.up.amax.max" in expected)
    for path in expected.keys() - {"load.sum", "report.sum"}:
        np.testing.assert_allclose(actual[path], expected[path], rtol=0, atol=1e-5 * np.abs(expected[path]).max())
