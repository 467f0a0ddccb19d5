"""Products of experts in each recipe: against a loop of products of each expert alone, and over devices."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_blocks import draw
from tiny_runs import QUICK, build_program, place, rows, start, wide, with_block, within

from megajax.kernels.grouped.capability import GroupedKernel, GroupedSizes
from megajax.kernels.grouped.matmul import capable
from megajax.layers.context import Context
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig
from megajax.layers.param import LayerSettings, Observation, bind, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.precision.block_recipes import fp8_blocks, mxfp8, nvfp4
from megajax.precision.config import (
    Fp8BlocksConfig,
    Fp8CurrentConfig,
    Fp8DelayedConfig,
    MatmulConfig,
    Mxfp8Config,
    Nvfp4Config,
)
from megajax.precision.fp8 import AmaxHistory, PerTensor
from megajax.precision.matmul import Recipe, RoundedMatmul, _multiply
from megajax.training.gradients import grads
from megajax.training.program import Program

DELAYED = Fp8DelayedConfig()
RECIPES: dict[str, Recipe] = {
    "fp8_current": PerTensor(Fp8CurrentConfig()),
    "fp8_delayed": PerTensor(DELAYED, AmaxHistory(DELAYED, 1.0)),
    "fp8_blocks": fp8_blocks(Fp8BlocksConfig()),
    "fp8_blocks with float32 scales": fp8_blocks(Fp8BlocksConfig(scales="float32")),
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
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("fp8_delayed", "nvfp4"))) for name in RECIPES]
)
def test_each_expert_is_multiplied_as_if_it_were_alone(name: str) -> None:
    """Results, gradients and observed magnitudes."""
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
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "fp8_blocks with float32 scales"])
def test_experts_over_devices_are_those_of_one(name: str) -> None:
    """Experts over two devices, and the matrices of each over two: magnitudes are those of whole tensors.

    Sums of numbers with float32 scales depend on their order, and one last bit can round a gradient to another code.
    """
    expected = trained(RECIPES[name], ParallelConfig(data=1))
    actual = trained(RECIPES[name], ParallelConfig(data=1, expert=2, tensor=2))
    assert (name == "fp8_delayed") == ("experts.up.amax.max" in expected)
    for path in expected.keys() - {"load.sum", "report.sum"}:
        np.testing.assert_allclose(actual[path], expected[path], rtol=0, atol=1e-5 * np.abs(expected[path]).max())


LAYOUTS = {
    "experts, tensor and FSDP": ParallelConfig(data=2, expert=2, tensor=2, data_sharding="fsdp"),
    "whole experts over tensor": ParallelConfig(data=1, expert=2, tensor=2, sequence=True, expert_tensor="whole"),
    "pipeline": ParallelConfig(data=1, pipeline=2, expert=2),
    "pipeline and tensor": ParallelConfig(data=1, pipeline=2, tensor=2, sequence=True),
}


@cache
def losses(parallel: ParallelConfig, recipe: MatmulConfig | None, *, once: bool = True) -> np.ndarray:
    """Of five steps of a mixture of experts in bfloat16; once: the program rounds matrices once a step if it can."""
    mixture = MoEConfig(experts=4, expert=GatedMLPConfig(ffn=64), router=RouterConfig(aux_loss=0.01))
    # Sides of at least 32 on two devices.
    model = with_block(wide(), mlp=mixture, mixer={"head_dim": 32})
    program = build_program(model, parallel, microbatches=6 // parallel.data, compute="bfloat16", isolated=False)
    precision = replace(program.cfg.precision, matmul=recipe)
    cfg = program.cfg.but(precision=precision, schedule=replace(program.cfg.schedule, lr=1e-3), steps=5)
    assert not cfg.problems(8)
    program = Program.of(cfg, program.mesh)
    assert (program.layout.matrices is not None) == (recipe is not None and parallel.data_sharding != "fsdp")
    rounded: list[bool] = []

    def multiplied(*inputs: Any) -> Any:
        rounded.append(inputs[-1] is not None)
        return _multiply(*inputs)

    never = nullcontext() if once else patch.object(grads, "operands_for_step", lambda *_: {})
    with within(program), never, patch("megajax.precision.matmul._multiply", multiplied):
        state: Any = start(program)
        options = {**QUICK, "xla_allow_excess_precision": False}
        batches = [place(program, rows(number)) for number in range(5)]
        step = program.train_step.lower(state, batches[0]).compile(compiler_options=options)
        found = []
        for batch in batches:
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
    assert any(rounded) == (once and program.layout.matrices is not None)
    return np.array(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "parallel"),
    [
        (Fp8BlocksConfig(), ParallelConfig(data=1)),
        (DELAYED, ParallelConfig(data=1, expert=2, tensor=2, sequence=True)),
        (Mxfp8Config(), ParallelConfig(data=2, expert=2, tensor=2, sequence=True, expert_tensor="whole")),
        (Fp8BlocksConfig(), LAYOUTS["pipeline"]),
    ],
    ids=["one device", "expert x tensor", "whole experts, zero1", "pipeline"],
)
def test_matrices_rounded_once_a_step_are_those_of_each_microbatch(
    recipe: MatmulConfig, parallel: ParallelConfig
) -> None:
    """Bit for bit with scales that are powers of two; those of NVFP4 are quotients, whose last bit may differ."""
    np.testing.assert_array_equal(losses(parallel, recipe), losses(parallel, recipe, once=False))


NVFP4 = Nvfp4Config(first_layers=0, last_layers=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        (Fp8CurrentConfig(), "whole experts over tensor"),
        # Magnitudes of the whole tensor are gathered on every axis.
        *((DELAYED, layout) for layout in LAYOUTS),
        (Fp8BlocksConfig(), "experts, tensor and FSDP"),
        # Blocks of its attention lie on two devices.
        (Fp8BlocksConfig(), "pipeline and tensor"),
        (Mxfp8Config(), "pipeline"),
        (NVFP4, "experts, tensor and FSDP"),
    ],
)
def test_mixtures_train_on_layouts_as_on_one_device(recipe: MatmulConfig, layout: str) -> None:
    """The expert axis gathers all tokens of a microbatch, so that the first step differs by last bits of bfloat16."""
    expected = losses(ParallelConfig(data=1), recipe)
    assert 0 < np.abs(expected - losses(ParallelConfig(data=1), None)).max() < 3e-2
    assert np.abs(losses(LAYOUTS[layout], recipe) - expected).max() < 2e-2
