"""Rows of a rollout: prompts and their answers, several in a row, each in a slot of its own. R rows of S positions."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megajax.inference.request import Output

type ScoredRows = dict[str, np.ndarray]
"""Leaves [R, S, ...] by name."""


class SampledAnswer(NamedTuple):
    """An answer of the model."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    log_p: tuple[float, ...]
    """Log-probability of each token in the distribution that the engine drew it from."""
    text: str
    cut: bool
    """Whether it has no end within max_tokens."""
    advantage: float = 0.0
    counts: bool = True
    """Whether it is part of the loss."""
    score: float = 0.0
    """Of the reward model."""
    experts: np.ndarray | None = None
    """int16 [N, L, k], as `Context.experts`, of all tokens but the last one; None if they are not kept."""

    @classmethod
    def of(cls, prompt: tuple[int, ...], output: Output) -> "SampledAnswer":
        """The answer in an output. One that the engine could not complete does not count."""
        log_p = tuple(score.drawn or 0.0 for score in output.scores)
        whole = output.finish in ("stop", "length") and len(log_p) == len(output.tokens) > 0
        size, experts = len(prompt) + len(output.tokens) - 1, output.experts
        experts = None if experts is None else np.asarray(experts)[:size]
        return cls(prompt, output.tokens, log_p, output.text, output.finish == "length", counts=whole, experts=experts)


def rows_of(
    answers: Sequence[SampledAnswer], *, slot: int, length: int, experts: tuple[int, int] | None = None
) -> ScoredRows:
    """The rows of answers, in order, as many in each as there are slots of `slot` tokens in `length`.

    experts: layers and experts of a token, for rows with the leaf `experts`.
    """
    slots = length // slot
    shape = (-(-len(answers) // slots), length)
    block: ScoredRows = {name: np.zeros(shape, np.int32) for name in ("tokens", "labels", "answers")}
    places = np.arange(length)
    block["positions"] = np.broadcast_to(places % slot, shape).astype(np.int32)
    block["segment_ids"] = np.broadcast_to(places // slot, shape).astype(np.int32)
    block |= {name: np.zeros(shape, np.float32) for name in ("loss_mask", "advantage", "old_log_p", "reference")}
    block["padding"] = np.ones(shape, bool)
    if experts is not None:
        block["experts"] = np.zeros((*shape, *experts), np.int16)
    for number, answer in enumerate(answers):
        row, place = divmod(number, slots)
        text = np.array([*answer.prompt, *answer.tokens], np.int32)
        first, scored = place * slot, place * slot + len(answer.prompt) - 1
        block["tokens"][row, first : first + len(text) - 1] = text[:-1]
        block["labels"][row, first : first + len(text) - 1] = text[1:]
        block["padding"][row, first : first + len(text) - 1] = False
        if experts is not None and answer.experts is not None:
            block["experts"][row, first : first + len(text) - 1] = answer.experts
        if answer.counts:
            of_answer = row, slice(scored, scored + len(answer.tokens))
            block["loss_mask"][of_answer] = 1
            block["answers"][of_answer] = 1 + place
            block["advantage"][of_answer] = answer.advantage
            block["old_log_p"][of_answer] = answer.log_p
    return block


def packed(block: Mapping[str, np.ndarray]) -> str:
    """Arrays as text, for the metadata of a checkpoint."""
    file = io.BytesIO()
    np.savez_compressed(file, **block)  # ty: ignore[invalid-argument-type]
    return base64.b64encode(file.getvalue()).decode()


def unpacked(text: str) -> ScoredRows:
    """The arrays of `packed`."""
    with np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}
