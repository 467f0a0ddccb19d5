"""The choosers of tokens that an engine compiles, and their input arrays from the rows of a step."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from megajax.inference.pack import Bucket
from megajax.inference.programs import StepOutput
from megajax.inference.request import BIASES, STOP_TOKENS
from megajax.inference.sampling.choose import choose
from megajax.inference.sampling.prompt import PromptScores, prompt_scores
from megajax.inference.sampling.rows import Chosen, Drawing, Edits, Program, RowSampling
from megajax.inference.scheduler import Row
from megajax.mesh.layout import Layout

TOP, PROMPT_TOP = 64, 20
"""Number of most likely tokens computed for a row, as beam searches need, and for a token of a prompt."""
EDITED = BIASES + STOP_TOKENS + 8
"""Maximum number of tokens of a row with a bias or forbidden; 8 for the model's end tokens."""
WORD = 32


class ChooserInputs(NamedTuple):
    """The arrays of a `RowChooser`."""

    rows: RowSampling
    targets: Any = None
    """int32 [chunk]: the tokens that follow those of the prompt; -1 where no score is requested."""


class StepChosen(NamedTuple):
    """The result of a `RowChooser`."""

    rows: Chosen
    prompt: PromptScores | None = None


class RowChooser(NamedTuple):
    """Chooses tokens by the settings of each row, in a compiled step."""

    program: Program
    size: int
    """Number of ids in use."""

    def __str__(self) -> str:
        return self.program.name.lower()

    def like(self, rows: int, chunk: int) -> ChooserInputs:
        targets = jax.ShapeDtypeStruct((chunk,), np.int32) if self.program == Program.FULL and chunk else None
        neutral = row_sampling([], self.program, rows, self.size)
        return ChooserInputs(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), neutral), targets)

    def __call__(self, layout: Layout, out: StepOutput, inputs: ChooserInputs) -> StepChosen:
        chosen = choose(layout, self.size, self.program, TOP, out.logits, inputs.rows, out.tokens)
        if inputs.targets is None:
            return StepChosen(chosen)
        scores = prompt_scores(layout, self.size, PROMPT_TOP, out.logits_of, out.prompt, inputs.targets)
        return StepChosen(chosen, scores)

    def inputs(self, work: Sequence[Any | None], bucket: Bucket) -> ChooserInputs:
        """The arrays of one step of each replica. work: steps of the scheduler."""
        placed, targets = [], np.full((len(work), bucket.chunk), -1, np.int32)
        for replica, step in enumerate(work):
            first = replica * bucket.sampled
            placed += [] if step is None else [(first + place, row) for place, (row, _) in enumerate(step.decode)]
            for row, start, count in [] if step is None else step.prompts:
                placed.append((first + bucket.rows, row))
                if row.unscored:
                    following = row.tokens[start + 1 : min(start + count + 1, row.prompt)]
                    targets[replica, : len(following)] = following
        rows = row_sampling(placed, self.program, len(work) * bucket.sampled, self.size)
        return ChooserInputs(rows, targets.reshape(-1) if self.program == Program.FULL and bucket.chunk else None)


def choosers(size: int, *, invariant: bool = False) -> tuple[RowChooser, ...]:
    """A chooser for each program, in order. size: number of ids in use.

    invariant: only the last one, so that the compiled step of a row does not depend on other rows' settings.
    """
    return tuple(RowChooser(program, size) for program in Program if program == Program.FULL or not invariant)


def program_of(row: Row) -> Program:
    """The first program that serves a row."""
    settings = row.sampling
    penalties = settings.repetition_penalty != 1 or settings.presence_penalty != 0 or settings.frequency_penalty != 0
    scores = row.top is not None or row.unscored
    if scores or penalties or settings.logit_bias or row.forbidden or row.guide is not None:
        return Program.FULL
    return Program.SAMPLED if settings.temperature > 0 else Program.GREEDY


def row_sampling(placed: Sequence[tuple[int, Row]], program: Program, count: int, size: int) -> RowSampling:
    """Numpy arrays with `count` rows. placed: pairs (index, row); other indices have neutral settings."""
    drawing = _drawing(placed, count) if program >= Program.SAMPLED else None
    return RowSampling(drawing, _edits(placed, count, size) if program == Program.FULL else None)


def _column(placed: Sequence[tuple[int, Row]], count: int, neutral: float, name: str) -> np.ndarray:
    column = np.full(count, neutral, np.float32)
    for place, row in placed:
        column[place] = getattr(row.sampling, name)
    return column


def _drawing(placed: Sequence[tuple[int, Row]], count: int) -> Drawing:
    seed, number = np.zeros((count, 2), np.uint32), np.zeros(count, np.int32)
    for place, row in placed:
        seed[place], number[place] = divmod(row.seed, 2**32), row.generated
    return Drawing(
        temperature=_column(placed, count, 0, "temperature"),
        top_k=_column(placed, count, 0, "top_k").astype(np.int32),
        top_p=_column(placed, count, 1, "top_p"),
        min_p=_column(placed, count, 0, "min_p"),
        seed=seed,
        number=number,
    )


def _edits(placed: Sequence[tuple[int, Row]], count: int, size: int) -> Edits:
    allowed = np.full((count, -(-size // WORD)), 2**WORD - 1, np.uint32)
    tokens, biases = np.full((count, EDITED), -1, np.int32), np.zeros((count, EDITED), np.float32)
    prompt, length = np.zeros(count, np.int32), np.zeros(count, np.int32)
    for place, row in placed:
        edits: Mapping[int, float] = {**row.sampling.logit_bias, **dict.fromkeys(row.forbidden, -np.inf)}
        tokens[place, : len(edits)], biases[place, : len(edits)] = list(edits), list(edits.values())
        prompt[place], length[place] = row.prompt, len(row.tokens)
        if row.guide is not None:
            mask = row.guide.mask
            allowed[place, : len(mask)], allowed[place, len(mask) :] = mask[: allowed.shape[1]], 0
    return Edits(
        allowed=allowed,
        tokens=tokens,
        biases=biases,
        repetition=_column(placed, count, 1, "repetition_penalty"),
        presence=_column(placed, count, 0, "presence_penalty"),
        frequency=_column(placed, count, 0, "frequency_penalty"),
        prompt=prompt,
        length=length,
    )
