"""The small program of embeddings: sums of the states of prompts' tokens in a step."""

from collections import abc
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.inference.model_step import STATES
from megajax.inference.request import Pooled, Sampled, Step
from megajax.inference.step_arrays import Bucket, first_tokens
from megajax.mesh.layout import Layout


class Embedder(NamedTuple):
    """Adds up the states of the prompts of a step, in a compiled program; a `model_step.Scorer`."""

    tile: int
    """Tokens of a tile; a step has at most one prompt for each tile."""

    def __call__(self, layout: Layout, model: Any, states: Array, targets: Array) -> Array:
        """float32 [replicas * tiles, D]: for each prompt, the sum of the final norm's output over the tokens whose
        target it is."""

        def sums(states: Array, targets: Array) -> Array:
            zeros = jnp.zeros((targets.shape[0] // self.tile, states.shape[-1]), jnp.float32)
            return zeros.at[targets].add(states[:, 0].astype(jnp.float32), mode="drop")

        return layout.island(sums, (STATES, ("batch",)), ("batch", None))(model.final_norm(states), targets)

    def targets(self, work: abc.Sequence[Step | None], bucket: Bucket) -> np.ndarray:
        """int32 [replicas * chunk]: for each token, the prompt of its replica to which it is added; the number of tiles
        for none."""
        targets = np.full((len(work), bucket.chunk), bucket.tiles, np.int32)
        for replica, step in enumerate(work):
            firsts = first_tokens(step, bucket.tile) if step else []
            for number, first in enumerate(firsts):
                positions = pooled_positions(step, number) if step else range(0)
                start = first - step.prompts[number][1] if step else 0
                targets[replica, [start + at for at in positions]] = number
        return targets.reshape(-1)

    def add_to(self, samples: list[Sampled], step: Step, sums: np.ndarray) -> None:
        """Add the sums [tiles, D] of a replica to its results, which are in the order of `Step.parts`."""
        for number in range(len(step.prompts)):
            if positions := pooled_positions(step, number):
                place = len(step.decode) + number
                samples[place] = samples[place]._replace(pooled=Pooled(positions[0], sums[number]))


def pooled_positions(step: Step, number: int) -> range:
    """The positions of a prompt's tokens in a step whose states are added up for its embedding."""
    row, start, count = step.prompts[number]
    if row.pooling is None:
        return range(0)
    if row.pooling == "first":
        return range(start, 1)
    return range(start if row.pooling == "mean" else max(start, row.prompt - 1), start + count)
