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
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.batch import Params
from megajax.display.text import count
from megajax.inference.loaded_model import Draft
from megajax.inference.model_step import STATES, StepOutput, step_rows
from megajax.inference.programs import CacheSize
from megajax.inference.request import Sequence, Step
from megajax.inference.sampling.choose import Drawing, Program
from megajax.inference.sampling.chooser import Choice, row_sampling
from megajax.inference.speculation.draft_programs import DraftPrograms, step_context
from megajax.inference.step_arrays import Bucket, StepArrays, joined, pack
from megajax.layers.decoding import Cache

COLUMN = ("batch", None)
LATEST = 2
"""Most tokens of a decoding row that the draft model has not computed: the last one, and the one before it if the step
before accepted a whole draft."""


class ByDevice:
    """Asks the device for drafts, which has a model for them: a draft of zeros in place of its tokens."""

    def __init__(self, count: int):
        """count: tokens of a draft."""
        self._count = count

    def draft(self, tokens: list[int]) -> list[int]:
        """`count` zeros."""
        del tokens
        return [0] * self._count


class DraftModel(DraftPrograms):
    """The compiled programs of a draft model, and its cache."""

    name, drafter, reads_states = "drafts", ByDevice, False

    def __init__(self, draft: Draft, size: CacheSize, **settings: Any):
        """size: of the cache of the programs that verify; settings: the others of `DraftPrograms`."""
        model = draft.model
        leaves = model.cfg.cache_leaves(model.layout.plan.tensor)
        super().__init__(model.described(), leaves, size, **settings)
        self.weights, self.where = dict(model.weights), draft.where
        """Empty while they are elsewhere."""
        self._behind: WeakSet[Sequence] = WeakSet()
        """Decoding rows whose last but one token the draft model has not computed: it was the last of a draft."""

    def inputs(self, work: abc.Sequence[Step | None], bucket: Bucket, arrays: StepArrays) -> tuple[Any, ...]:
        """`StepArrays` of the latest tokens, room of each row for a draft int32 [R], and `Drawing` [R].

        arrays: of the step, with any tokens in place of those of drafts.
        """
        first = bucket._replace(drafts=LATEST - 1)
        latest = joined([pack(self._latest(step), first, block=self.block, width=self.width) for step in work])
        placed = [
            Choice(bucket.rows * replica + number, row, 0)
            for replica, step in enumerate(work)
            for number, (row, _) in enumerate(step.decode if step else [])
        ]
        settings = row_sampling(placed, Program.SAMPLED, len(work) * bucket.rows, self.vocabulary)
        return latest, np.maximum(arrays.counts[0] - 1, 0), settings.drawing

    def draft(self, bucket: Bucket, arrays: StepArrays, inputs: tuple[Any, ...]) -> tuple[StepArrays, Array]:
        """Dispatch the drafts of a step -> its arrays with their tokens, and the drafts int32 [R, K], replicated."""
        tokens, drafts, self.cache = self.program(bucket)(self.weights, self.cache, arrays.tokens, *inputs)
        return arrays._replace(tokens=tokens), drafts

    def follow(self, weights: Params, output: StepOutput, chosen: Array) -> None:
        """Nothing: drafts are made before a step."""
        del weights, output, chosen

    def receive(self, work: abc.Sequence[Step | None], bucket: Bucket, drafts: np.ndarray, chosen: np.ndarray) -> None:
        """Give the rows of a step their drafts [R, K]. chosen [R * (1 + K)]: the tokens after each of the step's."""
        for replica, step in enumerate(work):
            for number, (row, _) in enumerate(step.decode if step else []):
                place, length = bucket.rows * replica + number, len(row.draft)
                row.draft[:] = drafts[place, :length].tolist()
                if length and chosen[bucket.width * place :][:length].tolist() == row.draft:
                    self._behind.add(row)

    def summary(self) -> str:
        """Who drafts, for the banner."""
        loaded, tensor = self.loaded, self.loaded.mesh.shape["tensor"]
        sharded = "sharded as the model is" if loaded.layout.plan.tensor == tensor else "whole on each device"
        size = f"a model with {count(loaded.parameter_count())} parameters, of {self.where}"
        return size + (f", {sharded}" if tensor > 1 else "")

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
            x, cache = model.step(latest.tokens, cache, step_context(latest.positions, rows))
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
                x, cache = model.step(previous, cache, self.token_step(latest.tables[0], at + ahead, room > ahead))
                token = self._chosen(model, x, drawing, ahead)
                return jax.lax.dynamic_update_slice_in_dim(drafts, token[:, None], ahead, axis=1), cache

            drafts, cache = jax.lax.fori_loop(1, jnp.max(room), another, (drafts, cache))

            def filled(tokens: Array, drafts: Array) -> Array:
                decoding = tokens[: bucket.choices].reshape(-1, bucket.width)[:, :1]
                decoding = jnp.concatenate([decoding, drafts], axis=1).reshape(-1, 1)
                return jnp.concatenate([decoding, tokens[bucket.choices :]])

            return layout.island(filled, (COLUMN, COLUMN), COLUMN)(tokens, drafts), drafts, cache

        inputs = self.like(bucket.tokens, 1), self.arrays_like(first), self.like(bucket.rows), self.drawing_like(bucket)
        return self.lower(drafted, (self.sharding(*COLUMN), self.sharding()), *inputs)

    def _chosen(self, model: Any, x: Array, drawing: Drawing, ahead: Array | int) -> Array:
        """The tokens after states [R, 1, D], int32 [R]."""
        return self.chosen(model.next_logits(x)[:, 0], drawing, ahead)


def _last(x: Array, positions: Array, counts: Array) -> tuple[Array, Array]:
    """The states [R, 1, D] and positions [R] of the last tokens of decoding rows, which are the first of a step."""
    at = LATEST * jnp.arange(counts.shape[0]) + jnp.maximum(counts - 1, 0)
    return x[at], positions[at, 0]
