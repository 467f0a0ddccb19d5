"""What the engine asks of the device: the next token of every row of a step."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from megajax.inference.request import TokenScore
from megajax.inference.scheduler import Step


class Sampled(NamedTuple):
    """The result of a row of a step."""

    token: int
    """Chosen from the logits of the row's last token in the step; ignored where more of its tokens follow. -1: the
    logits were not finite, or no token was allowed."""
    logprob: float
    """Of the model's own distribution: before temperature, penalties and cut-offs."""
    rank: int | None = None
    """1 + the number of tokens that were more likely; None: not asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The `Row.top` most likely tokens and their log-probabilities, in descending order."""
    finite: bool = True
    """Whether all logits of the row were finite."""
    prompt: tuple[TokenScore, ...] = ()
    """Where `Row.unscored`: of the tokens of the prompt that follow those in the step, with the
    `Sampling.prompt_logprobs` most likely ones."""


class Device(Protocol):
    """Compiled steps of a model with its cache: `megajax.inference.programs`, or a stand-in of tests."""

    rows: int
    """Most rows that run at the same time in a replica."""
    chunk: int
    """Most tokens of a prompt in a step."""
    block: int
    """Tokens of a block."""
    blocks: int
    """Of a replica."""
    replicas: int
    length: int
    """Most tokens of a row, prompt and answer."""
    top: int
    """Largest `Row.top`."""
    vocabulary: int
    """Tokens have smaller ids."""
    prefix_sharing: bool
    """Whether rows may share blocks: not if layers keep a state per row."""
    memory: int
    """Most tokens of `Row.memory`; 0: the model has no encoder."""

    def run(self, work: Sequence[Step | None]) -> Sequence[Sequence[Sampled]]:
        """One step of each replica; its results in the order of `Step.parts`."""
        ...
