"""The grouped matmul: its reference against a dense one, and the GPU kernel, interpreted, against the reference."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental.pallas import mosaic_gpu
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.kernels.attention.attention import local_device
from megajax.kernels.attention.capability import KernelChoice
from megajax.kernels.attention.request import KernelDevice
from megajax.kernels.grouped import matmul as module
from megajax.kernels.grouped import mosaic as grouped_mosaic
from megajax.kernels.grouped.capability import GROUPED_BACKENDS, GroupedSizes, choose_grouped
from megajax.kernels.grouped.matmul import Products, grouped_matmul, products_of
from megajax.kernels.grouped.row_tiles import most_tiles, tiles

A100, H100, B200 = (
    KernelDevice(name=name, capability=at) for name, at in (("A100", (8, 0)), ("H100", (9, 0)), ("B200", (10, 0)))
)
CPU = KernelDevice(name="cpu")
ROWS, INNER, OUTER = 40, 8, 12
GROUPS = {
    "even": (10, 10, 10, 10),
    "uneven, some empty": (0, 23, 0, 17),
    "all rows in one": (0, 0, 40, 0),
    "rows past the groups": (3, 0, 20, 1),
    "one row each": (1, 1, 1, 1),
    "no rows": (0, 0, 0, 0),
}


def arrays(sizes: tuple[int, ...], dtype=jnp.float32) -> tuple[Array, Array, Array, Array]:
    """x, w, the gradient of y, and the sizes; the rows past the groups are NaN."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (ROWS, INNER), (len(sizes), INNER, OUTER), (ROWS, OUTER)
    x, w, dy = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
    past = slice(sum(sizes), None)
    return x.at[past].set(jnp.nan), w, dy.at[past].set(jnp.nan), jnp.array(sizes, jnp.int32)


def product_and_gradients(multiply, x: Array, w: Array, dy: Array) -> tuple[Array, Array, Array]:
    """The result and both gradients."""
    y, pullback = jax.vjp(multiply, x, w)
    return y, *pullback(dy.astype(y.dtype))


@jax.jit
def of_reference(x: Array, w: Array, dy: Array, sizes: Array) -> tuple[Array, Array, Array]:
    return product_and_gradients(lambda x, w: grouped_matmul(x, w, sizes, "reference"), x, w, dy)


def dense(x: Array, w: Array, dy: Array, sizes: Array) -> tuple[Array, Array, Array]:
    """With the matrix of each row, in float32; rows past the groups are 0."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    live = len(owner)
    x, w, dy = (a.astype(jnp.float32) for a in (x[:live], w, dy[:live]))
    results = product_and_gradients(lambda x, w: jnp.einsum("tk,tkn->tn", x, w[owner]), x, w, dy)
    padded = [jnp.pad(a, ((0, ROWS - live), (0, 0))) for a in results[:2]]
    return padded[0], padded[1], results[2]


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_the_reference_equals_a_dense_product(groups: tuple[int, ...]) -> None:
    """Rows past the groups are NaN, and their results are 0."""
    inputs = arrays(groups)
    for actual, expected in zip(of_reference(*inputs), dense(*inputs), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_wide_matrices_have_wide_gradients() -> None:
    """Rows are bfloat16 and matrices float32: the gradient is accumulated in float32 and not rounded afterwards."""
    x, w, dy, sizes = arrays(GROUPS["uneven, some empty"])
    x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    y, dx, dw = of_reference(x, w, dy, sizes)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    expected = dense(x, w.astype(jnp.bfloat16), dy, sizes)
    np.testing.assert_allclose(dw, expected[2], atol=1e-5)
    for actual, exact in ((y, expected[0]), (dx, expected[1])):
        np.testing.assert_array_equal(actual, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize(("block", "align"), [(1, 1), (7, 1), (8, 8), (16, 8), (64, 8)])
def test_tiles_cover_each_group_once(block: int, align: int) -> None:
    random, tiled = np.random.default_rng(block), jax.jit(tiles, static_argnums=(1, 2, 3))
    for _ in range(20):
        sizes = random.multinomial(ROWS - random.integers(8), random.dirichlet(np.full(5, 0.4)))
        actual = [np.asarray(array) for array in tiled(jnp.array(sizes, jnp.int32), ROWS, block, align)]
        assert actual[0].shape == (most_tiles(ROWS, 5, block, align),) and actual[3] == (actual[2] > actual[1]).sum()
        rows = [row for first, end in zip(*actual[1:3], strict=True) for row in range(first, end)]
        assert rows == list(range(sizes.sum()))
        owner = np.repeat(np.arange(5), sizes)
        for group, first, end in zip(*actual[:3], strict=True):
            assert end - first // align * align <= block and (owner[first:end] == group).all()
    # Each group begins just before a multiple of align: no other division needs more tiles.
    worst = jnp.array([align - 1] + [block] * 3, jnp.int32)
    assert tiled(worst, align - 1 + 3 * block, block, align).live <= most_tiles(align - 1 + 3 * block, 4, block, align)


FEW = "mosaic: takes a multiple of 8 rows, 64 at least,"
FITTING = GroupedSizes(rows=4096, groups=8, inner=2048, outer=768)


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "kernel", "why"),
    [
        (H100, "bfloat16", FITTING, "mosaic", ()),
        (A100, "bfloat16", FITTING, "reference", ("mosaic: runs from compute capability 9.0 on, A100 has 8.0",)),
        (B200, "bfloat16", FITTING, "reference", ("mosaic: runs below compute capability 10.0, B200 has 10.0",)),
        (CPU, "bfloat16", FITTING, "reference", ("mosaic: needs an NVIDIA GPU, jax found cpu",)),
        (H100, "float32", FITTING, "reference", ("mosaic: computes in bfloat16 or float16, not in float32",)),
        (H100, "bfloat16", FITTING._replace(rows=4001), "reference", (f"{FEW} not 4001",)),
        (H100, "bfloat16", FITTING._replace(rows=56), "reference", (f"{FEW} not 56",)),
        (
            H100,
            "bfloat16",
            FITTING._replace(outer=720),
            "reference",
            ("mosaic: takes matrices with sides of multiples of 64, not 2048 x 720",),
        ),
        (H100, None, None, "mosaic", ()),
    ],
)
def test_auto_chooses_the_fastest_supported_kernel(device, dtype, sizes, kernel, why) -> None:
    assert choose_grouped("auto", dtype, device, sizes=sizes) == KernelChoice(kernel, why)
    assert choose_grouped(kernel, dtype, device, sizes=sizes).kernel == kernel


def test_an_unsupported_kernel_is_an_error_with_an_alternative() -> None:
    with pytest.raises(UserError) as caught:
        choose_grouped("mosaic", "bfloat16", A100, "model.block.mlp.kernel")
    assert str(caught.value) == (
        "model.block.mlp.kernel=mosaic: the Mosaic kernel runs from compute capability 9.0 on, A100 has 8.0. "
        "Set model.block.mlp.kernel=reference or auto."
    )
    with user_error():
        grouped_matmul(jnp.ones((16, 16)), jnp.ones((2, 16, 16)), jnp.array([8, 8]), "mosaic")


def test_auto_follows_the_first_device(monkeypatch) -> None:
    """A kernel that is named is not refused for it."""
    calls, x, w = [], jnp.ones((64, 64), jnp.bfloat16), jnp.ones((2, 64, 64))
    monkeypatch.setattr(module, "_multiply", lambda products, x, w, sizes: calls.append(products) or x)
    for device in (CPU, A100, H100):
        monkeypatch.setattr(module, "local_device", lambda device=device: device)
        grouped_matmul(x, w, jnp.array([8, 8]))
        grouped_matmul(x, w, jnp.array([8, 8]), "mosaic")
    assert calls[1::2] == [products_of("mosaic")] * 3
    assert calls[::2] == [products_of(name) for name in ("reference", "reference", "mosaic")]


def test_every_kernel_exists_and_the_reference_is_the_last() -> None:
    assert all(map(products_of, GROUPED_BACKENDS)) and list(GROUPED_BACKENDS)[-1] == "reference"


def check(products: Products, groups: tuple[int, ...], count: int, inner: int, outer: int) -> None:
    """Both functions of a GPU kernel against the reference, NaN in the rows past the groups.

    groups, count: rows of each group, and of all.
    """
    keys, sizes, live = jax.random.split(jax.random.key(0), 3), jnp.array(groups, jnp.int32), sum(groups)
    shapes = (count, inner), (len(groups), inner, outer), (count, outer)
    x, w, dy = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    inputs = x.at[live:].set(jnp.nan), w.astype(jnp.float32), dy.at[live:].set(jnp.nan), sizes

    @jax.jit
    def run(x: Array, w: Array, dy: Array, sizes: Array) -> tuple[Array, Array, Array]:
        return product_and_gradients(lambda x, w: grouped_matmul(x, w, sizes, products), x, w, dy)

    expected = of_reference(*inputs)
    # Memory that the program has not written is NaN; a read that no barrier orders is an error.
    with mosaic_gpu.force_gpu_interpret_mode(CAREFUL) if products is SMALL else nullcontext():
        y, dx, dw = jax.block_until_ready(run(*inputs))
    assert dw.dtype == jnp.float32
    np.testing.assert_allclose(dw, expected[2], atol=1e-5 * float(jnp.abs(expected[2]).max()))
    for a, b in zip((y, dx), expected[:2], strict=True):
        a, b = (np.asarray(array[:live], np.float32) for array in (a, b))
        # Sums in another order: a result close to the middle of two bfloat16 numbers may round to the other one.
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-5 * np.abs(b).max(initial=0.0))


CAREFUL = mosaic_gpu.InterpretGPUParams(detect_races=True)
FEW_PROGRAMS = {"blocks": grouped_mosaic.BlockSizes(64, 128, 64), "programs": 1}
SMALL = Products(partial(grouped_mosaic.rows, **FEW_PROGRAMS), partial(grouped_mosaic.matrices, **FEW_PROGRAMS))


@pytest.mark.parametrize(
    ("groups", "count", "inner", "outer"),
    [
        # Groups between multiples of 8, and a last tile that would reach beyond the last row.
        ((23, 0, 17, 31), 72, 64, 64),
        pytest.param((0, 0, 0), 64, 128, 192, marks=pytest.mark.slow),
        pytest.param((100, 0, 60, 70), 264, 128, 192, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_equals_the_reference(groups: tuple[int, ...], count: int, inner: int, outer: int) -> None:
    check(SMALL, groups, count, inner, outer)


@pytest.mark.gpu
@pytest.mark.skipif(local_device().capability is None, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("inner", "outer"), [(512, 768), (704, 448)])
@pytest.mark.parametrize("groups", [(300, 0, 1, 700, 23), (0, 0, 4096, 0, 0), (820, 819, 821, 818, 818)])
def test_the_kernel_on_a_gpu_equals_the_reference(groups: tuple[int, ...], inner: int, outer: int) -> None:
    if refusal := GROUPED_BACKENDS["mosaic"].refusal("bfloat16", local_device()):
        pytest.skip(refusal)
    check(products_of("mosaic"), groups, 4096, inner, outer)
