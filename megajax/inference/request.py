"""Requests to the engine: a prompt, how its answers are sampled, and the pieces in which they are delivered.

Plain Python: a server or a script can build and check requests without a device.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from megajax.config.errors import Problem, UserError

type Finish = Literal["stop", "length", "cancelled", "error"]
"""Why an answer ended: a stop string, a stop token or the end of the text; `max_tokens` or the longest row; `cancel`;
a fault that ended this request alone, such as logits that are not finite."""


class Limit(NamedTuple):
    """The values that a setting may have."""

    kind: type
    """int, or float, which takes integers too. Booleans are neither."""
    least: float
    most: float
    above: bool = False
    """`least` itself is excluded."""
    optional: bool = False
    """None is allowed."""

    def error(self, value: Any) -> str:
        """What is wrong with the value; empty: nothing."""
        if value is None and self.optional:
            return ""
        wanted = "an integer" if self.kind is int else "a number"
        if isinstance(value, bool) or not isinstance(value, int if self.kind is int else (int, float)):
            return f"must be {wanted}, got {_shown(value)}"
        # Comparisons with NaN are false.
        inside = (self.least < value if self.above else self.least <= value) and value <= self.most
        interval = f"above {self.least:,} and at most" if self.above else f"between {self.least:,} and"
        return "" if inside else f"must be {interval} {self.most:,}, got {_shown(value)}"


TOKEN = Limit(int, 0, 2**31 - 1)
"""A token id. Those outside the vocabulary are refused by the engine."""

LIMITS: Mapping[str, Limit] = {
    "max_tokens": Limit(int, 0, 2**20),
    "min_tokens": Limit(int, 0, 2**20),
    "temperature": Limit(float, 0, 100),
    "top_k": Limit(int, 0, 2**20),
    "top_p": Limit(float, 0, 1, above=True),
    "min_p": Limit(float, 0, 1),
    "repetition_penalty": Limit(float, 0, 10, above=True),
    "presence_penalty": Limit(float, -2, 2),
    "frequency_penalty": Limit(float, -2, 2),
    "seed": Limit(int, 0, 2**63 - 1, optional=True),
    "logprobs": Limit(int, 0, 20, optional=True),
    "prompt_logprobs": Limit(int, 0, 20, optional=True),
    "n": Limit(int, 1, 16),
    "best_of": Limit(int, 1, 16, optional=True),
    "beams": Limit(int, 1, 16),
    "length_penalty": Limit(float, -10, 10),
}
"""Of the settings that are numbers. The server's documentation and its schema are made of this table."""

BIASES, BIAS = 512, Limit(float, -100, 100)
"""Most entries of `logit_bias`, and their values."""
BEAM_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (0, 1),
    "top_k": (0,),
    "top_p": (1,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "guide": (None,),
}
"""Settings that a beam search does not apply -> the values that ask for nothing."""
STOPS, STOP_CHARACTERS, STOP_TOKENS = 16, 256, 64
"""Most stop strings, characters of each, and stop tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the tokens of an answer are chosen, and where it ends."""

    max_tokens: int = 16
    """Cut to what is left of the longest row. 0: only the scores of the prompt."""
    min_tokens: int = 0
    """Nothing but `max_tokens` ends an answer before."""
    temperature: float = 1.0
    """0: greedy."""
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    """Keep the most likely tokens whose probabilities add up to this; 1: all."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the largest probability; 0: all."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens of prompt and answer, and multiplies negative ones; 1: none."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens of the answer."""
    frequency_penalty: float = 0.0
    """The same, times the number of their occurrences."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token -> what is added to its logit."""
    seed: int | None = None
    """None: drawn by the engine when the request is submitted."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of them."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end the answer."""
    ignore_eos: bool = False
    """Go on after the end of a text."""
    logprobs: int | None = None
    """Number of most likely tokens to report beside the chosen one. None: no scores."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    n: int = 1
    """Number of answers."""
    best_of: int | None = None
    """Number of answers that are generated; the n most likely per token are delivered, when all have ended."""
    beams: int = 1
    """Width of a beam search, which replaces sampling; 1: none."""
    length_penalty: float = 1.0
    """Of beam search: the log-probability of a text is divided by its length to this power."""
    guide: Any | None = None
    """What the text has to match: a JSON schema."""

    def choices(self) -> int:
        """Number of answers that are generated."""
        return self.n if self.best_of is None else self.best_of

    def problems(self) -> list[Problem]:
        """What is wrong, by the names of the fields."""
        problems = [
            Problem(name, error) for name, limit in LIMITS.items() if (error := limit.error(getattr(self, name)))
        ]
        problems += [
            *self._stop_problems(),
            *self._token_problems(),
        ]
        if not isinstance(self.ignore_eos, bool):
            problems.append(Problem("ignore_eos", f"must be true or false, got {_shown(self.ignore_eos)}"))
        return problems or self._contradictions()

    def _stop_problems(self) -> list[Problem]:
        if not isinstance(self.stop, tuple) or not all(isinstance(stop, str) for stop in self.stop):
            return [Problem("stop", f"must be strings, got {_shown(self.stop)}")]
        if len(self.stop) > STOPS:
            return [Problem("stop", f"must be at most {STOPS} strings, got {len(self.stop):,}")]
        wrong = [len(stop) for stop in self.stop if not 1 <= len(stop) <= STOP_CHARACTERS]
        wanted = f"each string must have between 1 and {STOP_CHARACTERS} characters"
        return [Problem("stop", f"{wanted}, got one of {wrong[0]:,}")] if wrong else []

    def _token_problems(self) -> list[Problem]:
        problems = []
        if not isinstance(self.stop_tokens, tuple) or any(TOKEN.error(token) for token in self.stop_tokens):
            problems.append(Problem("stop_tokens", f"must be token ids, got {_shown(self.stop_tokens)}"))
        elif len(self.stop_tokens) > STOP_TOKENS:
            problems.append(Problem("stop_tokens", f"must be at most {STOP_TOKENS}, got {len(self.stop_tokens):,}"))
        if not isinstance(self.logit_bias, Mapping):
            return [*problems, Problem("logit_bias", f"must map token ids to numbers, got {_shown(self.logit_bias)}")]
        if len(self.logit_bias) > BIASES:
            return [
                *problems,
                Problem("logit_bias", f"must have at most {BIASES} entries, got {len(self.logit_bias):,}"),
            ]
        errors = [f"the token {error}" for token in self.logit_bias if (error := TOKEN.error(token))]
        errors += [f"the value {error}" for value in self.logit_bias.values() if (error := BIAS.error(value))]
        return [*problems, *(Problem("logit_bias", error) for error in errors[:1])]

    def _contradictions(self) -> list[Problem]:
        """Of settings that are valid one by one."""
        problems = []
        if self.min_tokens > self.max_tokens:
            problems.append(Problem("min_tokens", f"{self.min_tokens} is above max_tokens, {self.max_tokens}"))
        if self.best_of is not None and self.best_of < self.n:
            problems.append(Problem("best_of", f"{self.best_of} is below n, {self.n}"))
        if self.beams > 1 and self.best_of is not None:
            problems.append(Problem("best_of", "has no effect on a beam search: leave it out, and set n"))
        if self.beams == 1 and self.length_penalty != 1:
            problems.append(Problem("length_penalty", "has an effect on a beam search only: set beams as well"))
        for name, neutral in BEAM_NEUTRAL.items() if self.beams > 1 else ():
            if getattr(self, name) not in neutral:
                problems.append(Problem(name, "cannot be combined with a beam search: leave one of the two out"))
        for name in ("min_tokens", "ignore_eos") if self.guide is not None else ():
            if getattr(self, name):
                problems.append(Problem(name, "cannot be combined with a guide, which says where a text ends"))
        if 1 < self.beams < self.n:
            problems.append(Problem("n", f"{self.n} answers are more than the {self.beams} beams"))
        return problems


class TokenScore(NamedTuple):
    """A token and how likely it was."""

    token: int
    logprob: float
    """Of the model's own distribution: before temperature, penalties and cut-offs."""
    rank: int | None
    """1 + the number of tokens that were more likely; None: not computed."""
    top: tuple[tuple[int, float], ...]
    """The most likely tokens and their log-probabilities, the most likely first."""


class Piece(NamedTuple):
    """What an answer grew by."""

    choice: int
    """Which of the n answers."""
    text: str
    """Whole characters; what may yet become a stop string comes later or never."""
    tokens: tuple[int, ...]
    """Includes the token that ended the answer, which has no text."""
    scores: tuple[TokenScore, ...]
    """Of the tokens, if the request asks for them."""
    finish: Finish | None
    """None: more pieces follow."""
    prompt_scores: tuple[TokenScore | None, ...] = ()
    """With the first piece of choice 0, if the request asks for them; None for the first token."""

    def then(self, later: "Piece") -> "Piece":
        """This piece and a later one of the same answer."""
        return Piece(
            self.choice,
            self.text + later.text,
            self.tokens + later.tokens,
            self.scores + later.scores,
            later.finish,
            self.prompt_scores + later.prompt_scores,
        )


@dataclass(kw_only=True)
class Answer:
    """What the pieces of a choice add up to."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    finish: Finish | None = None
    prompt_scores: tuple[TokenScore | None, ...] = ()

    def add(self, piece: Piece) -> None:
        """Grows by a piece of its choice."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.scores += piece.scores
        self.finish = piece.finish
        self.prompt_scores += piece.prompt_scores


@dataclass(kw_only=True)
class Request:
    """A prompt, and where its answers go."""

    identifier: str
    prompt: tuple[int, ...]
    sampling: Sampling
    deliver: Callable[[Piece], None]
    """Called on the engine's thread; it must return at once."""
    memory: tuple[int, ...] = ()
    """The text that an encoder reads, where the model has one; the prompt is then the beginning of the answer."""


class Refused(UserError):
    """A request that the engine does not take."""

    def __init__(
        self,
        reason: Literal["queue_full", "too_long", "invalid", "draining"],
        message: str,
        field: str | None = None,
    ):
        """field: the one that is wrong, by its name in `Sampling` or `Request`."""
        super().__init__(message)
        self.reason, self.message, self.field = reason, message, field


def _shown(value: Any) -> str:
    """At most 60 characters, whatever a client sent."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = repr(value) if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."
