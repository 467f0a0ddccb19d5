"""The grouped matmul of mixture-of-experts layers: each row times the matrix of its group.

A kernel is two functions, `Products`: rows times matrices, which is the forward pass and the gradient of the rows, and
the gradient of the matrices. `grouped_matmul` combines them into a differentiable function.

T rows, E groups; x [T, K], w [E, K, N], y [T, N]. Rows are sorted by group. The sizes of the groups may add up to less
than T: the rows past the groups, in x and in the gradient of y, may hold anything and affect no result.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.config.class_references import resolve
from megajax.kernels.attention.attention import local_device
from megajax.kernels.attention.request import KernelDevice
from megajax.kernels.grouped.capability import (
    CODES,
    CodesKernel,
    GroupedKernel,
    GroupedSizes,
    capable_grouped,
    choose_grouped,
)
from megajax.kernels.grouped.row_tiles import tiles

REFERENCE_BLOCKS = (64, 128)
"""Minimum and maximum number of rows of a tile of the reference. CPUs give a row the same bits in products of 56 rows
or more, so the number of rows of a step does not change its result."""


class Products(NamedTuple):
    """The two functions of a kernel; neither is differentiable."""

    rows: Callable[..., Array]
    """(x [T, K], w [E, K, N] of x's dtype, sizes, transposed=, dtype=) -> [T, N], in x's dtype if dtype is None;
    transposed: w [E, N, K]."""
    matrices: Callable[..., Array]
    """(x [T, K], dy [T, N], sizes, dtype=) -> [E, K, N]: sum over each group's rows of x^T dy; 0 for an empty group."""


class CodeProducts(NamedTuple):
    """The two functions of a kernel of codes in blocks with a scale each; neither is differentiable.

    Blocks lie along the dimension that is summed over. The kernel `codes` takes float8_e4m3fn or float8_e5m2 in blocks
    of B = 128 numbers, of w in tiles of 128 x 128, with float32 scales. `blackwell_block_scaled` takes what the tensor
    cores do: the same formats in blocks of B = 32 with scales in e8m0, or float4_e2m1fn in blocks of 16 with e4m3.
    """

    rows: Callable[..., Array]
    """(x [T, K], its scales [T, K / B], w [E, N, K], its scales [E, N / 128, K / B] or [E, N, K / B], sizes, dtype=)
    -> [T, N]."""
    matrices: Callable[..., Array]
    """(x [K, T], its scales [K, T / B], dy [N, T], its scales [N, T / B], sizes, dtype=) -> [E, K, N]: sum over
    each group's rows of x dy^T; sizes are multiples of 128; 0 for an empty group."""
    kernel: CodesKernel = "codes"

    @property
    def hardware(self) -> bool:
        """Whether scales are those of the tensor cores."""
        return self.kernel == "blackwell_block_scaled"

    @property
    def label(self) -> str:
        """For people."""
        return CODES[self.kernel].label

    def fits(self, rows: int, inner: int, outer: int) -> bool:
        """Whether the kernel supports T = rows, K = inner, N = outer."""
        return CODES[self.kernel].refusal(sizes=GroupedSizes(rows, 1, inner, outer)) is None


def code_products(capability: tuple[int, ...]) -> CodeProducts | None:
    """The kernel of codes for GPUs of this compute capability, () for other devices; None: there is none."""
    device = KernelDevice(name="the device", capability=capability or None)
    for kernel, backend in CODES.items():
        if backend.refusal(device=device) is None:
            functions = (resolve(f"megajax.kernels.grouped.{kernel}:{name}") for name in Products._fields)
            return CodeProducts(*functions, kernel)
    return None


def reference_rows(
    x: Array, w: Array, sizes: Array, *, transposed: bool = False, dtype: jnp.dtype | None = None
) -> Array:
    """One matmul per tile of a group's rows; rows past the groups are 0."""
    dtype = dtype or x.dtype
    block = _reference_block(x.shape[0], sizes.shape[0])
    tiled = tiles(sizes, x.shape[0], block)
    contracted = ((1,), (1 if transposed else 0,)), ((), ())

    def step(tile: Array, y: Array) -> Array:
        at, in_group = _place(tiled.first[tile], tiled.end[tile], x.shape[0], block)
        rows = jnp.where(in_group, lax.dynamic_slice_in_dim(x, at, block), 0)
        matrix = lax.dynamic_index_in_dim(w, tiled.group[tile], keepdims=False)
        product = lax.dot_general(rows, matrix, contracted, preferred_element_type=jnp.float32).astype(dtype)
        product = jnp.where(in_group, product, lax.dynamic_slice_in_dim(y, at, block))
        return lax.dynamic_update_slice_in_dim(y, product, at, 0)

    y = jnp.zeros((x.shape[0], w.shape[1 if transposed else 2]), dtype)
    return lax.fori_loop(0, tiled.live, step, y)


def reference_matrices(x: Array, dy: Array, sizes: Array, *, dtype: jnp.dtype) -> Array:
    """One matmul per tile of a group's rows, summed in float32."""
    block = _reference_block(x.shape[0], sizes.shape[0])
    tiled = tiles(sizes, x.shape[0], block)

    def step(tile: Array, dw: Array) -> Array:
        at, in_group = _place(tiled.first[tile], tiled.end[tile], x.shape[0], block)
        a, b = (jnp.where(in_group, lax.dynamic_slice_in_dim(rows, at, block), 0) for rows in (x, dy))
        part = lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        group = tiled.group[tile]
        return lax.dynamic_update_index_in_dim(dw, dw[group] + part, group, 0)

    dw = jnp.zeros((sizes.shape[0], x.shape[1], dy.shape[1]), jnp.float32)
    return lax.fori_loop(0, tiled.live, step, dw).astype(dtype)


def _reference_block(rows: int, groups: int) -> int:
    """Rows of a tile: about half the mean group, so that few rows are empty, within REFERENCE_BLOCKS."""
    least, most = REFERENCE_BLOCKS
    return min(rows, max(least, min(most, 1 << max(1, rows // groups // 2).bit_length() - 1)))


def _place(first: Array, end: Array, rows: int, block: int) -> tuple[Array, Array]:
    """The start of a slice of `block` rows that contains rows [first, end), and their mask, bool [block, 1]."""
    at = jnp.minimum(first, rows - block)
    row = at + jnp.arange(block)
    return at, ((row >= first) & (row < end))[:, None]


def products_of(kernel: str) -> Products:
    """The functions of a kernel. Those of GPUs are imported when they are used: Mosaic takes 0.3 s of a start."""
    if kernel == "reference":
        return Products(reference_rows, reference_matrices)
    return Products(*(resolve(f"megajax.kernels.grouped.{kernel}:{name}") for name in Products._fields))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(products: Products, x: Array, w: Array, sizes: Array) -> Array:
    return products.rows(x, w.astype(x.dtype), sizes)


def _backward(products: Products, saved: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array, None]:
    x, w, sizes = saved
    dx = products.rows(dy, w.astype(x.dtype), sizes, transposed=True)
    return dx, products.matrices(x, dy, sizes, dtype=w.dtype), None


_multiply.defvjp(lambda products, x, w, sizes: (_multiply(products, x, w, sizes), (x, w, sizes)), _backward)


def grouped_matmul(x: Array, w: Array, sizes: Array, kernel: GroupedKernel | Products = "auto") -> Array:
    """y[t] = x[t] @ w[group of row t]: x [T, K], w [E, K, N], sizes int32 [E] -> [T, N] in x's dtype.

    Rows are sorted by group; sizes: rows of each group. If the sizes add up to less than T, rows past the groups may
    hold anything, NaN included, in x and in y's gradient. These rows of y and of x's gradient are undefined, or 0 with
    the reference. Sums are in float32. w may have a wider dtype than x: it is cast to x's, and its gradient is
    computed in its own.

    kernel: `auto` takes the fastest one that supports the first device and these sizes. A named kernel is not checked
    against the device, because programs are also compiled for virtual devices. Raises UserError if it does not support
    the dtype or the sizes.
    """
    sizes = sizes.astype(jnp.int32)
    if isinstance(kernel, Products):
        return _multiply(kernel, x, w, sizes)
    return _multiply(chosen(kernel, jnp.dtype(x.dtype).name, GroupedSizes(x.shape[0], *w.shape)), x, w, sizes)


def chosen(kernel: GroupedKernel, dtype: str, sizes: GroupedSizes) -> Products:
    """The functions of the kernel for rows of this dtype, as in `grouped_matmul`."""
    device = local_device() if kernel == "auto" else None
    return products_of(choose_grouped(kernel, dtype, device, sizes=sizes).kernel)


def capable(kernel: GroupedKernel, sizes: GroupedSizes, dtype: str) -> Products:
    """As `chosen`, of the kernel or the next fastest one that supports the dtype and the sizes."""
    return chosen(capable_grouped(kernel, dtype, sizes), dtype, sizes)
