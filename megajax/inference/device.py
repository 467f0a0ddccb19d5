"""A model as the device of an engine: steps of the scheduler in, sampled tokens out."""

from collections import abc
from typing import Any

import jax

from megajax.inference.programs import Programs, StepResult
from megajax.inference.request import Sampled, Sequence, Step, TokenScore
from megajax.inference.sampling.chooser import TOP, PromptScores, RowChooser, StepChosen, place, program_of


class ModelDevice:
    """A `megajax.inference.request.Device` that runs a model's compiled steps."""

    top = TOP
    """Maximum of `Sequence.top`."""

    def __init__(self, programs: Programs, vocabulary: int):
        """programs: with `chooser.choosers(vocabulary)`; vocabulary: ids in use."""
        self.programs, self.vocabulary = programs, vocabulary
        self.choosers: abc.Sequence[RowChooser] = [
            chooser for chooser in programs.choosers if isinstance(chooser, RowChooser)
        ]
        self.rows, self.chunk, self.length = programs.rows, programs.chunk, programs.length
        self.block, self.blocks, self.replicas = programs.size.block, programs.size.blocks, programs.replicas
        self.prefix_sharing, self.memory = programs.prefix_sharing, max(programs.text_lengths, default=0)

    def run(self, work: abc.Sequence[Step | None]) -> list[list[Sampled]]:
        """Run a step of each replica -> results in the order of `Step.parts`."""
        rows = [row for step in work if step is not None for row, _ in step.parts()]
        needed = max(map(program_of, rows))
        chooser = next(chooser for chooser in self.choosers if chooser.program >= needed)
        result = self.programs.run(work, chooser, lambda bucket: chooser.inputs(work, bucket))
        chosen: StepChosen = jax.device_get(result.chosen)
        return [_sampled(step, replica, result, chosen) if step else [] for replica, step in enumerate(work)]


def _sampled(step: Step, replica: int, result: StepResult, chosen: StepChosen) -> list[Sampled]:
    samples = [_row(row, chosen, result.row(replica, number)) for number, (row, _) in enumerate(step.decode)]
    for row, start, count in step.prompts:
        sample = _row(row, chosen, result.row(replica, 0, prompt=True))
        if row.unscored and chosen.prompt is not None:
            following = row.tokens[start + 1 : min(start + count + 1, row.prompt)]
            places = [place(number, replica, result.bucket.chunk) for number in range(len(following))]
            top = row.sampling.prompt_logprobs or 0
            scores = [_score(token, at, top, chosen.prompt) for token, at in zip(following, places, strict=True)]
            sample = sample._replace(prompt=tuple(scores))
        samples.append(sample)
    return samples


def _row(row: Sequence, chosen: StepChosen, place: int) -> Sampled:
    rows = chosen.rows
    sample = Sampled(int(rows.token[place]), float(rows.logprob[place]), finite=bool(rows.finite[place]))
    if row.top is None or rows.scores is None:
        return sample
    top = _pairs(rows.scores.top[place], rows.scores.logprobs[place], row.top)
    return sample._replace(rank=int(rows.scores.rank[place]), top=top)


def _score(token: int, at: tuple[int, int], count: int, scores: PromptScores) -> TokenScore:
    top = _pairs(scores.scores.top[at], scores.scores.logprobs[at], count)
    return TokenScore(token, float(scores.logprob[at]), int(scores.scores.rank[at]), top)


def _pairs(tokens: Any, logprobs: Any, count: int) -> tuple[tuple[int, float], ...]:
    return tuple(zip(tokens[:count].tolist(), logprobs[:count].tolist(), strict=True))
