"""Attention to a paged cache as Pallas Triton kernels, for NVIDIA GPUs from compute capability 8.0 on.

The keys of a row are divided into splits at fixed positions (flash-decoding, Dao et al. 2023). If rows have few
queries, each split has its own program, and a second kernel merges the splits. If rows have many queries, one program
loops over all splits for a tile of queries. Both merge in the order of positions with the same arithmetic, so the
result of a query does not depend on the other rows of a step or their lengths.

R rows, W queries per row, N query heads, K key-value heads (N a multiple of K), H head size, U size of a value head,
P blocks of the pool, M blocks of a row's table, S splits of a table.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from megajax.kernels.attention.pallas import LOG2_E, dot_float32, head_tiles, next_power
from megajax.kernels.paged.pools import PagedQueries, Pools, first_seen
from megajax.kernels.soft_cap import soft_capped

SHORTEST_SPLIT, MOST_SPLITS = 256, 32
"""The size of a split is the smallest power of two from 256 on that gives a table at most 32 splits."""
FEW_QUERIES = 16
"""Rows with at most this many queries compute their splits in separate programs."""
LARGEST_8_BIT_POOL = 2**31
"""Number of elements up to which offsets fit into int32; Pallas lowers offsets to int64 from 4 GiB on."""


class _KernelSizes(NamedTuple):
    """The static arguments of both kernels."""

    width: int
    heads: int
    share: int
    """Query heads per key-value head."""
    key_tiles: tuple[tuple[int, int], ...]
    """(first, size) of the powers of two that make up a key head; those of values first if keys contain the values."""
    value_tiles: tuple[tuple[int, int], ...]
    queries: int
    """Queries per tile, a power of two from 16 on."""
    keys: int
    """Keys per step of the loop, a power of two from 16 on."""
    split: int
    """Positions per split."""
    splits: int
    scale: float
    window: int | None
    cap: float | None
    chunk: int | None

    @property
    def tiles(self) -> int:
        """Number of tiles of a row's queries that read the same key-value head."""
        return pl.cdiv(self.width * self.share, self.queries)

    @property
    def parallel_splits(self) -> bool:
        """Whether each split has its own program."""
        return self.splits > 1 and self.width <= FEW_QUERIES

    def parameters(self) -> triton.CompilerParams:
        """Compiler parameters. Larger sums need the registers of more warps."""
        return triton.CompilerParams(num_warps=4 if self.queries * self.value_tiles[0][1] <= 4096 else 8, num_stages=2)


def _sizes(queries: PagedQueries, pools: Pools) -> _KernelSizes:
    q, table = queries.q, queries.table
    (_, width, heads, size), (_, block, groups, _) = q.shape, pools.keys.shape
    share, value_tiles = heads // groups, head_tiles(pools.value_size)
    key_tiles = head_tiles(size)
    if pools.values is None:
        after = head_tiles(size - pools.value_size)
        key_tiles = (*value_tiles, *((pools.value_size + first, tile) for first, tile in after))
    largest = max(tile for _, tile in (*key_tiles, *value_tiles))
    length = table.shape[1] * block
    split = max(SHORTEST_SPLIT, next_power(pl.cdiv(length, MOST_SPLITS)))
    tile = min(next_power(width * share), 64 if largest <= 128 else 16)
    keys = 64 if largest <= 128 else 32
    splits, limits = pl.cdiv(length, split), (queries.scale, queries.window, queries.cap, queries.chunk)
    return _KernelSizes(width, heads, share, key_tiles, value_tiles, tile, keys, split, splits, *limits)


class _Queries(NamedTuple):
    """A tile of queries of one row that read the same key-value head."""

    row: Array
    group: Array
    """The key-value head."""
    index: Array
    """int32 [queries]: query * N + head; W * N beyond the last query."""
    inside: Array
    """The same, but the index of the last query beyond it."""
    head: Array
    """int32 [queries]."""
    position: Array
    """int32 [queries]; negative for no query."""
    first: Array
    """First position that any of the queries sees."""
    last: Array
    """Last position that any of them sees; -1 for none."""

    @classmethod
    def of_program(cls, positions: Ref, sizes: _KernelSizes) -> "_Queries":
        """positions: ref int32 [R, W]."""
        group, tile = lax.div(pl.program_id(0), _int(sizes.tiles)), lax.rem(pl.program_id(0), _int(sizes.tiles))
        row, used = pl.program_id(2), sizes.width * sizes.share
        place = tile * sizes.queries + _range(sizes.queries)
        number = jnp.minimum(place, used - 1)
        query, head = lax.div(number, _int(sizes.share)), group * sizes.share + lax.rem(number, _int(sizes.share))
        position = jnp.where(place < used, triton.load(positions.at[row, query]), -1)
        lowest = jnp.min(jnp.where(position < 0, jnp.iinfo(jnp.int32).max, position))
        first = first_seen(lowest, sizes.window, sizes.chunk)
        inside = query * sizes.heads + head
        index = jnp.where(place < used, inside, sizes.width * sizes.heads)
        return cls(row, group, index, inside, head, position, first, jnp.max(position))

    def filled(self, sizes: _KernelSizes) -> Array:
        """bool [queries]: whether there is a query."""
        return self.index < sizes.width * sizes.heads

    def splits(self, sizes: _KernelSizes) -> tuple[Array, Array]:
        """The first split with a key that any of the queries sees, and the one after the last such split."""
        return lax.div(self.first, _int(sizes.split)), lax.div(self.last + sizes.split, _int(sizes.split))


class _Sums(NamedTuple):
    """Partial sums of a softmax over some keys, for each query of a tile; float32."""

    highest: Array
    """The highest score, times log2(e); -inf without keys."""
    total: Array
    """Sum of the weights, relative to the weight of the highest score."""
    mixed: tuple[Array, ...]
    """Values times weights, by tiles of a value head."""

    @classmethod
    def empty(cls, sizes: _KernelSizes) -> "_Sums":
        mixed = tuple(jnp.zeros((sizes.queries, tile), jnp.float32) for _, tile in sizes.value_tiles)
        return cls(jnp.full(sizes.queries, -jnp.inf, jnp.float32), jnp.zeros(sizes.queries, jnp.float32), mixed)

    @classmethod
    def with_sink(cls, sink: Ref, queries: _Queries, sizes: _KernelSizes) -> "_Sums":
        """sink: ref float32 [N], one score per head without a value; None: empty sums."""
        nothing = cls.empty(sizes)
        if sink is None:
            return nothing
        return nothing._replace(highest=triton.load(sink.at[queries.head]) * LOG2_E, total=nothing.total + 1)

    def plus(self, other: "_Sums") -> "_Sums":
        """The sums over the keys of both."""
        highest = jnp.maximum(self.highest, other.highest)
        finite = jnp.where(highest == -jnp.inf, 0.0, highest)
        scale, other_scale = jnp.exp2(self.highest - finite), jnp.exp2(other.highest - finite)
        pairs = zip(self.mixed, other.mixed, strict=True)
        mixed = tuple(x * scale[:, None] + y * other_scale[:, None] for x, y in pairs)
        return _Sums(highest, self.total * scale + other.total * other_scale, mixed)

    def store(self, out: Ref, queries: _Queries, sizes: _KernelSizes) -> None:
        """Stores the weighted mean of values in out, a ref [R, W * N, U]; 0 without keys."""
        divisor = jnp.where(self.total > 0, self.total, 1.0)[:, None]
        _store_tiles(out, (queries.row,), queries, tuple(x / divisor for x in self.mixed), sizes)


def _int(number: int) -> Array:
    """Bounds of a loop, and both sides of a division, must have one type, int32."""
    return jnp.int32(number)


def _range(size: int, first: Array | int = 0) -> Array:
    return first + jnp.arange(size, dtype=jnp.int32)


def _store_tiles(out: Ref, at: tuple, queries: _Queries, values: tuple[Array, ...], sizes: _KernelSizes) -> None:
    for (first, tile), value in zip(sizes.value_tiles, values, strict=True):
        place = out.at[(*at, queries.index[:, None], _range(tile, first)[None])]
        mask = jnp.broadcast_to(queries.filled(sizes)[:, None], value.shape)
        triton.store(place, value.astype(out.dtype), mask=mask)


def _sums_of_split(
    number: Array, q: list[Array], pools: Pools, table: Ref, queries: _Queries, sizes: _KernelSizes
) -> _Sums:
    """The sums over the keys of one split. q: the tiles of the queries' heads, each [queries, tile]."""
    block, most = pools.keys.shape[1], table.shape[1]
    start = jnp.maximum(number * sizes.split, queries.first)
    end = jnp.minimum((number + 1) * sizes.split, queries.last + 1)

    def step(i: Array, sums: _Sums) -> _Sums:
        at = i * sizes.keys + _range(sizes.keys)
        # Values after the last position or in freed blocks may be NaN; they are not read.
        in_range = (at >= queries.first) & (at <= queries.last)
        ids = triton.load(table.at[queries.row, jnp.minimum(lax.div(at, _int(block)), most - 1)])
        place = lax.rem(at, _int(block))

        def load(pool: Any, tile: tuple[int, int]) -> Array:
            x = pool.at[ids[:, None], place[:, None], queries.group, _range(tile[1], tile[0])[None]]
            return triton.load(x, mask=in_range[:, None], other=jnp.zeros((), pool.dtype)).astype(q[0].dtype)

        def scaled(x: Array, scales: Any) -> Array:
            if scales is None:
                return x
            by = triton.load(scales.at[ids, place, queries.group], mask=in_range, other=jnp.zeros((), scales.dtype))
            return x * by.astype(jnp.float32)[None]

        keys = [load(pools.keys, tile) for tile in sizes.key_tiles]
        values = keys if pools.values is None else [load(pools.values, tile) for tile in sizes.value_tiles]
        scores = sum((dot_float32(x, y.T) for x, y in zip(q, keys, strict=True)), start=jnp.float32(0))
        scores = soft_capped(scaled(scores, pools.key_scales) * sizes.scale, sizes.cap) * LOG2_E
        before = queries.position[:, None] - at[None]
        visible = before >= 0
        if sizes.window is not None or sizes.chunk is not None:
            visible &= at[None] >= first_seen(queries.position, sizes.window, sizes.chunk)[:, None]
        scores = jnp.where(visible, scores, -jnp.inf)
        highest = jnp.maximum(sums.highest, scores.max(1))
        finite = jnp.where(highest == -jnp.inf, 0.0, highest)
        weights, shrink = jnp.exp2(scores - finite[:, None]), jnp.exp2(sums.highest - finite)
        total = sums.total * shrink + weights.sum(1)
        of_values = pools.key_scales if pools.values is None else pools.value_scales
        weights = scaled(weights, of_values).astype(q[0].dtype)
        pairs = zip(sums.mixed, values, strict=False)
        return _Sums(highest, total, tuple(x * shrink[:, None] + dot_float32(weights, y) for x, y in pairs))

    tiles = lax.div(start, _int(sizes.keys)), lax.div(end + sizes.keys - 1, _int(sizes.keys))
    return lax.fori_loop(*tiles, step, _Sums.empty(sizes))


def _attention_kernel(
    q_ref: Ref, pools: Pools, table: Ref, positions: Ref, sink: Ref, *outputs: Ref, sizes: _KernelSizes
) -> None:
    """Computes a tile of queries. outputs: refs of `_Sums`, each [R, S, W * N, ...], or of the result [R, W * N, U]."""
    queries = _Queries.of_program(positions, sizes)
    first, end = queries.splits(sizes)
    columns = [_range(tile, at)[None] for at, tile in sizes.key_tiles]
    q = [triton.load(q_ref.at[queries.row, queries.inside[:, None], column]) for column in columns]

    def of_split(number: Array) -> _Sums:
        return _sums_of_split(number, q, pools, table, queries, sizes)

    if not sizes.parallel_splits:
        sums = _Sums.with_sink(sink, queries, sizes)
        lax.fori_loop(first, end, lambda i, sums: sums.plus(of_split(i)), sums).store(outputs[0], queries, sizes)
        return
    number = pl.program_id(1)
    highest, total, mixed = outputs

    @pl.when((number >= first) & (number < end))
    def _() -> None:
        sums, at = of_split(number), (queries.row, number)
        _store_tiles(mixed, at, queries, sums.mixed, sizes)
        triton.store(highest.at[(*at, queries.index)], sums.highest, mask=queries.filled(sizes))
        triton.store(total.at[(*at, queries.index)], sums.total, mask=queries.filled(sizes))


def _merge_kernel(sums_ref: Ref, positions: Ref, sink: Ref, out: Ref, *, sizes: _KernelSizes) -> None:
    """Merges the splits of one tile of queries in order. sums_ref: refs of `_Sums` that `_attention_kernel` wrote."""
    highest_ref, total_ref, mixed_ref = sums_ref
    queries = _Queries.of_program(positions, sizes)

    def add(number: Array, sums: _Sums) -> _Sums:
        at = (queries.row, number, queries.inside)
        columns = [_range(tile, first)[None] for first, tile in sizes.value_tiles]
        place = (queries.row, number, queries.inside[:, None])
        mixed = tuple(triton.load(mixed_ref.at[(*place, column)]) for column in columns)
        highest, total = (triton.load(x.at[at]) for x in (highest_ref, total_ref))
        return sums.plus(_Sums(highest, total, mixed))

    sums = _Sums.with_sink(sink, queries, sizes)
    lax.fori_loop(*queries.splits(sizes), add, sums).store(out, queries, sizes)


def paged_attention(queries: PagedQueries, pools: Pools, *, interpret: bool = False) -> Array:
    """See `megajax.kernels.paged.pools.Attend`. `interpret` runs the kernels on a CPU.

    H and U are multiples of 16. Raises ValueError for a bias, which `megajax.kernels.paged.capability` refuses earlier.
    """
    q, table, positions, sink = queries.q, queries.table, queries.positions, queries.sink
    if queries.bias is not None:
        raise ValueError("the Triton kernel of a paged cache has no bias of scores: choose reference or tiled")
    for name, pool in (("keys", pools.keys), ("values", pools.values)):
        if pool is not None and pool.dtype.itemsize == 1 and LARGEST_8_BIT_POOL < pool.size <= 2 * LARGEST_8_BIT_POOL:
            raise ValueError(
                f"{name} of the cache have {pool.size:,} elements of 1 byte on a device; "
                f"this kernel takes up to {LARGEST_8_BIT_POOL:,}, or more than {2 * LARGEST_8_BIT_POOL:,}"
            )
    sizes, (rows, width, heads, _) = _sizes(queries, pools), q.shape
    sink = None if sink is None else sink.astype(jnp.float32)
    flat = jax.ShapeDtypeStruct((rows, width * heads, pools.value_size), q.dtype)
    call = partial(pl.pallas_call, compiler_params=sizes.parameters(), interpret=interpret)
    programs, kernel = sizes.tiles * pools.keys.shape[2], partial(_attention_kernel, sizes=sizes)
    inputs = q.reshape(rows, width * heads, -1), pools, table, positions, sink
    if sizes.parallel_splits:
        shape = (rows, sizes.splits, width * heads)
        shapes = shape, shape, (*shape, pools.value_size)
        sums = [jax.ShapeDtypeStruct(sums_shape, jnp.float32) for sums_shape in shapes]
        grid = (programs, sizes.splits, rows)
        sums = call(kernel, out_shape=sums, grid=grid, name="paged_attention_splits")(*inputs)
        inputs, kernel = (sums, positions, sink), partial(_merge_kernel, sizes=sizes)
    name = "paged_attention_merge" if sizes.parallel_splits else "paged_attention"
    out = call(kernel, out_shape=flat, grid=(programs, 1, rows), name=name)(*inputs)
    return out.reshape(*q.shape[:3], -1)
