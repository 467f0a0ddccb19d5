"""The device protocol of the engine: steps that give the next token of every row."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from megajax.inference.request import TokenScore
from megajax.inference.scheduler import Step


class Sampled(NamedTuple):
    """The result of a row of a step."""

    token: int
    """Chosen from the logits of the row's last token in the step; ignored if more of its tokens follow. -1 if the
    logits were not finite, or no token was allowed."""
    logprob: float
    """Log-probability under the model, before temperature, penalties and filters."""
    rank: int | None = None
    """1 + the number of more likely tokens; None if not requested."""
    top: tuple[tuple[int, float], ...] = ()
    """The `Row.top` most likely tokens and their log-probabilities, in descending order."""
    finite: bool = True
    """Whether all logits of the row were finite."""
    prompt: tuple[TokenScore, ...] = ()
    """If `Row.unscored`: scores of the prompt tokens that follow those in the step, with the
    `Sampling.prompt_logprobs` most likely tokens."""


class Device(Protocol):
    """Compiled steps of a model with its cache: `megajax.inference.model_device`, or a stand-in in tests."""

    rows: int
    """Maximum number of rows that run at the same time in a replica."""
    chunk: int
    """Maximum number of prompt tokens in a step."""
    block: int
    """Tokens of a block."""
    blocks: int
    """Blocks of a replica."""
    replicas: int
    length: int
    """Maximum number of tokens of a row, prompt and answer."""
    top: int
    """Maximum of `Row.top`."""
    vocabulary: int
    """Number of token ids."""
    prefix_sharing: bool
    """Whether rows may share blocks; false if layers keep a state per row."""
    memory: int
    """Maximum number of tokens of `Row.memory`; 0 for a model without an encoder."""

    def run(self, work: Sequence[Step | None]) -> Sequence[Sequence[Sampled]]:
        """Run a step of each replica -> results in the order of `Step.parts`."""
        ...
