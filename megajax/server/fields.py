"""The fields of requests, in one table for each route.

Bodies are checked by these tables, and /openapi.json is written from them. Chats are those of messages and tools.
"""

import re
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from megajax.config.read_limits import Json, parse_json
from megajax.inference.sampling_settings import Grammar, Length, number_error
from megajax.server.request_values import (
    Field,
    Fields,
    RequestValues,
    Unsupported,
    choice,
    instance,
    integer,
    list_of,
    nonempty_text,
    number,
    one_of,
)

IMAGE_URLS = ("data:image/png;base64", "data:image/jpeg;base64", "data:image/jpg;base64")
"""Starts of the URLs of images: the server fetches nothing."""
JSON_OBJECT = {"type": "object"}
"""The guide of any JSON object."""
ROLES = ("system", "developer", "user", "assistant", "tool")
RENDERING_NAMES = ("self", "messages", "prompt", "add_generation_prompt", "tools")
"""Variables of templates that a request cannot set."""


_strings = list_of(instance(str))
_tokens = list_of(integer)


def _stop(value: Json) -> tuple[str, ...]:
    return _strings([value] if isinstance(value, str) else value)


def _allowed(value: Json) -> tuple[int, ...]:
    return _tokens(_nonempty(value))


def _bias(value: Json) -> dict[int, float]:
    """Token -> bias; the keys of JSON objects are strings."""
    biases = instance(dict)(value)
    if not all(re.fullmatch("[0-9]{1,10}", name) for name in biases):
        raise ValueError
    return {int(name): bias for name, bias in biases.items()}


def _truncation(value: Json) -> int:
    if value != -1 and number_error(value, Length):
        raise ValueError
    return instance(int)(value)


def _all_at_minus_one(value: Json) -> Any:
    return 0 if type(value) is int and value == -1 else value


def _schema(value: Json) -> Any:
    """A JSON schema, or its text."""
    return instance(dict)(parse_json(value) if isinstance(value, str) else value)


def _grammar(value: Json) -> Grammar:
    return Grammar(instance(str)(value))


def _choices(value: Json) -> str:
    """The regular expression of one of several texts."""
    texts = _strings(value)
    if not texts:
        raise ValueError
    return "|".join(re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text) for text in texts)


def _whole_object(value: bool) -> Any:
    return JSON_OBJECT if instance(bool)(value) else None


def _response_format(value: Json) -> Any:
    """The guide of a format; None for any text."""
    kind, described = (form := instance(RequestValues)(value))["type"], form.get("json_schema")
    if (described is None) != (kind != "json_schema"):
        raise ValueError
    return JSON_OBJECT if kind == "json_object" else None if described is None else described["schema"]


def _one_guide(value: Json) -> Any:
    guides = [guide for guide in instance(RequestValues)(value).values() if guide is not None]
    if len(guides) != 1:
        raise ValueError
    return guides[0]


def _data_url(value: Json) -> bytes:
    """The content of a data: URL."""
    kind, comma, text = instance(str)(value).partition(",")
    if not comma or kind.lower() not in IMAGE_URLS:
        raise ValueError
    return b64decode(text, validate=True)


def _nonempty(value: Json) -> list[Any]:
    """A list with something in it."""
    if not (items := instance(list)(value)):
        raise ValueError
    return items


def _content(value: object) -> str | list[dict[str, Any]]:
    """A text, or the joined parts. Raises RequestError for an image without a URL."""
    if not isinstance(value, list):
        return instance(str)(value)
    parts = list(map(_part, value))
    return parts if any(part["type"] == "image" for part in parts) else "".join(part["text"] for part in parts)


def _part(part: RequestValues) -> dict[str, Any]:
    if part["type"] != "image_url":
        return {"type": "text", "text": part.get(part["type"], "")}
    if "image_url" not in part:
        raise part.invalid("image_url", "must be given")
    return {"type": "image", "data": part["image_url"]["url"]}


def _messages(value: Json) -> list[Any]:
    """Raises RequestError for a message without content and calls."""
    for message in (messages := _nonempty(value)):
        if "content" not in message and not message.get("tool_calls"):
            raise message.invalid("content", "must be given")
    return messages


def _named_function(value: Json) -> dict[str, Any]:
    """An object with type function and a function that has a name."""
    function = (named := instance(dict)(value)).get("function")
    if named.get("type", "function") != "function" or not isinstance(instance(dict)(function).get("name"), str):
        raise ValueError
    return named


def _tools(value: Json) -> list[dict[str, Any]]:
    for tool in (tools := instance(list)(value)):
        if not isinstance(_named_function(tool)["function"].get("parameters"), dict | None):
            raise ValueError
    return tools


def _tool_choice(value: Json) -> Any:
    return one_of("none", "auto", "required")(value) if isinstance(value, str) else _named_function(value)


def _arguments(value: Json) -> dict[str, Any]:
    return instance(dict)(parse_json(value or "{}") if isinstance(value, str) else value)


def _calls(value: Json) -> list[dict[str, Any]]:
    """Calls for templates, which take arguments as objects."""
    calls = instance(list)(value)
    return [{**call, "type": "function", "function": {"arguments": {}, **call["function"]}} for call in calls]


def _variables(value: Json) -> dict[str, Any]:
    if set(RENDERING_NAMES) & (variables := instance(dict)(value)).keys():
        raise ValueError
    return variables


FLAG = Field("true or false", instance(bool))
STRING = Field("a string", instance(str))
TEXT = Field("a string that is not empty", nonempty_text)
OBJECT = Field("an object", instance(dict))
PROMPT = Field("a string, a list of strings, a list of token ids, or a list of such lists", required=True)
TOKENS = Field("a list of token ids", _tokens)
GUIDE_SCHEMA = Field("a JSON schema", _schema)
GUIDE_CHOICE = Field("a list of strings, at least one", _choices)
GUIDE_GRAMMAR = Field("a grammar in the form of Lark or GBNF", _grammar)
GUIDE_REGEX = Field("a regular expression", instance(str))
NO_TAGS = Unsupported("tags are not supported: give json, choice, regex or grammar")

STRUCTURED_OUTPUTS: Fields = {
    "json": GUIDE_SCHEMA,
    "choice": GUIDE_CHOICE,
    "regex": GUIDE_REGEX,
    "json_object": Field("true or false", _whole_object),
    "grammar": GUIDE_GRAMMAR,
    "structural_tag": NO_TAGS,
}
JSON_SCHEMA: Fields = {"name": STRING, "description": STRING, "strict": FLAG, "schema": OBJECT._replace(required=True)}
RESPONSE_FORMAT: Fields = {
    "type": choice("text", "json_object", "json_schema")._replace(required=True),
    "json_schema": Field("an object with a schema", fields=JSON_SCHEMA),
}
STREAM_OPTIONS: Fields = {"include_usage": FLAG, "continuous_usage_stats": FLAG, "include_obfuscation": FLAG}

TRUNCATION = Field("an integer, at least 1, or -1 for as many as fit", _truncation)

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
    "logit_bias": Field('an object such as {"42": -1}, by token id', _bias, "logit_bias"),
    "stop": Field("a string or a list of strings", _stop, "stop"),
    "stop_token_ids": TOKENS._replace(setting="stop_tokens"),
    "ignore_eos": FLAG._replace(setting="ignore_eos"),
    "include_stop_str_in_output": FLAG._replace(setting="include_stop"),
    "no_stop_trim": FLAG._replace(setting="include_stop"),
    "response_format": Field(
        "an object with a type (text, json_object or json_schema) and, for json_schema alone, a json_schema",
        _response_format,
        "guide",
        RESPONSE_FORMAT,
    ),
    "structured_outputs": Field(
        "an object with one of json, choice, regex, grammar and json_object",
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
    "allowed_token_ids": Field("a list of token ids, at least one", _allowed, "allowed_tokens"),
    "bad_words": Field("a list of strings", _strings),
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
    "priority": Field("an integer", integer),
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
    "stream_options": Field("an object with include_usage", instance(RequestValues), fields=STREAM_OPTIONS),
    "return_token_ids": FLAG,
    "return_tokens_as_token_ids": FLAG,
}

COMPLETIONS: Fields = {
    **COMMON,
    "prompt": PROMPT,
    "echo": FLAG,
    "logprobs": number("logprobs"),
    "special_tokens": FLAG,
    "add_special_tokens": FLAG,
    "suffix": Unsupported("text is not inserted before a suffix: leave it out", ("",)),
}
"""Fields of /v1/completions."""

NO_FUNCTIONS = Unsupported("this is the older form of tools: use tools and tool_choice", ([], "none", "auto"))

IMAGE_URL: Fields = {
    "url": Field("a URL data:image/png;base64,… or data:image/jpeg;base64,…", _data_url, required=True),
    "detail": STRING,
}
PART: Fields = {
    "type": Field(
        "text or image_url: other content is not supported", one_of("text", "refusal", "image_url"), required=True
    ),
    "text": STRING,
    "refusal": STRING,
    "image_url": Field("an object with a url", instance(RequestValues), fields=IMAGE_URL),
}
FUNCTION: Fields = {
    "name": STRING._replace(required=True),
    "arguments": Field("an object as JSON", _arguments),
}
CALL: Fields = {
    "id": STRING,
    "index": Field("an integer", instance(int)),
    "type": choice("function"),
    "function": Field("an object with a name and arguments", instance(RequestValues), fields=FUNCTION, required=True),
}
MESSAGE: Fields = {
    "role": choice(*ROLES)._replace(required=True),
    "content": Field("a string or a list of parts", _content, fields=PART),
    "name": STRING,
    "refusal": STRING,
    "audio": Unsupported("only text is supported"),
    "tool_calls": Field(
        "a list of calls, each with a function: its name, and its arguments as JSON", _calls, fields=CALL
    ),
    "tool_call_id": STRING,
    "reasoning_content": STRING,
    "function_call": NO_FUNCTIONS,
}
MESSAGES = Field("a list with a message or more", _messages, fields=MESSAGE)
RENDERING: Fields = {
    "add_generation_prompt": FLAG,
    "continue_final_message": FLAG,
    "chat_template_kwargs": Field(f"an object without {', '.join(RENDERING_NAMES)}, which the server sets", _variables),
    "chat_template": Unsupported("templates are chosen when the server starts (inference.template)"),
    "tools": Field(
        "a list of objects with type function and a function: its name, and parameters as a JSON schema",
        _tools,
    ),
    "documents": Unsupported("write documents into a message, or into chat_template_kwargs", ([],)),
}
"""How messages become a prompt."""

CHAT: Fields = {
    **COMMON,
    **RENDERING,
    # Accepted without effect.
    **{"verbosity": STRING, "modalities": Field('["text"]', one_of(["text"])), "prediction": OBJECT},
    "messages": MESSAGES._replace(required=True),
    "max_completion_tokens": number("max_tokens"),
    "logprobs": FLAG,
    "top_logprobs": number("logprobs"),
    "reasoning_effort": STRING,
    "tool_choice": Field(
        "none, auto, required, or an object with type function and the name of a function",
        _tool_choice,
    ),
    "parallel_tool_calls": FLAG,
    "separate_reasoning": FLAG,
    **dict.fromkeys(("functions", "function_call"), NO_FUNCTIONS),
    "audio": Unsupported("only text is supported"),
    "web_search_options": Unsupported("the server reads nothing from elsewhere"),
    "echo": Unsupported("use /v1/completions", (False,)),
    "add_special_tokens": Unsupported("the chat template writes the special tokens", (False,)),
}
"""Fields of /v1/chat/completions."""

TOKENIZE: Fields = {
    **RENDERING,
    "model": STRING,
    "prompt": STRING,
    "messages": MESSAGES,
    "special_tokens": FLAG,
    "add_special_tokens": FLAG,
}
"""Fields of /tokenize, which takes either prompt or messages."""
DETOKENIZE: Fields = {"model": STRING, "tokens": TOKENS._replace(required=True)}
"""Fields of /detokenize."""


class Endpoint(NamedTuple):
    """A route of the server. text: what it does, in a sentence; fields: those of the body, None without one."""

    path: str
    method: str
    text: str
    answer: Callable[[Request], Awaitable[Response]]
    fields: Fields | None = None


def document(endpoints: Iterable[Endpoint], version: str, *, strict: bool) -> dict[str, Any]:
    """The OpenAPI document. Fields are described in words. strict: whether unknown ones are refused."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path, fields = endpoint.path.replace(":path}", "}"), endpoint.fields
        responses = {"200": {"description": "the answer"}, "default": {"description": "an object with the error"}}
        operation: dict[str, Any] = {"summary": endpoint.text, "responses": responses}
        if "{name}" in path:
            operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        if fields is not None:
            supported = {name: field for name, field in fields.items() if isinstance(field, Field)}
            required = [name for name, field in supported.items() if field.required]
            properties = {name: {"description": field.kind} for name, field in supported.items()}
            schema = {"type": "object", "properties": properties, "required": required}
            content = {"application/json": {"schema": schema | {"additionalProperties": not strict}}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(path, {})[endpoint.method.lower()] = operation
    return {"openapi": "3.1.0", "info": {"title": "MegaJAX", "version": version}, "paths": paths}
