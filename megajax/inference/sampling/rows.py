"""Input and output of the sampler for the rows of a step.

R rows, V ids of the vocabulary with padding, B edited ids of a row, W = ceil(V / 32) words of a mask, L tokens of the
longest row, k most likely tokens.
"""

from enum import IntEnum
from typing import Any, NamedTuple

from jax import Array


class Program(IntEnum):
    """The compiled programs that choose tokens. Each includes the previous ones: a step runs the largest of its rows'.

    A row's token does not depend on the program.
    """

    GREEDY = 0
    """The first most likely token and its log-probability, without random numbers or filters."""
    SAMPLED = 1
    """Temperature, min_p, top_k, top_p."""
    FULL = 2
    """Allowed and forbidden tokens, biases, penalties; ranks and the most likely tokens; scores of prompts."""


type Values = Any
"""An array; a numpy array while a step is packed."""


class Drawing(NamedTuple):
    """Sampling settings of rows."""

    temperature: Values
    """float32 [R]; 0: the first most likely token."""
    top_k: Values
    """int32 [R]; 0: all."""
    top_p: Values
    """float32 [R]; 1: all."""
    min_p: Values
    """float32 [R]; 0: all."""
    seed: Values
    """uint32 [R, 2]: upper and lower half of the seed."""
    number: Values
    """int32 [R]: number of generated tokens of the row."""


class Edits(NamedTuple):
    """Changes of rows' logits before a token is chosen."""

    allowed: Values
    """uint32 [R, W]: bit i % 32 of word i // 32 is set where id i is allowed."""
    tokens: Values
    """int32 [R, B]: ids with a bias; -1: unused."""
    biases: Values
    """float32 [R, B]: added to their logits; -inf forbids a token."""
    repetition: Values
    """float32 [R]; 1: no penalty."""
    presence: Values
    """float32 [R]; 0: no penalty."""
    frequency: Values
    """float32 [R]; 0: no penalty."""
    prompt: Values
    """int32 [R]: number of tokens of the prompt."""
    length: Values
    """int32 [R]: number of tokens of prompt and answer."""


class RowSampling(NamedTuple):
    """The settings of the rows of a step; None for those that the program does not read."""

    drawing: Drawing | None = None
    """Read by Program.SAMPLED and Program.FULL."""
    edits: Edits | None = None
    """Read by Program.FULL."""


class Chosen(NamedTuple):
    """The next tokens of rows."""

    token: Array
    """int32 [R]; -1 for a row with non-finite logits or without an allowed token."""
    logprob: Array
    """float32 [R]: its log-probability under the model, before any setting."""
    finite: Array
    """bool [R]: whether all logits of the row are finite."""
    scores: "Scores | None" = None
    """Read by Program.FULL."""


class Scores(NamedTuple):
    """Rank of a given token, and the most likely tokens, under the model, before any setting."""

    rank: Array
    """int32 [R]: 1 + number of more likely ids."""
    top: Array
    """int32 [R, k]: ids of the most likely tokens; equally likely ones by ascending id."""
    logprobs: Array
    """float32 [R, k]: their log-probabilities."""
