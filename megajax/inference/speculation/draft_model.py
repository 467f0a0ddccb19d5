"""Drafts by a second, smaller model with the same tokens.

The draft model has a cache of its own with the blocks of the model that verifies the drafts: the same tables, so that
sharing and preemption hold for both. In each step it first computes the tokens of the step that it has not computed,
then one token of each decoding row at a time, all in one program. Keys of rejected tokens stay in the blocks of their
row until the next tokens overwrite them.

A token of a draft is chosen with the random numbers, the temperature and the filters with which the other model chooses
the token at this place; penalties, biases and constraints do not apply to drafts. With equal logits both choose the
same one. For probabilities p and q, the Gumbel-max method agrees with probability
sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) (Moulton and Jiang 2018, "Maximally consistent sampling and the Jaccard index
of probability distributions"), which is between (1 - d) / (1 + d) and 1 - d for their distance in total variation d.
Rejection sampling (Leviathan et al. 2023) accepts with probability 1 - d, but gives other tokens than steps without
drafts.

R rows of a step, K tokens of a draft, T tokens of a step.
"""

from collections import abc
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakSet

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.batch import Params
from megajax.inference.loaded_model import Draft
from megajax.inference.model_step import STATES, step_rows
from megajax.inference.programs import CacheSize, like_cache
from megajax.inference.request import Sequence, Step
from megajax.inference.sampling.choose import Drawing, Program, RowSampling, choose
from megajax.inference.sampling.chooser import Choice, row_sampling
from megajax.inference.step_arrays import NOWHERE, Bucket, StepArrays, joined, pack
from megajax.kernels.paged.capability import PagedKernel
from megajax.layers.context import Context
from megajax.layers.decoding import Cache, StepRows

COLUMN = ("batch", None)
LATEST = 2
"""Most tokens of a decoding row that the draft model has not computed: the last one, and the one before it if the step
before accepted a whole draft."""


class DraftModel:
    """The compiled programs of a draft model, one for each bucket of the steps that verify, and its cache."""

    def __init__(
        self,
        draft: Draft,
        size: CacheSize,
        *,
        buckets: abc.Sequence[Bucket],
        vocabulary: int,
        length: int,
        dtype: str,
        kernel: PagedKernel,
    ):
        """size, buckets, length, dtype: of the programs that verify, see `Programs`; all buckets have drafts.
        vocabulary: ids in use."""
        self.loaded, self.where, self.vocabulary, self.kernel = draft.model.described(), draft.where, vocabulary, kernel
        self.weights = dict(draft.model.weights)
        """Empty while they are elsewhere."""
        self.size, self.buckets, self.width = size, tuple(buckets), -(-length // size.block)
        loaded, shape = self.loaded, self.loaded.mesh.shape
        self.replicas = shape["data"] * shape["expert"]
        self.leaves = loaded.cfg.cache_leaves(loaded.layout.plan.tensor)
        self.cache_like = like_cache(self.leaves, size, dtype, loaded.mesh, loaded.layout, self.replicas)
        self.compiled: dict[Bucket, jax.stages.Compiled] = {}
        self._behind: WeakSet[Sequence] = WeakSet()
        """Decoding rows whose last but one token the draft model has not computed: it was the last of a draft."""

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
        return [(f"drafts, {bucket}", partial(self._program, bucket)) for bucket in self.buckets]

    def allocate(self) -> None:
        """Create the cache."""
        jax.block_until_ready(self.cache)

    def inputs(self, work: abc.Sequence[Step | None], bucket: Bucket, arrays: StepArrays) -> tuple[Any, ...]:
        """`StepArrays` of the latest tokens, room of each row for a draft int32 [R], and `Drawing` [R].

        arrays: of the step, with any tokens in place of those of drafts.
        """
        block, first = self.size.block, bucket._replace(drafts=LATEST - 1)
        latest = joined([pack(self._latest(step), first, block=block, width=self.width) for step in work])
        placed = [
            Choice(bucket.rows * replica + number, row, 0)
            for replica, step in enumerate(work)
            for number, (row, _) in enumerate(step.decode if step else [])
        ]
        settings = row_sampling(placed, Program.SAMPLED, len(work) * bucket.rows, self.vocabulary)
        return latest, np.maximum(arrays.counts[0] - 1, 0), settings.drawing

    def draft(self, bucket: Bucket, arrays: StepArrays, inputs: tuple[Any, ...]) -> tuple[StepArrays, Array]:
        """Dispatch the drafts of a step -> its arrays with their tokens, and the drafts int32 [R, K], replicated."""
        tokens, drafts, self.cache = self._program(bucket)(self.weights, self.cache, arrays.tokens, *inputs)
        return arrays._replace(tokens=tokens), drafts

    def receive(self, work: abc.Sequence[Step | None], bucket: Bucket, drafts: np.ndarray, chosen: np.ndarray) -> None:
        """Give the rows of a step their drafts [R, K]. chosen [R * (1 + K)]: the tokens after each of the step's."""
        for replica, step in enumerate(work):
            for number, (row, _) in enumerate(step.decode if step else []):
                place, count = bucket.rows * replica + number, len(row.draft)
                row.draft[:] = drafts[place, :count].tolist()
                if count and chosen[bucket.width * place :][:count].tolist() == row.draft:
                    self._behind.add(row)

    def _latest(self, step: Step | None) -> Step | None:
        """The tokens of a step that the draft model has not computed; the last ones as the draft of those before."""
        if step is None:
            return None
        decode = [
            (replace(row, draft=row.tokens[at : at + 1]), at - 1)
            if row in self._behind
            else (replace(row, draft=[]), at)
            for row, at in step.decode
        ]
        # A row that was preempted is computed as a prompt again.
        self._behind.difference_update([row for row, _ in step.parts()])
        return Step(decode, step.prompts)

    def _program(self, bucket: Bucket) -> jax.stages.Compiled:
        if bucket not in self.compiled:
            self.compiled[bucket] = self.lowered(bucket).compile(compiler_options=dict(self.loaded.options))
        return self.compiled[bucket]

    def lowered(self, bucket: Bucket) -> jax.stages.Lowered:
        """The lowered program of a bucket: (weights, cache, tokens of the step [T, 1], those of `inputs`) ->
        (tokens of the step, drafts [R, K], cache)."""
        loaded, layout = self.loaded, self.loaded.layout
        first = bucket._replace(drafts=LATEST - 1)

        def drafted(
            weights: Params, cache: Cache, tokens: Array, latest: StepArrays, room: Array, drawing: Drawing
        ) -> tuple[Array, Array, Cache]:
            model = loaded.bound(weights)
            rows = step_rows(latest, first.groups(), self.kernel, loaded)
            x, cache = model.step(latest.tokens, cache, _context(latest.positions, rows))
            x, at = layout.island(_last, (STATES, COLUMN, ("batch",)), (STATES, ("batch",)))(
                x, latest.positions, latest.counts[0]
            )
            drafts = (
                jnp.zeros((room.shape[0], bucket.drafts), jnp.int32).at[:, 0].set(self._chosen(model, x, drawing, 0))
            )

            def another(ahead: Array, carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
                drafts, cache = carry
                # Bound here: outside of the loop, rows of weights would be stacked in memory.
                model, previous = loaded.bound(weights), jax.lax.dynamic_slice_in_dim(drafts, ahead - 1, 1, axis=1)
                rows = self._one_token(latest, at + ahead, room > ahead)
                x, cache = model.step(previous, cache, _context((at + ahead)[:, None], rows))
                token = self._chosen(model, x, drawing, ahead)
                return jax.lax.dynamic_update_slice_in_dim(drafts, token[:, None], ahead, axis=1), cache

            drafts, cache = jax.lax.fori_loop(1, jnp.max(room), another, (drafts, cache))

            def filled(tokens: Array, drafts: Array) -> Array:
                decoding = tokens[: bucket.choices].reshape(-1, bucket.width)[:, :1]
                decoding = jnp.concatenate([decoding, drafts], axis=1).reshape(-1, 1)
                return jnp.concatenate([decoding, tokens[bucket.choices :]])

            return layout.island(filled, (COLUMN, COLUMN), COLUMN)(tokens, drafts), drafts, cache

        column, cache = self._sharding(*COLUMN), {name: leaf.sharding for name, leaf in self.cache_like.items()}
        like = self._like(bucket, first)
        with jax.set_mesh(loaded.mesh), jax.default_matmul_precision(loaded.matmul_precision):
            jitted = jax.jit(drafted, donate_argnums=1, out_shardings=(column, self._sharding(), cache))
            weights = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), loaded.weights
            )
            return jitted.lower(weights, self.cache_like, *like)

    def _chosen(self, model: Any, x: Array, drawing: Drawing, ahead: Array | int) -> Array:
        """The tokens after states [R, 1, D], int32 [R]; 0 without a finite logit, which the other model rejects."""
        rows = RowSampling(drawing._replace(number=drawing.number + ahead))
        logits = model.next_logits(x)[:, 0]
        return jnp.maximum(choose(self.loaded.layout, self.vocabulary, Program.SAMPLED, 1, logits, rows).token, 0)

    def _one_token(self, latest: StepArrays, positions: Array, present: Array) -> StepRows:
        """A step of one token at these positions of the rows [R] that are present."""
        count, block = positions.shape[0], self.size.block
        blocks = jnp.take_along_axis(latest.tables[0], (positions // block)[:, None], axis=1, mode="clip")[:, 0]
        slots = jnp.where(present, blocks * block + positions % block, NOWHERE + jnp.arange(count, dtype=jnp.int32))
        arrays = latest._replace(
            slots=slots,
            tables=latest.tables[:1],
            counts=(present.astype(jnp.int32),),
            states=latest.states[:1],
        )
        return step_rows(arrays, ((count // self.replicas, 1),), self.kernel, self.loaded)

    def _like(self, bucket: Bucket, first: Bucket) -> tuple[Any, StepArrays, Any, Drawing]:
        def like(count: int, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            sharding = self._sharding("batch", *[None] * len(shape))
            return jax.ShapeDtypeStruct((self.replicas * count, *shape), dtype, sharding=sharding)

        groups = [rows for rows, _ in first.groups()]
        column, counts = like(first.tokens, 1), tuple(like(rows) for rows in groups)
        tables = tuple(like(rows, self.width) for rows in groups)
        latest = StepArrays(column, column, like(first.tokens), tables, counts, counts, like(first.choices))
        real, number = like(bucket.rows, dtype=jnp.float32), like(bucket.rows)
        seed = like(bucket.rows, 2, dtype=jnp.uint32)
        return like(bucket.tokens, 1), latest, number, Drawing(real, number, real, real, seed, number)

    def _sharding(self, *axes: str | None) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(self.loaded.mesh, self.loaded.layout.plan.compute.spec(axes))


def _context(positions: Array, rows: StepRows) -> Context:
    return Context(positions, jnp.zeros(1, jnp.int32), rows=rows)


def _last(x: Array, positions: Array, counts: Array) -> tuple[Array, Array]:
    """The states [R, 1, D] and positions [R] of the last tokens of decoding rows, which are the first of a step."""
    at = LATEST * jnp.arange(counts.shape[0]) + jnp.maximum(counts - 1, 0)
    return x[at], positions[at, 0]


class ByDevice:
    """Asks the device for drafts, which has a model for them: a draft of zeros in place of its tokens."""

    def __init__(self, count: int):
        """count: tokens of a draft."""
        self._count = count

    def draft(self, tokens: list[int]) -> list[int]:
        """`count` zeros."""
        del tokens
        return [0] * self._count
