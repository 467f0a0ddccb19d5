"""The compiled steps of an engine: the model on tokens of many rows, with its cache, and the choice of next tokens.

There is a program for each bucket of shapes and each chooser of tokens. All of them can be compiled before the first
request.

The cache is a pool of blocks for tokens, and slots for rows. Each leaf that mixers declare
(`megajax.layers.cache_spec`) is one array for all layers that have it: of tokens [layers, blocks, block, ...], of rows
[layers, slots, ...]. Data-parallel replicas each have a part of the blocks and slots, and number them from 0.
"""

from collections import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding

from megajax.batch import Params
from megajax.inference.request import Sequence, Step
from megajax.inference.step_arrays import (
    Bucket,
    StepArrays,
    Texts,
    bucket_for,
    joined,
    lengths_up_to,
    pack,
    starting_rows,
    texts_of,
)  # fmt: skip
from megajax.kernels.paged.capability import PagedKernel
from megajax.layers.cache_spec import CacheLeaf, stored_leaves
from megajax.layers.context import Context
from megajax.layers.decoding import Cache, StepRows, write
from megajax.layers.param import bind
from megajax.mesh.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSize:
    """Size of a replica's cache."""

    blocks: int
    block: int
    """Tokens of a block."""
    slots: int
    """Maximum number of rows that run at the same time."""

    def tokens(self) -> int:
        """Tokens in all blocks."""
        return self.blocks * self.block


def like_cache(
    leaves: abc.Sequence[CacheLeaf], size: CacheSize, dtype: str, mesh: Mesh, layout: Layout, replicas: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of the cache, by name of the leaf; dtype as in `stored_leaves`."""
    cache = {}
    for leaf in stored_leaves(leaves, dtype):
        first = (size.blocks, size.block) if leaf.per == "token" else (size.slots,)
        shape = (leaf.layers, replicas * first[0], *first[1:], *leaf.shape)
        axes = (None, "batch", *[None] * (len(first) - 1), *leaf.axes)
        sharding = NamedSharding(mesh, layout.plan.compute.spec(axes))
        cache[leaf.name] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
    return cache


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on a mesh, with the weights that its layers use."""

    cfg: Any
    """A `megajax.models.protocol.ModelConfig`."""
    model: nnx.Module
    """The module with abstract arrays."""
    weights: Params
    """Weights by path, in the compute dtype."""
    mesh: Mesh
    layout: Layout
    matmul_precision: str | None = None
    """jax_default_matmul_precision of its steps."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Compiler options."""


class StepOutput(NamedTuple):
    """Output of the model in a step, for the choice of tokens. Unused outputs are not computed."""

    logits: Array
    """float32 [sampled rows, V], of the tokens that follow; laid out (batch, vocab), with columns for padding."""
    tokens: Array
    """int32 [sampled rows, L]: the tokens of each row from the cache; undefined past the row's end."""
    prompt: Array
    """[chunk, 1, D]: output of the stack for the prompt's tokens; empty in steps without a prompt."""
    logits_of: Callable[[Array], Array]
    """Outputs of the stack [T, 1, D] -> logits float32 [T, V]."""


class Chooser(Protocol):
    """A way to choose the next tokens; hashable."""

    def like(self, rows: int, chunk: int) -> Any:
        """A pytree of its input arrays, as jax.ShapeDtypeStruct.

        Shapes are [rows, ...], or [chunk, ...] for the prompt's tokens, over all replicas.
        """
        ...

    def __call__(self, layout: Layout, out: StepOutput, inputs: Any) -> Any:
        """The output of a step and those arrays -> a pytree of arrays."""
        ...


TOKENS = CacheLeaf("tokens", (), (), dtype="int32")
"""Token ids in the cache, so that penalties need no other state for rows that share blocks or are recomputed."""


class StepResult(NamedTuple):
    """A step that was dispatched to the device."""

    bucket: Bucket
    chosen: Any
    """Output of the chooser, arrays on the device: `bucket.sampled` rows of each replica, concatenated."""

    def row(self, replica: int, place: int, *, prompt: bool = False) -> int:
        """The index in `chosen` of a decoding row, by its index in `Step.decode`, or of the prompt."""
        return replica * self.bucket.sampled + (self.bucket.rows if prompt else place)


def buckets_up_to(rows: int, chunk: int, *, invariant: bool = False) -> tuple[Bucket, ...]:
    """Powers of 2 up to `rows`, each with and without a prompt of `chunk` tokens.

    invariant: only the largest bucket with a prompt, so that every token is computed in the same shapes.
    """
    counts = [rows]
    # A step of one token would copy the pool: XLA turns a scatter of one row into a dynamic-update-slice.
    while counts[-1] > 2 and not invariant:
        counts.append(max(2, 1 << (counts[-1] - 1).bit_length() - 1))
    chunks = (chunk,) if invariant else (0, chunk)
    return tuple(sorted(Bucket(count, prompt_tokens) for count in counts for prompt_tokens in chunks))


class Programs:
    """The compiled programs of a model and the arrays of its cache."""

    def __init__(
        self,
        loaded: LoadedModel,
        size: CacheSize,
        *,
        buckets: abc.Sequence[Bucket],
        choosers: abc.Sequence[Chooser],
        length: int,
        dtype: str,
        kernel: PagedKernel,
    ):
        """length: maximum number of tokens of a row, prompt and answer; dtype: of the cache."""
        self.loaded, self.size, self.buckets, self.length, self.kernel = loaded, size, tuple(buckets), length, kernel
        self.choosers = tuple(choosers)
        shape = loaded.mesh.shape
        self.replicas = shape["data"] * shape["expert"]
        self.leaves: tuple[CacheLeaf, ...] = (*loaded.cfg.cache_leaves(shape["tensor"]), TOKENS)
        self.width = -(-length // size.block)
        self.cache_like = like_cache(self.leaves, size, dtype, loaded.mesh, loaded.layout, self.replicas)
        self.text_lengths = lengths_up_to(loaded.cfg.memory_length())
        self.compiled: dict[tuple[Bucket, Chooser] | int, Callable[..., Any]] = {}
        """Steps, and encoder programs by length."""

    @cached_property
    def cache(self) -> Cache:
        """The arrays of the cache; created when first used, so that steps can be compiled without devices."""
        like = self.cache_like
        return {name: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding) for name, leaf in like.items()}

    @property
    def rows(self) -> int:
        """Maximum number of decoding rows of a replica in a step."""
        return max(bucket.rows for bucket in self.buckets)

    @property
    def chunk(self) -> int:
        """Maximum number of prompt tokens in a step."""
        return max(bucket.chunk for bucket in self.buckets)

    @property
    def prefix_sharing(self) -> bool:
        """Whether rows may share blocks; false if layers keep a state per row."""
        return all(leaf.per == "token" for leaf in self.leaves)

    def compile(self) -> Iterator[tuple[Bucket, Chooser]]:
        """Compile all programs; yields each step after its compilation."""
        for length in self.text_lengths:
            self._program(length)
        for bucket in self.buckets:
            for chooser in self.choosers:
                self._program((bucket, chooser))
                yield bucket, chooser
        # Created now, so that the first request does not wait for it or run out of memory.
        jax.block_until_ready(self.cache)

    def _program(self, key: tuple[Bucket, Chooser] | int) -> Callable[..., Any]:
        """A step, or the encoder program of a length; compiled when first needed."""
        if key not in self.compiled:
            lowered = self.lowered_encoder(key) if isinstance(key, int) else self.lowered(*key)
            self.compiled[key] = lowered.compile(compiler_options=dict(self.loaded.options))
        return self.compiled[key]

    def lowered(self, bucket: Bucket, chooser: Chooser) -> jax.stages.Lowered:
        """The lowered step of a bucket."""
        loaded = self.loaded

        def step(weights: Params, cache: Cache, arrays: StepArrays, inputs: Any) -> tuple[Any, Cache]:
            model = bind(loaded.model, weights)
            out, cache = step_output(model, loaded.layout, cache, arrays, bucket.groups(), self.kernel)
            return chooser(loaded.layout, out, inputs), cache

        with jax.set_mesh(loaded.mesh), jax.default_matmul_precision(loaded.matmul_precision):
            weights = jax.tree.map(_like, loaded.weights)
            needed = chooser.like(self.replicas * bucket.sampled, self.replicas * bucket.chunk)
            inputs = jax.tree.map(lambda leaf: self._like(leaf.shape, leaf.dtype), needed)
            return jax.jit(step, donate_argnums=1).lower(weights, self.cache_like, self.like(bucket), inputs)

    def run(self, work: abc.Sequence[Step | None], chooser: Chooser, inputs: Callable[[Bucket], Any]) -> StepResult:
        """Run a step of each replica.

        inputs: bucket -> the chooser's arrays: `bucket.sampled` rows or `bucket.chunk` tokens of each replica,
        concatenated.
        """
        starting = starting_rows(work) if self.text_lengths else None
        if starting is not None:
            self.encode_texts(starting)
        bucket = bucket_for(work, self.buckets)
        arrays = joined([pack(step, bucket, block=self.size.block, width=self.width) for step in work])
        chosen, self.cache = self._program((bucket, chooser))(self.loaded.weights, self.cache, arrays, inputs(bucket))
        return StepResult(bucket, chosen)

    def encode_texts(self, rows: abc.Sequence[Sequence | None]) -> None:
        """Run the encoder on the texts of rows, one of each replica, and write its output into their slots."""
        texts = texts_of(rows, self.text_lengths)
        self.cache = self._program(texts.tokens.shape[1])(self.loaded.weights, self.cache, texts)

    def lowered_encoder(self, length: int) -> jax.stages.Lowered:
        """The lowered encoder program of a text length."""
        loaded, rows = self.loaded, self.replicas

        def encode(weights: Params, cache: Cache, texts: Texts) -> Cache:
            step_rows = StepRows(
                groups=((1, length),),
                kernel=self.kernel,
                slots=jnp.zeros(rows, jnp.int32),
                tables=(jnp.zeros((rows, 1), jnp.int32),),
                counts=(texts.counts,),
                states=(texts.states,),
                layer=jnp.int32(0),
            )
            ctx = Context(jnp.zeros((rows, 1), jnp.int32), jnp.zeros(1, jnp.int32), rows=step_rows)
            model: Any = bind(loaded.model, weights)
            return {**cache, **model.remember(texts.tokens, of_layers(cache), ctx)}

        with jax.set_mesh(loaded.mesh), jax.default_matmul_precision(loaded.matmul_precision):
            weights, cache = (jax.tree.map(_like, tree) for tree in (loaded.weights, self.cache))
            texts = Texts(self._like((rows, length)), self._like((rows,)), self._like((rows,)))
            return jax.jit(encode, donate_argnums=1).lower(weights, cache, texts)

    def like(self, bucket: Bucket) -> StepArrays:
        """Shapes and shardings of the arrays of a step."""
        tokens, groups = self.replicas * bucket.tokens, bucket.groups()
        column, group_rows = self._like((tokens, 1)), [self.replicas * rows for rows, _ in groups]
        tables = tuple(self._like((rows, self.width)) for rows in group_rows)
        counts = tuple(self._like((rows,)) for rows in group_rows)
        last = self._like((self.replicas * bucket.sampled,))
        return StepArrays(column, column, self._like((tokens,)), tables, counts, counts, last)

    def _like(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        spec = self.loaded.layout.plan.compute.spec(("batch", *[None] * (len(shape) - 1)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.loaded.mesh, spec))


def step_output(
    model: Any,
    layout: Layout,
    cache: Mapping[str, Array],
    arrays: StepArrays,
    groups: tuple[tuple[int, int], ...],
    kernel: PagedKernel,
) -> tuple[StepOutput, Cache]:
    """The output of a step, and the cache with its tokens."""
    rows = StepRows(
        groups=groups,
        kernel=kernel,
        slots=arrays.slots,
        tables=arrays.tables,
        counts=arrays.counts,
        states=arrays.states,
        layer=jnp.int32(0),
    )
    ids, tokens = _row_tokens(layout, cache[TOKENS.name], arrays.tokens, rows)
    ctx = Context(arrays.positions, jnp.zeros(1, jnp.int32), rows=rows)
    x, cache = model.step(arrays.tokens, of_layers(cache), ctx)
    token = ("batch", None, None)

    def parts(x: Array, last: Array) -> tuple[Array, Array]:
        return x[last], x[rows.parts()[1]] if len(groups) > 1 else x[:0]

    decoded, prompt = layout.island(parts, (token, ("batch",)), (token, token))(x, arrays.last)

    def logits_of(x: Array) -> Array:
        return model.next_logits(x)[:, 0]

    return StepOutput(logits_of(decoded), tokens, prompt, logits_of), {**cache, TOKENS.name: ids}


def of_layers(cache: Cache) -> Cache:
    """The cache leaves of layers."""
    return {name: leaf for name, leaf in cache.items() if name != TOKENS.name}


def _row_tokens(layout: Layout, leaf: Array, new: Array, rows: StepRows) -> tuple[Array, Array]:
    """The leaf `TOKENS` with those of the step [T, 1], and the tokens of the sampled rows, int32 [sampled rows, L]."""

    def local(leaf: Array, new: Array, rows: StepRows) -> tuple[Array, Array]:
        leaf = write(leaf, new[:, 0], rows)
        gathered = [leaf[0][table] for table in rows.tables]
        return leaf, jnp.concatenate([blocks.reshape(blocks.shape[0], -1) for blocks in gathered])

    pool, row = (None, "batch", None), ("batch", None)
    return layout.island(local, (pool, row, rows.axes()), (pool, row))(leaf, new, rows)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
