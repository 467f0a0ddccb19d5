"""The recipes with a scale per block: format, blocks and rounding of each tensor of a product."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.mesh.collectives import LetterSharding, on_each_device, sharded_product
from megajax.mesh.layer_observations import Observed
from megajax.mesh.mesh import free_axes
from megajax.precision.blocks import (
    BlockFormat,
    BlockScaledTensor,
    dequantize,
    hadamard,
    quantize,
    visible,
    whole_scale,
)
from megajax.precision.config import Fp8BlocksConfig, Mxfp8Config, Nvfp4Config
from megajax.precision.matmul import CODE_BLOCK, HARDWARE_BLOCK, CodeProducts, Letters, RowGroups, Tensor, in_order

type BlockKernel = Literal["cudnn", "reference"]


@partial(jax.tree_util.register_dataclass, data_fields=("blocks",), meta_fields=("form", "tiles", "whole"))
@dataclass(frozen=True, slots=True)
class RoundedRows:
    """An operand: [shared dimensions, other dimensions, K], with the numbers that are summed over last."""

    blocks: BlockScaledTensor
    """codes [..., K], scales [..., K / size]; for a tensor in tiles, scales of [shared dimensions, N, K]."""
    form: BlockFormat
    tiles: bool
    whole: bool = False
    """Blocks lie on two devices, so each device computes with the whole operand."""

    def flat(self) -> BlockScaledTensor:
        """In tiles: [shared dimensions, N, K]."""
        if not self.tiles:
            return self.blocks
        codes, scales, whole = self.blocks
        return BlockScaledTensor(codes.reshape(*scales.shape[:-2], -1, codes.shape[-1]), scales, whole)

    def wide(self, dtype: jnp.dtype) -> Array:
        """The numbers [..., K], without the scale of the whole tensor."""

        def numbers(blocks: BlockScaledTensor) -> Array:
            return dequantize(blocks, self.form, dtype, tiles=self.tiles)

        return self._by(numbers)(self.flat()).reshape(self.blocks.codes.shape)

    def rows(self) -> tuple[Array, Array]:
        """Codes [..., K] and their scales [..., K / block], with the blocks that hardware has."""

        def repeated(blocks: BlockScaledTensor) -> Array:
            codes, scales, _ = blocks
            if self.tiles:
                scales = jnp.repeat(scales, self.form.size, -2)[..., : codes.shape[-2], :]
            if self.form.size > HARDWARE_BLOCK:
                count = codes.shape[-1] // HARDWARE_BLOCK
                scales = jnp.repeat(scales, self.form.size // HARDWARE_BLOCK, -1)[..., :count]
            return scales

        codes = self.blocks.codes
        return codes, self._by(repeated)(self.flat()).reshape(*codes.shape[:-1], -1)

    def _by(self, local: Callable[[BlockScaledTensor], Array]) -> Callable[[BlockScaledTensor], Array]:
        return on_each_device(local) if self.whole else local


@partial(jax.tree_util.register_dataclass, data_fields=("rows", "factor"), meta_fields=("turned",))
@dataclass(frozen=True, slots=True)
class GroupedBlocks:
    """An operand of a product of groups."""

    rows: RoundedRows
    factor: Array | None
    turned: bool
    """Blocks lie along the rows of groups, which are the last dimension."""

    def wide(self) -> Array:
        x = self.rows.wide(exact_dtype(self.rows.form))
        return x.mT if self.turned else x

    def coded(self, *, of_weight: bool, hardware: bool) -> tuple[Array, Array]:
        del of_weight
        if hardware:
            return self.rows.rows()
        return self.rows.blocks.codes, self.rows.blocks.scales.astype(jnp.float32)


def exact_dtype(form: BlockFormat) -> jnp.dtype:
    """The dtype that holds codes times scales exactly, with float32 scales nearly so."""
    return jnp.dtype(jnp.float32 if form.scales == "float32" else jnp.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class InBlocks:
    """Recipe of the matmuls with blocks along the dimension that a product sums over. Hashable."""

    forward: BlockFormat
    """Format of activations and weights."""
    gradients: BlockFormat
    tiles: bool = False
    """Weights in square tiles, so that both products with them read the same numbers."""
    transformed: bool = False
    """Inputs of weights' gradients pass a random Hadamard transform."""
    stochastic: bool = False
    """Gradients are rounded stochastically."""
    multiple: int
    kernel: BlockKernel = "reference"
    codes: CodeProducts | None = None
    """The device's kernel of codes, where `kernel` has none, and for groups."""
    sharding: LetterSharding | None = ()
    """Of the letters over free mesh axes; None: unknown."""

    def operand(
        self, tensor: Tensor, x: Array, term: str, letters: Letters, amax: Array | None, *, of_weight: bool = False
    ) -> RoundedRows:
        del amax
        unshared = [letter for letter in term if letter not in letters.summed() + letters.shared()]
        order = (*letters.shared(), *unshared, *letters.summed())
        sizes = dict(zip(term, x.shape, strict=True))
        x = visible(x).transpose([term.index(letter) for letter in order])
        shared, dimensions = len(letters.shared()), len(order) - len(letters.summed())
        shape = (*x.shape[:dimensions], prod(x.shape[dimensions:]))
        form, tiles = self.gradients if tensor == "dy" else self.forward, self.tiles and tensor == "w"
        x = x.reshape(*shape[:shared], -1, shape[-1]) if tiles else x.reshape(shape)

        def rounded(x: Array) -> BlockScaledTensor:
            x = hadamard(x) if self.transformed and of_weight else x
            return quantize(x, form, tiles=tiles, stochastic=self.stochastic and tensor == "dy")

        names = {letters.summed(), "".join(unshared)} if tiles else {letters.summed()}
        whole = not _in_parts({group: prod(sizes[n] for n in group) for group in names}, form.size, self.sharding or ())
        blocks = (on_each_device(rounded) if whole else rounded)(x)
        return RoundedRows(blocks._replace(codes=blocks.codes.reshape(shape)), form, tiles, whole)

    def product(self, letters: Letters, a: RoundedRows, b: RoundedRows, dtype: jnp.dtype, *, forward: bool) -> Array:
        """Codes times codes by hardware, or exactly the same numbers in bfloat16; float32 scales need float32."""
        del forward
        whole = None if a.blocks.whole is None or b.blocks.whole is None else a.blocks.whole * b.blocks.whole
        result = dtype if whole is None else jnp.dtype(jnp.float32)
        if self.kernel == "cudnn":
            y = _by_hardware(letters, a, b, result, self.sharding or ())
        elif self.codes is not None and _in_whole_blocks(letters, a, b, self.sharding or ()):
            y = _by_codes(self.codes, letters, a, b, result, self.sharding or ())
        else:
            y = _by_reference(letters, a, b, result)
        return in_order(y if whole is None else (y * whole).astype(dtype), letters)

    @property
    def row_block(self) -> int:
        return self.forward.size

    @property
    def exact(self) -> jnp.dtype:
        return exact_dtype(self.forward)

    def grouped_operand(
        self, tensor: Tensor, x: Array, groups: RowGroups, amax: Array | None, *, of_weight: bool = False
    ) -> GroupedBlocks:
        del amax
        form, tiles = self.gradients if tensor == "dy" else self.forward, self.tiles and tensor == "w"
        x = visible(x.mT if of_weight else x)
        x = hadamard(x) if self.transformed and of_weight else x
        factor = whole = None
        if form.scales == "nvfp4":
            factor = whole_scale(groups.amax(x.mT if of_weight else x), form)
            whole = groups.spread(factor, x.ndim)
            whole = whole[:: form.size].T if of_weight else whole
        blocks = quantize(x, form, tiles=tiles, stochastic=self.stochastic and tensor == "dy", whole=whole)
        return GroupedBlocks(RoundedRows(blocks._replace(whole=None), form, tiles), factor, of_weight)

    def on(self, sharding: LetterSharding | None) -> "InBlocks":
        """With an unknown sharding over several devices, the reference: it is left to the compiler."""
        unknown = sharding is None and max(free_axes().values(), default=1) > 1
        if unknown:
            return replace(self, sharding=None, kernel="reference", codes=None)
        return replace(self, sharding=sharding)

    def observed(self, x: RoundedRows, w: RoundedRows, dy: RoundedRows) -> Array:
        raise AssertionError("scales of blocks have no history")

    def beside(self) -> Mapping[str, Observed]:
        return {}


def _by_reference(letters: Letters, a: RoundedRows, b: RoundedRows, dtype: jnp.dtype) -> Array:
    x, y = (rows.wide(exact_dtype(rows.form)) for rows in (a, b))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    shared = tuple(range(len(letters.shared())))
    dimensions = ((x.ndim - 1,), (y.ndim - 1,)), (shared, shared)
    return lax.dot_general(x, y, dimensions, preferred_element_type=dtype, precision=precision)


def _in_whole_blocks(letters: Letters, a: RoundedRows, b: RoundedRows, sharding: LetterSharding) -> bool:
    """Whether the parts of a device consist of whole tiles."""
    sizes = {letters.summed(): a.blocks.codes.shape[-1]}
    for term, rows in ((letters.first, a), (letters.second, b)):
        sizes["".join(n for n in term if n not in letters.summed())] = prod(rows.blocks.codes.shape[:-1])
    whole = not any(size % CODE_BLOCK for size in sizes.values())
    return whole and not letters.shared() and _in_parts(sizes, CODE_BLOCK, sharding)


def _in_parts(sizes: Mapping[str, int], block: int, sharding: LetterSharding) -> bool:
    """Whether no block lies on two devices. sizes: of dimensions that join these letters."""
    over, devices = dict(sharding), free_axes()
    parts = {names: prod(devices[axis] for name in names for axis in over.get(name, ())) for names in sizes}
    return not any(parts[names] > 1 and size % (block * parts[names]) for names, size in sizes.items())


def _by_codes(
    kernel: CodeProducts, letters: Letters, a: RoundedRows, b: RoundedRows, dtype: jnp.dtype, sharding: LetterSharding
) -> Array:
    """The product as one of a single group: of rows with tiles of weights, or of two operands without tiles."""

    def local(x: Array, x_scales: Array, y: Array, y_scales: Array) -> Array:
        flat = [part.reshape(-1, part.shape[-1]) for part in (x, x_scales, y, y_scales)]
        if b.tiles:
            whole = jnp.full(1, flat[0].shape[0], jnp.int32)
            product = kernel.rows(*flat[:2], *(part[None] for part in flat[2:]), whole, dtype=dtype)
        else:
            product = kernel.matrices(*flat, jnp.full(1, x.shape[-1], jnp.int32), dtype=dtype)
        return product.reshape(*x.shape[:-1], *y.shape[:-1])

    summed = letters.summed()
    x, y = ([n for n in term if n not in summed] for term in (letters.first, letters.second))
    y_scales = ["".join(y)] if b.tiles else y
    terms = ([*names, summed] for names in (x, x, y, y_scales))
    arrays = (part for rows in (a, b) for part in (rows.blocks.codes, rows.blocks.scales.astype(jnp.float32)))
    return sharded_product(local, tuple(terms), letters.result(), sharding)(*arrays)


def _by_hardware(letters: Letters, a: RoundedRows, b: RoundedRows, dtype: jnp.dtype, sharding: LetterSharding) -> Array:
    """On a GPU of FIRST_WITH_BLOCKS, cuDNN's product of blocks; the compiler writes it out for other devices.

    Each device multiplies its parts: jax can't partition the product within a partly manual mesh.
    """
    shared, summed = letters.shared(), letters.summed()

    def local(x: Array, x_scales: Array, y: Array, y_scales: Array) -> Array:
        batch, result = prod(x.shape[: len(shared)]), (*x.shape[:-1], *y.shape[len(shared) : -1])
        matrices = [part.reshape(batch, -1, part.shape[-1]) for part in (x, y, x_scales, y_scales)]
        return jax.nn.scaled_matmul(*matrices, preferred_element_type=dtype).reshape(result)

    x, y = (
        [*shared, *(letter for letter in term if letter not in summed + shared), summed]
        for term in (letters.first, letters.second)
    )
    return sharded_product(local, (x, x, y, y), letters.result(), sharding)(*a.rows(), *b.rows())


def fp8_blocks(cfg: Fp8BlocksConfig, kernel: BlockKernel = "reference") -> InBlocks:
    """The recipe of DeepSeek-V3 (2024, section 3.3).

    Its smallest amax, 1e-4, is for activations and weights: gradients of a mean over tokens are smaller.
    """
    least, smallest = (1e-4, 0.0) if cfg.scales == "power_of_two" else (1e-12, 1e-12)
    forward = BlockFormat("e4m3", 128, cfg.scales, "up", least)
    gradients = forward._replace(element="e5m2" if cfg.format == "hybrid" else "e4m3", least=smallest)
    return InBlocks(forward=forward, gradients=gradients, tiles=True, multiple=cfg.multiple, kernel=kernel)


def mxfp8(cfg: Mxfp8Config, kernel: BlockKernel = "reference") -> InBlocks:
    """The recipe of MXFP8."""
    forward = BlockFormat("e4m3", 32, "power_of_two", cfg.rounding)
    gradients = forward._replace(element="e5m2" if cfg.format == "hybrid" else "e4m3")
    return InBlocks(forward=forward, gradients=gradients, multiple=cfg.multiple, kernel=kernel)


def nvfp4(cfg: Nvfp4Config, kernel: BlockKernel = "reference") -> InBlocks:
    """The recipe of NVFP4."""
    form = BlockFormat("e2m1", 16, "nvfp4")
    return InBlocks(
        forward=form,
        gradients=form,
        tiles=True,
        transformed=cfg.hadamard,
        stochastic=cfg.stochastic,
        multiple=cfg.multiple,
        kernel=kernel,
    )
