"""The small programs that an engine compiles beside its model: the choice of tokens and the scores of prompts.

Their input arrays come from the sequences of a step.
"""

from collections import abc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from megajax.inference.model_step import STATES
from megajax.inference.request import Sequence, Step
from megajax.inference.sampling.choose import (
    LOGITS,
    ROW,
    ROWS,
    WORD,
    Choosing,
    Chosen,
    Drawing,
    Edits,
    RowSampling,
    Scores,
    choose,
    entries,
    normaliser_of,
    scores_of,
    shard_of,
)  # fmt: skip
from megajax.inference.sampling_settings import BAD, BIASES, LISTED, STOP_TOKENS
from megajax.inference.step_arrays import Bucket, first_tokens
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import devices_along
from megajax.models.protocol import GeneratingModel

TOP, PROMPT_TOP = 64, 20
"""Number of most likely tokens computed for a row, as beam searches need, and for a token of a prompt."""
EDITED = BIASES + STOP_TOKENS + BAD + 8
"""Maximum number of tokens of a row with a bias or forbidden; 8 for the model's end tokens."""
PIECE = 64
"""Maximum number of tokens of each replica whose logits exist at the same time."""


class PromptScores(NamedTuple):
    """Scores of C tokens of each replica, in pieces of P = min(C, PIECE); see `place`."""

    logprob: Array
    """float32 [pieces, replicas * P]: log-probability under the model, before any setting."""
    scores: Scores
    """Arrays [pieces, replicas * P, ...]."""


def place(token: int, replica: int, count: int) -> tuple[int, int]:
    """(piece, index in the piece) of a token of a replica in `PromptScores`. count: tokens of each replica.

    The last piece ends with the last token, so it may overlap the previous one.
    """
    size = min(count, PIECE)
    piece = token // size
    return piece, replica * size + token - min(piece * size, count - size)


def prompt_scores(
    layout: Layout, size: int, k: int, logits_of: Callable[[Array], Array], states: Array, targets: Array
) -> PromptScores:
    """Scores of the next tokens, and the k most likely tokens at each position.

    logits_of: states [T, 1, D] -> logits float32 [T, V], laid out (batch, vocab); states: [replicas * C, 1, D];
    targets: int32 [replicas * C], the next tokens, -1 where no score is requested. size: number of ids in use.
    """
    axes, replicas = layout.free_axes("vocab"), devices_along(layout.free_axes("batch"))
    count = targets.shape[0] // replicas
    length = min(count, PIECE)

    def slice_piece(states: Array, targets: Array, first: Array) -> tuple[Array, Array]:
        return lax.dynamic_slice_in_dim(states, first, length), lax.dynamic_slice_in_dim(targets, first, length)

    def score(logits: Array, targets: Array) -> PromptScores:
        shard = shard_of(logits, size, axes)
        raw = jnp.where((shard.first + jnp.arange(logits.shape[1]) < size)[None], logits, -jnp.inf)
        logit, normaliser = shard.sum(entries(raw, targets, shard)), normaliser_of(raw, shard)
        return PromptScores(normaliser.log_p(logit), scores_of(raw, logit, normaliser, k, shard))

    def piece(first: Array) -> PromptScores:
        piece_states, piece_targets = layout.island(slice_piece, (STATES, ROW, ()), (STATES, ROW))(
            states, targets, first
        )
        row: Any = ROW
        several: Any = ROWS
        out: Any = PromptScores(row, Scores(row, several, several))
        return layout.island(score, (LOGITS, ROW), out)(logits_of(piece_states), piece_targets)

    firsts = [min(first, count - length) for first in range(0, count, length)]
    return lax.map(piece, jnp.asarray(firsts, jnp.int32))


class PlacedChoice(NamedTuple):
    """The choice of a token of a row."""

    place: int
    """Index among the choices of a step."""
    row: Sequence
    ahead: int
    """After this many tokens of the row's draft."""


class RowChooser(NamedTuple):
    """Chooses tokens by the settings of each row, in a compiled program."""

    program: Choosing
    size: int
    """Number of ids in use."""

    def __str__(self) -> str:
        return self.program.name.lower()

    def like(self, choices: int) -> RowSampling:
        neutral = row_sampling([], self.program, choices, self.size)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), neutral)

    def __call__(self, layout: Layout, logits: Array, tokens: Array, inputs: RowSampling) -> Chosen:
        return choose(layout, self.size, self.program, TOP, logits, inputs, tokens)

    def inputs(self, work: abc.Sequence[Step | None], bucket: Bucket) -> RowSampling:
        """The arrays of one step of each replica. work: steps of the scheduler."""
        placed = [
            PlacedChoice(bucket.choices * replica + bucket.width * number + ahead, row, ahead)
            for replica, step in enumerate(work)
            for number, (row, _) in enumerate(step.parts() if step else [])
            for ahead in range(1 + len(row.draft))
            # A row without a slot has ended since the step started.
            if row.slot >= 0
        ]
        return row_sampling(placed, self.program, len(work) * bucket.choices, self.size)


class PromptScorer(NamedTuple):
    """Scores the tokens of prompts, in a compiled program."""

    size: int
    """Number of ids in use."""

    def __call__(self, layout: Layout, model: GeneratingModel, states: Array, targets: Array) -> PromptScores:
        def logits_of(states: Array) -> Array:
            return model.next_logits(states)[:, 0]

        return prompt_scores(layout, self.size, PROMPT_TOP, logits_of, states, targets)

    def targets(self, work: abc.Sequence[Step | None], bucket: Bucket) -> np.ndarray:
        """int32 [replicas * chunk]: the tokens that follow those of the prompts; -1 where no score is requested."""
        targets = np.full((len(work), bucket.chunk), -1, np.int32)
        for replica, step in enumerate(work):
            firsts = first_tokens(step, bucket.tile) if step else []
            for (row, start, count), first in zip(step.prompts if step else [], firsts, strict=True):
                if row.unscored:
                    following = row.tokens[start + 1 : min(start + count + 1, row.prompt)]
                    targets[replica, first : first + len(following)] = following
        return targets.reshape(-1)


def choosers(size: int, *, invariant: bool = False) -> tuple[RowChooser, ...]:
    """A chooser for each program, in order. size: number of ids in use.

    invariant: only the last one, so that the compiled step of a row does not depend on other rows' settings.
    """
    return tuple(RowChooser(program, size) for program in Choosing if program == Choosing.FULL or not invariant)


def program_of(row: Sequence) -> Choosing:
    """The first program that serves a row."""
    settings = row.sampling
    edited = settings.logit_bias or settings.bad_tokens or row.allowed is not None or row.forbidden()
    if row.top or settings.penalized() or edited or row.guide is not None:
        return Choosing.FULL
    return Choosing.SAMPLED if settings.temperature > 0 else Choosing.GREEDY


def row_sampling(placed: abc.Sequence[PlacedChoice], program: Choosing, count: int, size: int) -> RowSampling:
    """Numpy arrays with `count` rows. Those without a choice have neutral settings."""
    drawing = _drawing(placed, count) if program >= Choosing.SAMPLED else None
    return RowSampling(drawing, _edits(placed, count, size) if program == Choosing.FULL else None)


def _column(placed: abc.Sequence[PlacedChoice], count: int, neutral: float, name: str) -> np.ndarray:
    column = np.full(count, neutral, np.float32)
    for place, row, _ in placed:
        column[place] = getattr(row.sampling, name)
    return column


def _drawing(placed: abc.Sequence[PlacedChoice], count: int) -> Drawing:
    seed, number = np.zeros((count, 2), np.uint32), np.zeros(count, np.int32)
    for place, row, ahead in placed:
        seed[place], number[place] = divmod(row.seed, 2**32), row.generated + ahead
    return Drawing(
        temperature=_column(placed, count, 0, "temperature"),
        top_k=_column(placed, count, 0, "top_k").astype(np.int32),
        top_p=_column(placed, count, 1, "top_p"),
        min_p=_column(placed, count, 0, "min_p"),
        seed=seed,
        number=number,
    )


def _edits(placed: abc.Sequence[PlacedChoice], count: int, size: int) -> Edits:
    allowed = np.full((count, -(-size // WORD)), 2**WORD - 1, np.uint32)
    tokens, biases = np.full((count, EDITED), -1, np.int32), np.zeros((count, EDITED), np.float32)
    prompt, length = np.zeros(count, np.int32), np.zeros(count, np.int32)
    listed = np.full((count, LISTED), -1, np.int32)
    for place, row, ahead in placed:
        edits: Mapping[int, float] = {**row.sampling.logit_bias, **dict.fromkeys(row.forbidden(ahead), -np.inf)}
        tokens[place, : len(edits)], biases[place, : len(edits)] = list(edits), list(edits.values())
        prompt[place], length[place] = row.prompt, len(row.tokens) + ahead
        listed[place, : len(row.sampling.logprob_tokens)] = row.sampling.logprob_tokens
        for mask in (row.allowed, None if row.guide is None else row.guide.mask):
            if mask is not None:
                allowed[place, : len(mask)] &= mask[: allowed.shape[1]]
                allowed[place, len(mask) :] = 0
    return Edits(
        allowed=allowed,
        tokens=tokens,
        biases=biases,
        repetition=_column(placed, count, 1, "repetition_penalty"),
        presence=_column(placed, count, 0, "presence_penalty"),
        frequency=_column(placed, count, 0, "frequency_penalty"),
        prompt=prompt,
        length=length,
        listed=listed,
    )
