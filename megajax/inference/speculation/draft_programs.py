"""What programs that draft with weights have in common: a cache with the blocks of the model, and one token at a time.

R rows of all replicas, M blocks of a table.
"""

from collections import abc
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.inference.loaded_model import LoadedModel
from megajax.inference.model_step import step_rows
from megajax.inference.programs import CacheSize, like_cache
from megajax.inference.sampling.choose import Drawing, Program, RowSampling, choose
from megajax.inference.step_arrays import NOWHERE, Bucket, StepArrays
from megajax.kernels.paged.capability import PagedKernel
from megajax.layers.cache_spec import CacheLeaf
from megajax.layers.context import Context
from megajax.layers.decoding import Cache, StepRows
from megajax.mesh.config import BATCH_AXES, devices_over


class DraftPrograms:
    """The compiled programs of drafts, one for each bucket of the steps that verify, and their cache."""

    name: str
    """Of its programs."""

    def __init__(
        self,
        loaded: LoadedModel,
        leaves: tuple[CacheLeaf, ...],
        size: CacheSize,
        *,
        buckets: abc.Sequence[Bucket],
        vocabulary: int,
        length: int,
        dtype: str,
        kernel: PagedKernel,
    ):
        """loaded: with shapes in place of weights; leaves: of the cache, which has this size; vocabulary: ids in use;
        buckets, length, dtype: of the programs that verify, see `Programs`; all buckets have drafts."""
        self.loaded, self.leaves, self.buckets = loaded, leaves, tuple(buckets)
        self.vocabulary, self.kernel, self.block, self.width = vocabulary, kernel, size.block, -(-length // size.block)
        self.replicas = devices_over(loaded.mesh.shape, BATCH_AXES)
        self.cache_like = like_cache(leaves, size, dtype, loaded.mesh, loaded.layout, self.replicas)
        self.compiled: dict[Bucket, jax.stages.Compiled] = {}

    @cached_property
    def cache(self) -> Cache:
        """The arrays of the cache; created when first used."""
        like = self.cache_like
        return {name: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding) for name, leaf in like.items()}

    def drop_cache(self) -> None:
        """Release the memory of the cache; the next use creates an empty one."""
        self.__dict__.pop("cache", None)

    def needed(self) -> list[tuple[str, Callable[[], object]]]:
        """The name of each program, and how to compile it."""
        return [(f"{self.name}, {bucket}", partial(self.program, bucket)) for bucket in self.buckets]

    def program(self, bucket: Bucket) -> jax.stages.Compiled:
        """The program of a bucket; compiled when first needed."""
        if bucket not in self.compiled:
            self.compiled[bucket] = self.lowered(bucket).compile(compiler_options=dict(self.loaded.options))
        return self.compiled[bucket]

    def lowered(self, bucket: Bucket) -> jax.stages.Lowered:
        """The lowered program of a bucket."""
        raise NotImplementedError

    def lower(self, program: Callable[..., Any], out: tuple[Any, ...], *inputs: Any) -> jax.stages.Lowered:
        """Lower program(weights, cache, *inputs) -> (*outputs, cache), which writes the cache in place.

        out: shardings of the outputs.
        """
        loaded, cache = self.loaded, {name: leaf.sharding for name, leaf in self.cache_like.items()}
        with jax.set_mesh(loaded.mesh), jax.default_matmul_precision(loaded.matmul_precision):
            jitted = jax.jit(program, donate_argnums=1, out_shardings=(*out, cache))
            return jitted.lower(loaded.weights, self.cache_like, *inputs)

    def token_step(self, tables: Array, positions: Array, present: Array) -> Context:
        """The context of a step of one token at these positions int32 [R] of the rows that are present, bool [R].

        tables: int32 [R, M].
        """
        count, numbers = positions.shape[0], jnp.arange(positions.shape[0], dtype=jnp.int32)
        blocks = jnp.take_along_axis(tables, (positions // self.block)[:, None], axis=1, mode="clip")[:, 0]
        arrays = StepArrays(
            tokens=None,
            positions=positions[:, None],
            slots=jnp.where(present, blocks * self.block + positions % self.block, NOWHERE + numbers),
            tables=(tables,),
            counts=(present.astype(jnp.int32),),
            states=(NOWHERE + numbers,),
            last=None,
        )
        return step_context(
            arrays.positions, step_rows(arrays, ((count // self.replicas, 1),), self.kernel, self.loaded)
        )

    def chosen(self, logits: Array, drawing: Drawing, ahead: Array | int) -> Array:
        """The tokens by logits [R, V], int32 [R]; 0 without a finite logit, which the model that verifies rejects.

        ahead: number of tokens after that of `drawing`.
        """
        rows = RowSampling(drawing._replace(number=drawing.number + ahead))
        token = choose(self.loaded.layout, self.vocabulary, Program.SAMPLED, 1, logits, rows).token
        return jnp.maximum(token, 0)

    def like(self, count: int, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """The shape of an array [count, ...] of each replica."""
        sharding = self.sharding("batch", *[None] * len(shape))
        return jax.ShapeDtypeStruct((self.replicas * count, *shape), dtype, sharding=sharding)

    def drawing_like(self, bucket: Bucket) -> Drawing:
        """The shapes of how rows draw."""
        real, number = self.like(bucket.rows, dtype=np.float32), self.like(bucket.rows)
        return Drawing(real, number, real, real, self.like(bucket.rows, 2, dtype=np.uint32), number)

    def arrays_like(self, bucket: Bucket) -> StepArrays:
        """The shapes of the arrays of a step."""
        groups = [rows for rows, _ in bucket.groups()]
        column, counts = self.like(bucket.tokens, 1), tuple(self.like(rows) for rows in groups)
        tables = tuple(self.like(rows, self.width) for rows in groups)
        return StepArrays(column, column, self.like(bucket.tokens), tables, counts, counts, self.like(bucket.choices))

    def sharding(self, *axes: str | None) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(self.loaded.mesh, self.loaded.layout.plan.compute.spec(axes))


def step_context(positions: Array, rows: StepRows) -> Context:
    """The context of a step. positions: int32 [T, 1]."""
    return Context(positions, jnp.zeros(1, jnp.int32), rows=rows)
