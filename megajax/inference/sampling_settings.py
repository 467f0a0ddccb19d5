"""The settings of an answer, their limits, and their flags; imports neither jax nor flax."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple

from megajax.command_line.help import field_texts
from megajax.command_line.parser import Flag
from megajax.config.bounds import Bounds, Rule, Share, rules
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.field_types import hints, kinds

MAX_TOKENS = 256
"""Default of the flag --max-tokens."""

type TokenId = Annotated[int, Bounds(at_least=0, at_most=2**31 - 1)]
"""The engine rejects ids outside the vocabulary."""
type Length = Annotated[int, Bounds(at_least=1, at_most=2**20)]
type UpToLength = Annotated[int, Bounds(at_least=0, at_most=2**20)]
type Penalty = Annotated[float, Bounds(at_least=-2, at_most=2)]
type Likeliest = Annotated[int, Bounds(at_least=0, at_most=20)]
type Answers = Annotated[int, Bounds(at_least=1, at_most=1024)]
type Bias = Annotated[float, Bounds(at_least=-100, at_most=100)]


def number_error(value: Any, annotation: Any) -> str:
    """Why a value of any type is no such number; "" if it is one. Integers are numbers too, true and false are none."""
    is_integer, is_optional, bounds = _number(annotation)
    if value is None and is_optional:
        return ""
    if isinstance(value, bool) or not isinstance(value, int if is_integer else (int, float)):
        return f"must be {'an integer' if is_integer else 'a number'}, got {abbreviated(value)}"
    return next(filter(None, (bound.error(value) for bound in bounds)), "")


def _id_error(tokens: Collection[Any]) -> str:
    """Why one of these is no token id. Of integers only the least and the largest are checked: there may be many."""
    are_integers = tokens and all(type(token) is int for token in tokens)
    checked = (min(tokens), max(tokens)) if are_integers else tokens
    return next(filter(None, (number_error(token, TokenId) for token in checked)), "")


@cache
def _number(annotation: Any) -> tuple[bool, bool, tuple[Rule, ...]]:
    """Whether the numbers are integers, whether None is allowed, and the bounds."""
    return int in kinds(annotation), NoneType in kinds(annotation), tuple(rules(annotation))


BIASES = 512
"""Maximum number of entries of `logit_bias`."""
BEAM_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (0, 1),
    "top_k": (0,),
    "top_p": (1,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprob_tokens": ((),),
    "allowed_tokens": ((),),
    "bad_tokens": ((),),
    "guide": (None,),
}
"""Settings that a beam search does not support -> their neutral values."""
STOPS, STOP_CHARACTERS, STOP_TOKENS = 16, 256, 64
"""Maximum number of stop strings, of characters of each, and of stop tokens."""
LISTED = 20
"""Maximum number of `logprob_tokens`."""
TOKEN_LISTS: Mapping[str, int] = {"stop_tokens": STOP_TOKENS, "logprob_tokens": LISTED, "allowed_tokens": 2**20}
"""Settings that are token ids -> their maximum number."""
BAD, BAD_LENGTH = 128, 32
"""Maximum number of `bad_tokens`, and of tokens of each."""


class Grammar(NamedTuple):
    """A guide that is a context-free grammar."""

    text: str
    """In the form of Lark or GBNF."""


class GuideLimits(NamedTuple):
    """Limits of the guides of strangers; see the fields guide_… of `ServerConfig`."""

    seconds: float
    """Processor time to compile one."""
    size: int
    """Bytes of one."""
    cache_bytes: int
    """Bytes of all."""
    waiting: int
    """Number that may wait to be compiled."""
    step_seconds: float
    """Processor time of one for each token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the tokens of an answer are chosen, and where it ends."""

    max_tokens: UpToLength = 16
    """Maximum number of tokens, further limited by the maximum row length. 0: only the scores of the prompt."""
    min_tokens: UpToLength = 0
    """Minimum number of tokens."""
    temperature: Annotated[float, Bounds(at_least=0, at_most=100)] = 1.0
    """0: greedy."""
    top_k: UpToLength = 0
    """0: all tokens."""
    top_p: Annotated[float, Bounds(above=0, at_most=1)] = 1.0
    """Keep the most likely tokens whose probabilities add up to this; 1: all."""
    min_p: Share = 0.0
    """Keep tokens with at least this share of the largest probability; 0: all."""
    repetition_penalty: Annotated[float, Bounds(at_least=0.01, at_most=10)] = 1.0
    """Divides positive logits of tokens of prompt and answer, and multiplies negative ones; 1: no penalty."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logits of tokens of the answer."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from the logits of tokens of the answer for each of their occurrences."""
    logit_bias: Mapping[TokenId, Bias] = field(default_factory=dict)
    """Token -> number added to its logit."""
    allowed_tokens: tuple[TokenId, ...] = ()
    """Token ids from which all tokens are chosen, the end of a text included. Empty: all."""
    bad_tokens: tuple[tuple[TokenId, ...], ...] = ()
    """Sequences of token ids that the answer does not have."""
    seed: Annotated[int, Bounds(at_least=0, at_most=2**63 - 1)] | None = None
    """Random seed. None: a random one."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; it ends before the first one, unless `include_stop`."""
    include_stop: bool = False
    """End the text after the stop string."""
    stop_tokens: tuple[TokenId, ...] = ()
    """Token ids that end the answer."""
    ignore_eos: bool = False
    """Continue after the end of a text."""
    logprobs: Likeliest | None = None
    """Number of most likely tokens to report in addition to the chosen one. None: no scores."""
    prompt_logprobs: Likeliest | None = None
    """Number of most likely tokens to report for each token of the prompt. None: no scores."""
    logprob_tokens: tuple[TokenId, ...] = ()
    """Token ids to report in place of the most likely ones; `logprobs` must be their number."""
    n: Answers = 1
    """Number of answers."""
    best_of: Answers | None = None
    """Number of answers to generate. The n with the highest mean log-probability are delivered at the end."""
    beams: Annotated[int, Bounds(at_least=1, at_most=16)] = 1
    """Width of a beam search, which replaces sampling; 1: sampling."""
    length_penalty: Annotated[float, Bounds(at_least=-10, at_most=10)] = 1.0
    """Beam search divides the log-probability of a text by its length to this power."""
    guide: Any | None = None
    """A JSON schema, a regular expression as a string, or a `Grammar`, that the text has to match."""

    def choices(self) -> int:
        """Number of generated answers."""
        return self.n if self.best_of is None else self.best_of

    def penalized(self) -> bool:
        """Whether a token depends on which tokens came before, beside the model's logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def problems(self) -> list[Problem]:
        """Invalid settings, by the names of the fields."""
        errors = {name: number_error(getattr(self, name), kind) for name, kind in NUMBERS.items()}
        errors["stop"] = self._stop_error()
        errors |= {name: self._tokens_error(name, most) for name, most in TOKEN_LISTS.items()}
        errors |= {"logit_bias": self._bias_error(), "bad_tokens": self._bad_error()}
        for name in ("ignore_eos", "include_stop"):
            if not isinstance(value := getattr(self, name), bool):
                errors[name] = f"must be true or false, got {abbreviated(value)}"
        return [Problem(name, error) for name, error in errors.items() if error] or self._contradictions()

    def _stop_error(self) -> str:
        if not isinstance(self.stop, tuple) or not all(isinstance(stop, str) for stop in self.stop):
            return f"must be strings, got {abbreviated(self.stop)}"
        if len(self.stop) > STOPS:
            return f"must be at most {STOPS} strings, got {len(self.stop):,}"
        lengths = [len(stop) for stop in self.stop if not 1 <= len(stop) <= STOP_CHARACTERS]
        expected = f"each string must have between 1 and {STOP_CHARACTERS} characters"
        return f"{expected}, got one of {lengths[0]:,}" if lengths else ""

    def _tokens_error(self, name: str, most: int) -> str:
        tokens = getattr(self, name)
        if not isinstance(tokens, tuple):
            return f"must be token ids, got {abbreviated(tokens)}"
        if error := _id_error(tokens):
            return f"the token {error}"
        return f"must be at most {most}, got {len(tokens):,}" if len(tokens) > most else ""

    def _bad_error(self) -> str:
        if len(self.bad_tokens) > BAD:
            return f"must be at most {BAD}, got {len(self.bad_tokens):,}"
        long = [len(tokens) for tokens in self.bad_tokens if not 1 <= len(tokens) <= BAD_LENGTH]
        if long:
            return f"each must have between 1 and {BAD_LENGTH} tokens, got one of {long[0]:,}"
        return next(filter(None, map(_id_error, self.bad_tokens)), "")

    def _bias_error(self) -> str:
        if not isinstance(self.logit_bias, Mapping):
            return f"must map token ids to numbers, got {abbreviated(self.logit_bias)}"
        if len(self.logit_bias) > BIASES:
            return f"must have at most {BIASES} entries, got {len(self.logit_bias):,}"
        if error := _id_error(self.logit_bias):
            return f"the token {error}"
        errors = (number_error(value, Bias) for value in self.logit_bias.values())
        return next((f"the value {error}" for error in errors if error), "")

    def _contradictions(self) -> list[Problem]:
        """Contradictions between valid settings."""
        problems = []
        if self.min_tokens > self.max_tokens:
            problems.append(Problem("min_tokens", f"{self.min_tokens} is above max_tokens, {self.max_tokens}"))
        if self.best_of is not None and self.best_of < self.n:
            problems.append(Problem("best_of", f"{self.best_of} is below n, {self.n}"))
        if self.beams > 1 and self.best_of is not None:
            problems.append(Problem("best_of", "has no effect on a beam search: remove it, and set n"))
        if self.beams == 1 and self.length_penalty != 1:
            problems.append(Problem("length_penalty", "has an effect only on a beam search: set beams as well"))
        for name, neutral in BEAM_NEUTRAL.items() if self.beams > 1 else ():
            if getattr(self, name) not in neutral:
                problems.append(Problem(name, "cannot be combined with a beam search: remove one of them"))
        for name in ("min_tokens", "ignore_eos") if self.guide is not None else ():
            if getattr(self, name):
                problems.append(Problem(name, "cannot be combined with a guide, which determines the end of a text"))
        if self.logprob_tokens and self.logprobs != len(self.logprob_tokens):
            message = f"are {len(self.logprob_tokens)} tokens, but logprobs is {self.logprobs}: set it to their number"
            problems.append(Problem("logprob_tokens", message))
        if 1 < self.beams < self.n:
            problems.append(Problem("n", f"{self.n} answers are more than the {self.beams} beams"))
        return problems


NUMBERS: Mapping[str, Any] = {name: kind for name, kind in hints(Sampling).items() if any(rules(kind))}
"""The settings that are one number -> their annotations."""


def abbreviated(value: Any) -> str:
    """A value in at most 60 characters; only its type for lists, objects and the like."""
    text = repr(value) if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


def sampling_flags() -> tuple[Flag, ...]:
    """A flag for each field of `Sampling`."""
    types, texts, usual = hints(Sampling), field_texts(Sampling), Sampling(max_tokens=MAX_TOKENS)
    types["guide"] = Path | None
    texts["guide"] = "A file with the JSON schema that the answer has to match."
    names = [setting.name for setting in fields(Sampling)]
    return tuple(Flag(name.replace("_", "-"), types[name], getattr(usual, name), texts.get(name, "")) for name in names)


def sampling_of(flags: Mapping[str, Any]) -> Sampling:
    """The settings of the flags. Raises ConfigError for invalid values."""
    settings = {setting.name: flags[setting.name] for setting in fields(Sampling)}
    if settings["guide"] is not None:
        try:
            settings["guide"] = json.loads(settings["guide"].read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"--guide={flags['guide']}: is not a file with a JSON schema: {error}") from error
    sampling = Sampling(**settings)
    if problems := sampling.problems():
        flag_problems = [replace(problem, setting=f"--{problem.setting.replace('_', '-')}") for problem in problems]
        raise ConfigError(flag_problems, "command line")
    return sampling
