"""The fields of requests: the fields of each route, their types, and their settings of `Sampling`.

Limits of numbers are in `request.LIMITS`; other fields are checked here.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from megajax.config.nearest import did_you_mean
from megajax.inference.sampling_settings import LIMITS, Sampling, abbreviated
from megajax.inference.server.errors import invalid


class Field(NamedTuple):
    """A field that a request may have."""

    kind: str
    """Description of the type, for messages and documentation."""
    read: Callable[[Any], Any]
    """JSON value -> Python value. Raises ValueError for a value of another type."""
    setting: str | None = None
    """Setting of `Sampling`, which checks the limits."""
    null: bool = False
    """Whether null means that the field is missing."""


class Unsupported(NamedTuple):
    """A field of other servers, rejected with a reason."""

    reason: str


type Fields = Mapping[str, Field | Unsupported]


def _identity(value: Any) -> Any:
    return value


def _instance(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError
        return value

    return read


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise ValueError
    return tuple(strings)


def _tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError
    return tuple(value)


def _bias(value: Any) -> dict[int, float]:
    """Token -> bias; the keys of JSON objects are strings."""
    if not isinstance(value, dict) or not all(re.fullmatch("[0-9]{1,10}", name) for name in value):
        raise ValueError
    return {int(name): bias for name, bias in value.items()}


def _stream_options(value: Any) -> bool:
    """Whether the last event has the usage."""
    if not isinstance(value, dict) or not value.keys() <= {"include_usage"}:
        raise ValueError
    return _instance(bool)(value.get("include_usage", False))


def number(setting: str) -> Field:
    """A number with limits in LIMITS."""
    limit = LIMITS[setting]
    kind = "an integer" if limit.kind is int else "a number"
    return Field(kind, _identity, setting, limit.optional)


FLAG = Field("true or false", _instance(bool))
STRING = Field("a string", _instance(str))

SAMPLING: Fields = {
    **{
        name: number(name)
        for name in (
            *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
            *("presence_penalty", "frequency_penalty", "seed", "n", "best_of", "beams", "length_penalty"),
        )
    },
    "logit_bias": Field("an object of token ids and numbers", _bias, "logit_bias", null=True),
    "stop": Field("a string or a list of strings", _stop, "stop", null=True),
    "stop_token_ids": Field("a list of token ids", _tokens, "stop_tokens", null=True),
    "ignore_eos": FLAG._replace(setting="ignore_eos"),
}
"""Fields of both OpenAI routes, with the usual names for settings that OpenAI lacks."""

COMMON: Fields = {
    **SAMPLING,
    "model": STRING,
    "stream": FLAG._replace(null=True),
    "stream_options": Field("an object with include_usage", _stream_options, null=True),
    "response_format": Field("an object with a type", _instance(dict), null=True),
    "user": STRING._replace(null=True),
}

COMPLETIONS: Fields = {
    **COMMON,
    "prompt": Field("a string, a list of strings, a list of token ids, or a list of such lists", _identity),
    "echo": FLAG._replace(null=True),
    "logprobs": number("logprobs"),
    "special_tokens": FLAG,
    "add_special_tokens": FLAG,
    "suffix": Unsupported("text is not inserted before a suffix: leave it out"),
}
"""Fields of /v1/completions."""

NO_TOOLS = Unsupported("tools are not supported: describe them in a message, and ask for response_format json_schema")
CHAT: Fields = {
    **COMMON,
    "messages": Field("a list of messages", _identity),
    "max_completion_tokens": number("max_tokens"),
    "logprobs": FLAG._replace(null=True),
    "top_logprobs": number("logprobs"),
    **dict.fromkeys(("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls"), NO_TOOLS),
    "chat_template": Unsupported("templates are chosen when the server starts (inference.template)"),
}
"""Fields of /v1/chat/completions."""

TOKENIZE: Fields = {
    "model": STRING,
    "prompt": STRING,
    "messages": Field("a list of messages", _identity),
    "special_tokens": FLAG,
    "add_special_tokens": FLAG,
}
"""Fields of /tokenize, which takes either prompt or messages."""
DETOKENIZE: Fields = {"model": STRING, "tokens": Field("a list of token ids", _tokens)}
"""Fields of /detokenize."""


def check(body: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """Check names and types of the fields of a body -> Python values. Raises RequestError."""
    values = {}
    for name, value in body.items():
        field = fields.get(name)
        if field is None:
            suggestion = did_you_mean(name[:60], [name for name, field in fields.items() if isinstance(field, Field)])
            raise invalid(name[:60], f"unknown field {name[:60]!r}" + f": {suggestion}" * bool(suggestion))
        if isinstance(field, Unsupported):
            raise invalid(name, f"{name}: {field.reason}")
        if value is None and field.null:
            continue
        try:
            values[name] = field.read(value)
        except ValueError:
            raise invalid(name, f"{name} must be {field.kind}, got {abbreviated(value)}") from None
    return values


def sampling(values: Mapping[str, Any], fields: Fields, base: Sampling) -> Sampling:
    """The settings of `base`, replaced by those of the fields. Raises RequestError for values beyond the limits."""
    settings = {}
    for name, value in values.items():
        field = fields[name]
        if isinstance(field, Field) and field.setting is not None:
            settings[field.setting] = value
    settings_with_defaults = replace(base, **settings)
    names = names_by_setting(fields, values)
    for problem in settings_with_defaults.problems():
        param = names.get(problem.setting, problem.setting)
        raise invalid(param, f"{param} {problem.message}")
    return settings_with_defaults


def names_by_setting(fields: Fields, values: Mapping[str, Any]) -> dict[str, str]:
    """Setting of `Sampling` -> its field; of two fields, the one in the request."""
    settings = {name: field.setting for name, field in fields.items() if isinstance(field, Field) and field.setting}
    order = sorted(settings, key=lambda name: name in values)
    return {settings[name]: name for name in order}


def one_of(values: Mapping[str, Any], first: str, second: str) -> None:
    """Raises RequestError if two names of the same setting have different values."""
    if first in values and second in values and values[first] != values[second]:
        settings = f"{second} is {abbreviated(values[second])}, {first} is {abbreviated(values[first])}"
        raise invalid(second, f"{settings}: both are the same setting, give one of them")


def demand(values: Mapping[str, Any], name: str) -> Any:
    """The value of a required field. Raises RequestError if it is missing."""
    if name not in values:
        raise invalid(name, f"{name} must be given")
    return values[name]
