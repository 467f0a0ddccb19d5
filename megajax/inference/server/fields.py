"""The fields of requests, in one table for each route.

Bodies are checked by these tables, and /openapi.json is written from them.
"""

import re
from base64 import b64decode
from typing import Any

from megajax.config.read_limits import parse_json
from megajax.inference.sampling_settings import Grammar, Limit
from megajax.inference.server.values import (
    Field,
    Fields,
    Unsupported,
    Values,
    choice,
    instance,
    integer,
    items,
    nonempty_text,
    number,
)

IMAGE_URLS = ("data:image/png;base64", "data:image/jpeg;base64", "data:image/jpg;base64")
"""Starts of the URLs of images: the server fetches nothing."""
JSON_OBJECT = {"type": "object"}
"""The guide of any JSON object."""


def _strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(string, str) for string in value):
        raise ValueError
    return tuple(value)


def _stop(value: Any) -> tuple[str, ...]:
    return _strings([value] if isinstance(value, str) else value)


def _tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError
    return tuple(value)


def _allowed(value: Any) -> tuple[int, ...]:
    return _tokens(nonempty(value))


def _bias(value: Any) -> dict[int, float]:
    """Token -> bias; the keys of JSON objects are strings."""
    if not isinstance(value, dict) or not all(re.fullmatch("[0-9]{1,10}", name) for name in value):
        raise ValueError
    return {int(name): bias for name, bias in value.items()}


def _truncation(value: Any) -> int:
    if value != -1 and Limit(int, 1, 2**20).error(value):
        raise ValueError
    return instance(int)(value)


def _all_at_minus_one(value: Any) -> Any:
    return 0 if type(value) is int and value == -1 else value


def _schema(value: Any) -> Any:
    """A JSON schema, or its text."""
    return instance(dict)(parse_json(value) if isinstance(value, str) else value)


def _grammar(value: Any) -> Grammar:
    return Grammar(instance(str)(value))


def _choices(value: Any) -> str:
    """The regular expression of one of several texts."""
    texts = _strings(value)
    if not texts:
        raise ValueError
    return "|".join(re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text) for text in texts)


def _whole_object(value: bool) -> Any:
    return JSON_OBJECT if instance(bool)(value) else None


def _response_format(value: Any) -> Any:
    """The guide of a format; None for any text."""
    kind, described = instance(Values)(value)["type"], value.get("json_schema")
    if (described is None) != (kind != "json_schema"):
        raise ValueError
    return described["schema"] if kind == "json_schema" else JSON_OBJECT if kind == "json_object" else None


def _one_guide(value: Any) -> Any:
    guides = [guide for guide in instance(Values)(value).values() if guide is not None]
    if len(guides) != 1:
        raise ValueError
    return guides[0]


def data_url(value: Any) -> bytes:
    """The content of a data: URL."""
    kind, comma, text = instance(str)(value).partition(",")
    if not comma or kind.lower() not in IMAGE_URLS:
        raise ValueError
    return b64decode(text, validate=True)


def joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of a message of these parts, texts and images; one text without images."""
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def nonempty(value: Any) -> list[Any]:
    """A list with something in it."""
    if not instance(list)(value):
        raise ValueError
    return value


FLAG = Field("true or false", {"type": "boolean"}, instance(bool))
STRING = Field("a string", {"type": "string"}, instance(str))
TEXT = Field("a string that is not empty", {"type": "string", "minLength": 1}, nonempty_text)
OBJECT = Field("an object", {"type": "object"}, instance(dict))
IMAGE_URL = Field("a URL data:image/png;base64,… or data:image/jpeg;base64,…", {"type": "string"}, data_url)
TOKENS = Field("a list of token ids", items("integer"), _tokens)
GUIDE_SCHEMA = Field("a JSON schema", {"type": ["object", "string"]}, _schema)
GUIDE_CHOICE = Field("a list of strings, at least one", items("string"), _choices)
GUIDE_GRAMMAR = Field("a grammar in the form of Lark or GBNF", {"type": "string"}, _grammar)
GUIDE_REGEX = Field("a regular expression", {"type": "string"}, instance(str))
NO_TAGS = Unsupported("tags are not supported: give json, choice, regex or grammar")

STRUCTURED_OUTPUTS: Fields = {
    "json": GUIDE_SCHEMA,
    "choice": GUIDE_CHOICE,
    "regex": GUIDE_REGEX,
    "json_object": Field("true or false", {"type": "boolean"}, _whole_object),
    "grammar": GUIDE_GRAMMAR,
    "structural_tag": NO_TAGS,
}
JSON_SCHEMA: Fields = {"name": STRING, "description": STRING, "strict": FLAG, "schema": OBJECT._replace(required=True)}
RESPONSE_FORMAT: Fields = {
    "type": choice("text", "json_object", "json_schema")._replace(required=True),
    "json_schema": Field("an object with a schema", {"type": "object"}, fields=JSON_SCHEMA),
}
STREAM_OPTIONS: Fields = {"include_usage": FLAG, "continuous_usage_stats": FLAG, "include_obfuscation": FLAG}

TRUNCATION = Field("an integer, at least 1, or -1 for as many as fit", {"type": "integer", "minimum": -1}, _truncation)

SAMPLING: Fields = {
    **{
        name: number(name)
        for name in (
            *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
            *("presence_penalty", "frequency_penalty", "seed", "n", "best_of", "beams", "length_penalty"),
            "prompt_logprobs",
        )
    },
    "top_k": number("top_k")._replace(read=_all_at_minus_one),
    "logit_bias": Field('an object such as {"42": -1}, by token id', {"type": "object"}, _bias, "logit_bias"),
    "stop": Field("a string or a list of strings", {"type": ["string", "array"]}, _stop, "stop"),
    "stop_token_ids": TOKENS._replace(setting="stop_tokens"),
    "ignore_eos": FLAG._replace(setting="ignore_eos"),
    "include_stop_str_in_output": FLAG._replace(setting="include_stop"),
    "no_stop_trim": FLAG._replace(setting="include_stop"),
    "response_format": Field(
        "an object with a type (text, json_object or json_schema) and, for json_schema alone, a json_schema",
        {"type": "object"},
        _response_format,
        "guide",
        RESPONSE_FORMAT,
    ),
    "structured_outputs": Field(
        "an object with one of json, choice, regex, grammar and json_object",
        {"type": "object"},
        _one_guide,
        "guide",
        STRUCTURED_OUTPUTS,
    ),
    "guided_json": GUIDE_SCHEMA._replace(setting="guide"),
    "guided_choice": GUIDE_CHOICE._replace(setting="guide"),
    "guided_regex": GUIDE_REGEX._replace(setting="guide"),
    "json_schema": GUIDE_SCHEMA._replace(setting="guide"),
    "regex": GUIDE_REGEX._replace(setting="guide"),
    **dict.fromkeys(("guided_grammar", "ebnf"), GUIDE_GRAMMAR._replace(setting="guide")),
    "allowed_token_ids": Field("a list of token ids, at least one", items("integer"), _allowed, "allowed_tokens"),
    "bad_words": Field("a list of strings", items("string"), _strings),
    "truncate_prompt_tokens": TRUNCATION,
}
"""Fields of both OpenAI routes, with the usual names for settings that OpenAI lacks."""

NO_EFFECT: Fields = {
    **dict.fromkeys(("user", "safety_identifier", "service_tier", "request_id"), STRING),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention"), STRING),
    **dict.fromkeys(("store", "skip_special_tokens", "spaces_between_special_tokens"), FLAG),
    "metadata": OBJECT,
}
"""Fields that are accepted without effect."""

SCHEDULING: Fields = {
    "priority": Field("an integer", {"type": "integer"}, integer),
    "cache_salt": TEXT,
}
"""When a request runs, and with which others it shares the cache."""

UNSUPPORTED: Fields = {
    "structural_tag": NO_TAGS,
    **dict.fromkeys(("lora_path", "prompt_embeds", "return_hidden_states"), Unsupported("leave it out", ("", False))),
    "use_beam_search": Unsupported("set beams to the width of the search", (False,)),
    "logits_processors": Unsupported("no code of clients runs here", ([],)),
}
"""Fields of other servers on both routes that would change the answer."""

COMMON: Fields = {
    **SAMPLING,
    **NO_EFFECT,
    **SCHEDULING,
    **UNSUPPORTED,
    "model": STRING,
    "stream": FLAG,
    "stream_options": Field(
        "an object with include_usage", {"type": "object"}, instance(Values), fields=STREAM_OPTIONS
    ),
    "return_token_ids": FLAG,
    "return_tokens_as_token_ids": FLAG,
}

COMPLETIONS: Fields = {
    **COMMON,
    "prompt": Field(
        "a string, a list of strings, a list of token ids, or a list of such lists",
        {"type": ["string", "array"]},
        required=True,
    ),
    "echo": FLAG,
    "logprobs": number("logprobs"),
    "special_tokens": FLAG,
    "add_special_tokens": FLAG,
    "suffix": Unsupported("text is not inserted before a suffix: leave it out", ("",)),
}
"""Fields of /v1/completions."""
