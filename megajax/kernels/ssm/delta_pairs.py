"""What Triton kernels of the gated delta rule compute within a chunk: decayed products of keys and queries, inverses.

Both work on blocks of 16 x 16 positions and need no array between blocks. `products` is derived by `jax.vjp` of the
formulas of one chunk; its sums of logarithms of decays contain only the terms between two positions, as those of
`megajax.kernels.ssm.chunks`. `inverse` solves diagonal blocks by substitution, and merges them by matmuls.

B rows, M chunks of L positions, N heads, G groups of N / G consecutive heads, K key size. With decays by channel, each
head is a group.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from megajax.kernels.attention.pallas import dot_float32
from megajax.kernels.ssm.chunks import BLOCK

CHANNELS = 32
"""Channels whose decays a program holds at a time."""

type Dot = Callable[[Array, Array], Array]
type Blocks = Mapping[tuple[int, int], Array]
"""Blocks [16, 16] of a matrix on and below the diagonal."""


class Options(NamedTuple):
    """How kernels run."""

    columns: int
    """Columns of a state per program, a power of two from 16 on that divides the size of value heads."""
    interpret: bool = False
    """Run on a CPU."""

    @classmethod
    def of(cls, keys: int, size: int, *, interpret: bool = False) -> "Options":
        """For these sizes of keys and values."""
        return cls(min(64 if keys <= 128 else 32, size & -size), interpret)

    def call(self, kernel: Callable, name: str, warps: int = 4, **arguments: Any) -> Callable:
        """The kernel with these options."""
        parameters = triton.CompilerParams(num_warps=warps, num_stages=1)
        return pl.pallas_call(kernel, compiler_params=parameters, interpret=self.interpret, name=name, **arguments)


def dot_in(dtype: jnp.dtype) -> Dot:
    """Matmul of float32 arrays that are rounded to this dtype, with float32 sums."""
    return lambda x, y: dot_float32(x.astype(dtype), y.astype(dtype))


def differentiable(dot: Dot) -> Dot:
    """The matmul, whose gradients are such matmuls too. Triton takes no such function where nothing is derived."""
    product = jax.custom_vjp(dot)
    product.defvjp(lambda x, y: (dot(x, y), (x, y)), lambda saved, dz: (dot(dz, saved[1].T), dot(saved[0].T, dz)))
    return product


def read(refs: Any, *at: Any) -> Any:
    """float32 values of a tree of refs."""
    return jax.tree.map(lambda ref: ref[at].astype(jnp.float32), refs)


def _places() -> tuple[Array, Array]:
    """int32 [16, 16] each: row and column."""
    row, column = (lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis) for axis in (0, 1))
    return row, column


def _block(number: int) -> Any:
    return pl.ds(BLOCK * number, BLOCK)


def _pairs(count: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(count) for j in range(i + 1)]


def _plain_products(q: list[Array], k: list[Array], dot: Dot) -> tuple[Blocks, Blocks]:
    """Products of keys with keys, and of queries with keys. q, k: blocks [16, K] of one chunk."""
    places = _pairs(len(k))
    return {(i, j): dot(k[i], k[j].T) for i, j in places}, {(i, j): dot(q[i], k[j].T) for i, j in places}


def _decayed_products(q: list[Array], k: list[Array], g: list[Array], dot: Dot) -> tuple[Blocks, Blocks]:
    """As `_plain_products`, with the decay of each channel from j to i. g: blocks [16, K]. See `decayed_products`."""
    row, column = _places()
    until = [dot_float32((column <= row).astype(jnp.float32), x) for x in g]
    after = [dot_float32((column > row).astype(jnp.float32), x) for x in g]
    totals = [x.sum(0) for x in g]
    among_keys, scores = {}, {}
    for i in range(len(k)):
        between = jnp.zeros_like(totals[0])
        for j in reversed(range(i)):
            opened = (k[j] * jnp.exp(after[j] + between[None])).T
            among_keys[i, j], scores[i, j] = (dot(x[i] * jnp.exp(until[i]), opened) for x in (k, q))
            between = between + totals[j]
        # All pairs of positions of a block, as rows: the terms after the second, up to the first.
        pair, term = (lax.broadcasted_iota(jnp.int32, (BLOCK * BLOCK, BLOCK), axis) for axis in (0, 1))
        counted = (term <= lax.div(pair, BLOCK)) & (term > lax.rem(pair, BLOCK))
        decays = jnp.exp(dot_float32(counted.astype(jnp.float32), g[i])).reshape(BLOCK, BLOCK, -1)
        decayed = decays * k[i][None]
        among_keys[i, i], scores[i, i] = ((decayed * x[i][:, None]).sum(-1) for x in (k, q))
    return among_keys, scores


def _decays(g: list[Array]) -> Blocks:
    """Decays after j up to i, of blocks [16] of logarithms; 1 above the diagonal."""
    row, column = _places()
    lower = (column <= row).astype(jnp.float32)
    until = [jnp.where(column <= row, x[None], 0).sum(1) for x in g]
    after = [jnp.where(row > column, x[:, None], 0).sum(0) for x in g]
    decays = {}
    for i in range(len(g)):
        between = jnp.float32(0)
        for j in reversed(range(i)):
            decays[i, j] = jnp.exp(until[i][:, None] + (after[j][None] + between))
            between = between + g[j].sum()
        decays[i, i] = jnp.exp(dot_float32(lower, jnp.where(row > column, g[i][:, None], 0)))
    return decays


def _masked(
    among_keys: Blocks, scores: Blocks, g: list[Array] | None, beta: list[Array], masks: Blocks
) -> tuple[Blocks, Blocks]:
    """`products` from the products of a chunk; g: None for decays that they contain; masks: by document."""
    decays = None if g is None else _decays(g)
    row, column = _places()
    below, decayed = {}, {}
    for i, j in scores:
        mask = masks[i, j] & (row >= column) if i == j else masks[i, j]
        factor = jnp.where(mask, 1.0 if decays is None else decays[i, j], 0.0)
        decayed[i, j] = factor * scores[i, j]
        product = beta[i][:, None] * (factor * among_keys[i, j])
        below[i, j] = jnp.where(row > column, product, 0) if i == j else product
    return below, decayed


class Chunk(NamedTuple):
    """The inputs of `products`."""

    q: Array
    """[B, M, L, G, K]."""
    k: Array
    """[B, M, L, G, K]."""
    g: Array
    """float32 [B, M, N, L], or [B, M, L, N, K] by channel."""
    beta: Array
    """float32 [B, M, N, L]."""


def _chunk_blocks(x: Chunk, tile: Any) -> tuple[list[Array], list[Array]]:
    """Blocks of q and k. tile: some channels."""
    count = range(x.k.shape[0] // BLOCK)
    q, k = ([read(ref, _block(i), tile) for i in count] for ref in (x.q, x.k))
    return q, k


def _masks(runs_ref: Any, count: int) -> Blocks:
    """Masks bool [16, 16]: whether two positions are of one document."""
    runs = [runs_ref[_block(i)] for i in range(count)]
    return {(i, j): runs[i][:, None] == runs[j][None] for i, j in _pairs(count)}


def _store(ref: Any, head: Array, blocks: Blocks) -> None:
    """All blocks of a head's matrix [L, L], which is 0 above the diagonal."""
    count = ref.shape[-1] // BLOCK
    for i in range(count):
        for j in range(count):
            block = blocks[i, j] if j <= i else jnp.zeros((BLOCK, BLOCK), jnp.float32)
            ref[head, _block(i), _block(j)] = block.astype(ref.dtype)


def _load(ref: Any, head: Array) -> Blocks:
    return {(i, j): read(ref, head, _block(i), _block(j)) for i, j in _pairs(ref.shape[-1] // BLOCK)}


class Method(NamedTuple):
    """How the products of a group are computed; the static arguments of both kernels."""

    dot: Dot
    by_channel: bool

    def tiles(self, keys: int) -> tuple[int, int]:
        """Number and size of the parts of the channels whose products add up."""
        size = min(CHANNELS, keys) if self.by_channel else keys
        return keys // size, size

    def of_tile(self, x: Chunk, tile: Any) -> tuple[Callable[..., Any], tuple[list[Array], ...]]:
        """A function of blocks of q, k and g of some channels, and the blocks; without g if decays are numbers."""
        blocks = range(x.k.shape[0] // BLOCK)
        q, k = ([read(ref, _block(i), tile) for i in blocks] for ref in (x.q, x.k))
        if not self.by_channel:
            return partial(_plain_products, dot=self.dot), (q, k)
        return partial(_decayed_products, dot=self.dot), (q, k, [read(x.g, _block(i), tile) for i in blocks])

    def over_tiles(self, keys: int, step: Callable[[Any, Any], Any], start: Any) -> Any:
        """A loop over the parts of the channels."""
        count, size = self.tiles(keys)
        return (
            step(slice(None), start) if count == 1 else _loop(count, lambda n, x: step(pl.ds(n * size, size), x), start)
        )

    def products(self, x: Chunk) -> tuple[Blocks, Blocks]:
        """Products of all channels."""
        zeros = {at: jnp.zeros((BLOCK, BLOCK), jnp.float32) for at in _pairs(x.k.shape[0] // BLOCK)}

        def add(tile: Any, sums: Any) -> Any:
            function, blocks = self.of_tile(x, tile)
            return jax.tree.map(jnp.add, sums, function(*blocks))

        return self.over_tiles(x.k.shape[-1], add, (zeros, dict(zeros)))

    def of_head(self, x: Chunk, head: Array) -> tuple[list[Array] | None, list[Array]]:
        """Blocks of g, if decays are numbers, and of beta."""
        blocks = range(x.k.shape[0] // BLOCK)
        g = None if self.by_channel else [read(x.g, head, _block(i)) for i in blocks]
        return g, [read(x.beta, head, _block(i)) for i in blocks]


def _loop(count: int, step: Callable[[Array, Any], Any], start: Any) -> Any:
    """A loop whose number is int32, as are its bounds."""
    return lax.fori_loop(jnp.int32(0), jnp.int32(count), step, start)


def _products_kernel(x: Chunk, runs_ref: Any, below_ref: Any, scores_ref: Any, *, method: Method) -> None:
    """One chunk of the heads of a group."""
    masks, of_group = _masks(runs_ref, x.k.shape[0] // BLOCK), method.products(x)

    def of_head(n: Array, carry: tuple[()]) -> tuple[()]:
        below, scores = _masked(*of_group, *method.of_head(x, n), masks)
        _store(below_ref, n, below)
        _store(scores_ref, n, scores)
        return carry

    _loop(x.beta.shape[0], of_head, ())


def _product_gradients_kernel(
    x: Chunk, runs_ref: Any, dbelow_ref: Any, dscores_ref: Any, out: Chunk, *, method: Method
) -> None:
    """Gradients of one chunk of the heads of a group."""
    derived = method._replace(dot=differentiable(method.dot))
    masks, of_group = _masks(runs_ref, x.k.shape[0] // BLOCK), method.products(x)

    def of_head(n: Array, sums: Any) -> Any:
        _, pull = jax.vjp(lambda *parts: _masked(*parts, masks), *of_group, *method.of_head(x, n))
        *dproducts, dg, dbeta = pull((_load(dbelow_ref, n), _load(dscores_ref, n)))
        for ref, gradients in ((out.g, dg), (out.beta, dbeta)):
            for i, gradient in enumerate(gradients or ()):
                ref[n, _block(i)] = gradient
        return jax.tree.map(jnp.add, sums, tuple(dproducts))

    dproducts = _loop(x.beta.shape[0], of_head, jax.tree.map(jnp.zeros_like, of_group))

    def of_tile(tile: Any, carry: tuple[()]) -> tuple[()]:
        function, blocks = derived.of_tile(x, tile)
        _, pull = jax.vjp(function, *blocks)
        for ref, gradients in zip((out.q, out.k, out.g), pull(dproducts), strict=False):
            for i, gradient in enumerate(gradients):
                ref[_block(i), tile] = gradient.astype(ref.dtype)
        return carry

    method.over_tiles(x.k.shape[-1], of_tile, ())


def _call(options: Options, x: Chunk, runs: Array, kernel: Callable, *gradients: Array) -> Any:
    """A kernel of chunks, groups and rows, which also reads gradients of the results, or writes results."""
    (rows, count, length, groups, keys), heads = x.k.shape, x.beta.shape[2]
    by_channel, share = x.g.ndim == 5, heads // groups
    shared: Any = pl.BlockSpec((None, None, length, None, keys), lambda chunk, group, row: (row, chunk, 0, group, 0))
    number: Any = pl.BlockSpec((None, None, share, length), lambda chunk, group, row: (row, chunk, group, 0))
    matrix = pl.BlockSpec((None, None, share, length, length), lambda chunk, group, row: (row, chunk, group, 0, 0))
    documents = pl.BlockSpec((None, None, length), lambda chunk, group, row: (row, chunk, 0))
    specs = Chunk(shared, shared, shared if by_channel else number, number)
    shape = (rows, count, heads, length, length)
    results = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, x.k.dtype)]
    like = [jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), x)]
    return options.call(
        partial(kernel, method=Method(dot_in(x.k.dtype), by_channel)),
        "delta_product_gradients" if gradients else "delta_products",
        grid=(count, groups, rows),
        in_specs=[specs, documents, *[matrix] * len(gradients)],
        out_specs=[specs] if gradients else [matrix, matrix],
        out_shape=like if gradients else results,
    )(x, runs, *gradients)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def products(options: Options, x: Chunk, runs: Array) -> tuple[Array, Array]:
    """The strictly lower triangular matrices of `inverse`, float32, and scores, in k's dtype; [B, M, N, L, L] each.

    At [i, j], of one document: products of k_i and k_j, and of q_i and k_j, with the decay after j up to i, and the
    first ones with beta_i. runs: int32 [B, M, L], numbers of documents. Saves its inputs for the backward pass.
    """
    below, scores = _call(options, x, runs, _products_kernel)
    return below, scores


def _products_forward(options: Options, x: Chunk, runs: Array) -> tuple[tuple[Array, Array], tuple[Chunk, Array]]:
    return products(options, x, runs), (x, runs)


def _products_backward(options: Options, saved: tuple[Chunk, Array], gradients: Any) -> tuple[Chunk, None]:
    (dx,) = _call(options, *saved, _product_gradients_kernel, *gradients)
    return dx, None


products.defvjp(_products_forward, _products_backward)


def _inverse_kernel(below_ref: Any, inverse_ref: Any) -> None:
    """One matrix, see `inverse`, in blocks of 16 x 16."""
    count = below_ref.shape[0] // BLOCK
    row, column = (lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis) for axis in (0, 1))

    def block(i: int, j: int) -> tuple[Any, Any]:
        return pl.ds(BLOCK * i, BLOCK), pl.ds(BLOCK * j, BLOCK)

    def substituted(below: Array) -> Array:
        def step(r: Array, inverse: Array) -> Array:
            # Row r is final; the rows after it lose their part of it.
            factors = jnp.where(column == r, below, 0).sum(1)
            return inverse - factors[:, None] * jnp.where(row == r, inverse, 0).sum(0)[None]

        return lax.fori_loop(jnp.int32(0), jnp.int32(BLOCK - 1), step, (row == column).astype(jnp.float32))

    blocks = {(i, i): substituted(below_ref[block(i, i)]) for i in range(count)}
    for apart in range(1, count):
        for i in range(apart, count):
            j = i - apart
            mixed = sum(
                (dot_float32(below_ref[block(i, m)], blocks[m, j]) for m in range(j, i)),
                start=jnp.zeros((BLOCK, BLOCK), jnp.float32),
            )
            blocks[i, j] = -dot_float32(blocks[i, i], mixed)
    for i in range(count):
        for j in range(count):
            value = blocks[i, j] if j <= i else jnp.zeros((BLOCK, BLOCK), jnp.float32)
            inverse_ref[block(i, j)] = value.astype(inverse_ref.dtype)


def _inverse_gradient_kernel(inverse_ref: Any, gradient_ref: Any, below_ref: Any) -> None:
    transposed, gradient = inverse_ref[...].T, gradient_ref[...]
    row, column = (lax.broadcasted_iota(jnp.int32, gradient.shape, axis) for axis in (0, 1))
    product = dot_float32(gradient, transposed).astype(transposed.dtype)
    below_ref[...] = jnp.where(row > column, -dot_float32(transposed, product), 0)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def inverse(options: Options, dtype: jnp.dtype, below: Array) -> Array:
    """(I + below)^-1 in this dtype, for strictly lower triangular matrices below, float32 [..., L, L].

    It is computed in float32, and its gradient from the rounded inverse. Zeros between documents stay.
    """
    return _by_matrix(options, _inverse_kernel, "delta_inverse", dtype, below)


def _by_matrix(options: Options, kernel: Callable, name: str, dtype: jnp.dtype, *arrays: Array) -> Array:
    """A kernel of matrices [..., L, L], one program for each."""
    *rest, length = arrays[0].shape[:-1]
    flat = [array.reshape(-1, length, length) for array in arrays]
    spec = pl.BlockSpec((None, length, length), lambda i: (i, 0, 0))
    result = options.call(
        kernel,
        name,
        warps=1 if len(arrays) == 1 else 4,
        grid=(flat[0].shape[0],),
        in_specs=[spec] * len(flat),
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(flat[0].shape, dtype),
    )(*flat)
    return result.reshape(*rest, length, length)


def _inverse_forward(options: Options, dtype: jnp.dtype, below: Array) -> tuple[Array, Array]:
    result = inverse(options, dtype, below)
    return result, result


def _inverse_backward(options: Options, dtype: jnp.dtype, result: Array, gradient: Array) -> tuple[Array]:
    name = "delta_inverse_gradient"
    return (_by_matrix(options, _inverse_gradient_kernel, name, jnp.dtype("float32"), result, gradient),)


inverse.defvjp(_inverse_forward, _inverse_backward)
