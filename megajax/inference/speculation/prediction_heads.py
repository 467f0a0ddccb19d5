"""Drafts by the model's heads of multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, section 2.2).

After the choice of a step's tokens, the heads compute the tokens of the step from the states that the model gave them,
each with the token that follows, and draft what follows the chosen ones, all in one program. Head m at position i reads
the token at i + m + 1, and its keys are in the place of position i in a cache of its own with the blocks and tables of
the model: sharing and preemption hold for both. The last head goes on alone, one position after another, for further
tokens; keys of positions without a block yet go to spare blocks of the row, since the next step computes them again.

A draft's token is chosen with the random numbers, temperature and filters of the model's choice at this place, without
penalties, biases and constraints: with equal logits both are the same. Wrong keys cost acceptance alone: the last one
of a shared block was made with the token that followed there, and those of the second head on with drafts.

R rows of a step, W = 1 + K tokens of a decoding row, K tokens of a draft, T tokens of a step, H heads.
"""

from collections import abc
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.batch import Params
from megajax.config.errors import UserError
from megajax.inference.loaded_model import CacheSize, LoadedModel
from megajax.inference.model_step import STATES, step_context, step_rows
from megajax.inference.request import Sequence, Step
from megajax.inference.sampling.choose import Choosing, Drawing, RowSampling, choose
from megajax.inference.sampling.chooser import PlacedChoice, row_sampling
from megajax.inference.step_arrays import AWAITED, NOWHERE, Bucket, StepArrays, like_arrays
from megajax.kernels.paged.capability import PagedKernel
from megajax.layers.context import Context
from megajax.layers.decoding import Cache
from megajax.layers.stack.config import StackConfig

COLUMN, ROW = ("batch", None), ("batch",)


class AfterStep[T](NamedTuple):
    """What the heads read of the rows of a step, beside its arrays."""

    known: T
    """int32 [R, H]: tokens after the last one of a prompt's chunk; AWAITED where there is none yet."""
    blocks: T
    """int32 [R]: blocks of the row."""
    room: T
    """int32 [R]: most tokens of the next draft."""
    drawing: Any
    """`Drawing` [R]: how the token after the row's last one is drawn."""


class FromStep:
    """The draft of one sequence that its last step gave. count: most tokens of a draft."""

    def __init__(self, count: int):
        self.count, self.tokens = count, list[int]()

    def draft(self, tokens: list[int]) -> list[int]:
        """The tokens that were given; none if there was no step since the last call."""
        del tokens
        draft, self.tokens = self.tokens, []
        return draft


class PredictionHeads:
    """The programs of a model's heads, one for each bucket of the steps that verify, and their cache."""

    def __init__(
        self,
        loaded: LoadedModel,
        size: CacheSize,
        *,
        buckets: abc.Sequence[Bucket],
        vocabulary: int,
        length: int,
        dtype: str,
        kernel: PagedKernel,
    ):
        """loaded, size, buckets, length, dtype: of the programs that verify, see `Programs`; all buckets have drafts;
        vocabulary: ids in use."""
        drafts, rows = max(bucket.drafts for bucket in buckets), max(bucket.rows for bucket in buckets)
        cfg = heads_alone(loaded.cfg, drafts)
        # The heads have no slots for adapters.
        self.loaded, self.vocabulary, self.kernel = replace(loaded.described(), adapters=None), vocabulary, kernel
        self.count, self.block, self.width = cfg.stack.layers(), size.block, -(-length // size.block)
        self.blocks, self.spare = size.blocks, -(-drafts // size.block)
        self.leaves = cfg.cache_leaves(loaded.mesh.shape["tensor"])
        self.cache_like = loaded.like_cache(self.leaves, replace(size, blocks=size.blocks + rows * self.spare), dtype)

    @cached_property
    def cache(self) -> Cache:
        """The arrays of the cache; created when first used."""
        return {name: jnp.zeros(like.shape, like.dtype, device=like.sharding) for name, like in self.cache_like.items()}

    def inputs(self, work: abc.Sequence[Step | None], bucket: Bucket) -> AfterStep:
        """`AfterStep` of a step of each replica."""
        count, placed = len(work) * bucket.rows, list[PlacedChoice]()
        known, (blocks, room) = np.full((count, self.count), AWAITED, np.int32), np.zeros((2, count), np.int32)
        for replica, step in enumerate(work):
            for number, (row, computed) in enumerate(step.parts() if step else []):
                place, following = bucket.rows * replica + number, row.tokens[computed : computed + self.count]
                known[place, : len(following)] = following
                blocks[place], room[place] = len(row.blocks), _room(row, computed)
                placed.append(PlacedChoice(place, row, 0))
        drawing = row_sampling(placed, Choosing.SAMPLED, count, self.vocabulary).drawing
        return AfterStep(known, blocks, room, drawing)

    def receive(self, work: abc.Sequence[Step | None], bucket: Bucket, drafts: np.ndarray) -> None:
        """Give the rows of a step the drafts [R, K] for their next one."""
        for replica, step in enumerate(work):
            for number, (row, computed) in enumerate(step.parts() if step else []):
                if isinstance(row.drafter, FromStep):
                    row.drafter.tokens = drafts[bucket.rows * replica + number, : _room(row, computed)].tolist()

    def lowered(self, bucket: Bucket) -> jax.stages.Lowered:
        """The lowered program of a bucket: (the model's weights, cache, `StepOutput.states`, arrays of the step without
        adapters and images, chosen tokens [R * W], `AfterStep`) -> (drafts [R, K], replicated, and cache)."""
        loaded, layout, heads, drafts = self.loaded, self.loaded.layout, self.count, bucket.drafts
        pick = layout.island(lambda x, place: x[place], (STATES, ROW), STATES)

        def drafted(
            weights: Params, cache: Cache, states: Array, arrays: StepArrays, chosen: Array, after: AfterStep
        ) -> tuple[Array, Cache]:
            model = loaded.bound(weights)
            ends = layout.island(partial(_ends, bucket), (COLUMN, COLUMN, ROW, ROW, ROW), (ROW,) * 4)
            token, place, position, accepted = ends(*arrays[:2], arrays.counts[0], arrays.last, chosen)
            shifted = layout.island(_shifted, (COLUMN, ROW, ROW, ROW), COLUMN)
            ctx = step_context(arrays.positions, step_rows(arrays, bucket.groups(), self.kernel, loaded))
            tables = self._with_spare(bucket, arrays.tables[0], after.blocks)
            x, tokens, ahead_tokens = model.final_norm(states), arrays.tokens, list[Array]()

            def chosen_after(x: Array, ahead: Array | int) -> Array:
                logits, number = model.padded_logits(x)[:, 0], after.drawing.number + (accepted + 1 + ahead)
                rows = RowSampling(after.drawing._replace(number=number))
                # 0 without a finite logit, which the model rejects.
                return jnp.maximum(choose(layout, self.vocabulary, Choosing.SAMPLED, 1, logits, rows).token, 0)

            for head in range(heads):
                tokens = shifted(tokens, place, token, after.known[:, head])
                x, cache = model.predict(head, x, tokens, cache, ctx)
                ended = pick(x, place)
                token = chosen_after(ended, head)
                ahead_tokens.append(token)
            ahead_tokens += [jnp.zeros_like(token)] * (drafts - heads)

            def another(ahead: Array, carry: tuple[Array, Array, Cache]) -> tuple[Array, Array, Cache]:
                ahead_tokens, x, cache = carry
                previous = jax.lax.dynamic_slice_in_dim(ahead_tokens, ahead - 1, 1, axis=1)
                at = position + ahead + 1 - heads
                ctx = self._token_context(tables, at, (after.room > ahead) & (at < self.width * self.block))
                x, cache = model.predict(heads - 1, x, previous, cache, ctx)
                token = chosen_after(x, ahead)[:, None]
                return jax.lax.dynamic_update_slice_in_dim(ahead_tokens, token, ahead, axis=1), x, cache

            carry = jnp.stack(ahead_tokens, axis=1), ended, cache
            ahead_tokens, _, cache = jax.lax.fori_loop(heads, jnp.max(after.room), another, carry)
            return ahead_tokens, cache

        like, dtype = loaded.like, jnp.float32 if loaded.cfg.residual == "float32" else loaded.weights["tokens"].dtype
        states, arrays = like(bucket.tokens, 1, loaded.cfg.hidden, dtype=dtype), like_arrays(loaded, bucket, self.width)
        choices = jax.ShapeDtypeStruct((loaded.replicas * bucket.choices,), jnp.int32, sharding=loaded.sharding())
        row, real, seeds = like(bucket.rows), like(bucket.rows, dtype=np.float32), like(bucket.rows, 2, dtype=np.uint32)
        after = AfterStep(like(bucket.rows, heads), row, row, Drawing(real, row, real, real, seeds, row))
        shardings = loaded.sharding(), {name: leaf.sharding for name, leaf in self.cache_like.items()}
        with jax.set_mesh(loaded.mesh), jax.default_matmul_precision(loaded.matmul_precision):
            jitted = jax.jit(drafted, donate_argnums=1, out_shardings=shardings)
            return jitted.lower(loaded.weights, self.cache_like, states, arrays, choices, after)

    def _token_context(self, tables: Array, positions: Array, present: Array) -> Context:
        """The context of a step of one token at these positions int32 [R] of the rows that are present, bool [R]."""
        count, numbers = len(positions), jnp.arange(len(positions), dtype=jnp.int32)
        blocks = jnp.take_along_axis(tables, (positions // self.block)[:, None], axis=1, mode="clip")[:, 0]
        column = positions[:, None]
        slots = jnp.where(present, blocks * self.block + positions % self.block, NOWHERE + numbers)
        counts, nowhere = present.astype(jnp.int32), NOWHERE + numbers
        arrays = StepArrays(None, column, slots, (tables,), (counts,), (nowhere,), None)
        return step_context(column, step_rows(arrays, ((count // self.loaded.replicas, 1),), self.kernel, self.loaded))

    def _with_spare(self, bucket: Bucket, tables: Array, blocks: Array) -> Array:
        """The tables [R, M] with the row's spare blocks after its blocks."""
        beyond = jnp.arange(tables.shape[1])[None] - blocks[:, None]
        row = jnp.arange(tables.shape[0], dtype=jnp.int32)[:, None] % bucket.rows
        spare = self.blocks + row * self.spare + jnp.clip(beyond, 0, self.spare - 1)
        return jnp.where(beyond < 0, tables, spare)


def _room(row: Sequence, computed: int) -> int:
    """Most tokens of a row's next draft, after a step until `computed`: none within a prompt."""
    if not isinstance(row.drafter, FromStep) or computed < len(row.tokens):
        return 0
    # The step chooses a token, and the next one another after the draft.
    return max(0, min(row.drafter.count, row.limit - len(row.tokens) - 2))


def _ends(
    bucket: Bucket, tokens: Array, positions: Array, counts: Array, last: Array, chosen: Array
) -> tuple[Array, Array, Array, Array]:
    """The token after the last one of each row that is part of it, its index and its position in the step, and the
    number of accepted tokens of its draft, each [R], of a replica."""
    of_rows, following = (x.reshape(bucket.rows, bucket.width) for x in (tokens[: bucket.choices, 0], chosen))
    drafted = jnp.arange(1, bucket.width)[None] < counts[:, None]
    agree = (of_rows[:, 1:] == following[:, :-1]) & drafted
    accepted = jnp.cumprod(agree.astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)
    choice = bucket.width * jnp.arange(bucket.rows) + accepted
    place = last[choice]
    return jnp.maximum(chosen[choice], 0), place, positions[place, 0], accepted


def _shifted(tokens: Array, place: Array, token: Array, known: Array) -> Array:
    """[T, 1] -> the token after each of a replica's step; after the last one of a row, the known token or `token`."""
    return jnp.roll(tokens, -1, axis=0).at[place, 0].set(jnp.where(known == AWAITED, token, known))


def heads_alone(cfg: Any, drafts: int) -> Any:
    """A model with the blocks of a model's heads that drafts of so many tokens need, for their cache and kernel.

    Raises UserError for a model without heads, and for heads with a state per request.
    """
    prediction = getattr(cfg, "prediction", None)
    if prediction is None:
        missing = "the model has no heads of multi-token prediction (model.prediction)"
        raise UserError(f"inference.drafts=mtp: {missing}. Set inference.drafts=text")
    stack = StackConfig(pattern=cfg.predicting_blocks()[:1], repeats=min(prediction.depth, drafts))
    of_heads = replace(cfg, stack=stack, prediction=None)
    if any(leaf.per != "token" for leaf in of_heads.cache_leaves(1)):
        raise UserError("inference.drafts=mtp: the model's heads have a state per request. Set inference.drafts=text")
    return of_heads
