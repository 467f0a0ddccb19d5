"""The fields of requests, in one table for each route.

Bodies are checked by these tables, and /openapi.json is written from them.
"""

import re
from typing import Any

from megajax.config.read_limits import parse_json
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
    one_of,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
RENDERING_NAMES = ("self", "messages", "prompt", "add_generation_prompt", "tools")
"""Variables of templates that a request cannot set."""
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


def _bias(value: Any) -> dict[int, float]:
    """Token -> bias; the keys of JSON objects are strings."""
    if not isinstance(value, dict) or not all(re.fullmatch("[0-9]{1,10}", name) for name in value):
        raise ValueError
    return {int(name): bias for name, bias in value.items()}


def _all_at_minus_one(value: Any) -> Any:
    return 0 if type(value) is int and value == -1 else value


def _schema(value: Any) -> Any:
    """A JSON schema, or its text."""
    return instance(dict)(parse_json(value) if isinstance(value, str) else value)


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


def _text(value: Any) -> str:
    """A text, or the joined texts of parts."""
    if isinstance(value, list):
        return "".join(part.get(part["type"], "") for part in value)
    return instance(str)(value)


def nonempty(value: Any) -> list[Any]:
    """A list with something in it."""
    if not instance(list)(value):
        raise ValueError
    return value


def _messages(value: Any) -> list[Any]:
    """Raises RequestError for a message without content and calls."""
    for message in nonempty(value):
        if "content" not in message and not message.get("tool_calls"):
            raise message.invalid("content", "must be given")
    return value


def _named_function(value: Any) -> dict[str, Any]:
    """An object with type function and a function that has a name."""
    function = instance(dict)(value).get("function")
    if value.get("type", "function") != "function" or not isinstance(instance(dict)(function).get("name"), str):
        raise ValueError
    return value


def _tools(value: Any) -> list[dict[str, Any]]:
    for tool in instance(list)(value):
        if not isinstance(_named_function(tool)["function"].get("parameters"), dict | None):
            raise ValueError
    return value


def _tool_choice(value: Any) -> Any:
    return one_of("none", "auto", "required")(value) if isinstance(value, str) else _named_function(value)


def _calls(value: Any) -> list[dict[str, Any]]:
    """Calls for templates, which take arguments as objects."""
    calls = []
    for call in instance(list)(value):
        function = _named_function(call)["function"]
        arguments = function.get("arguments") or {}
        arguments = instance(dict)(parse_json(arguments) if isinstance(arguments, str) else arguments)
        calls.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return calls


def _variables(value: Any) -> dict[str, Any]:
    if set(RENDERING_NAMES) & instance(dict)(value).keys():
        raise ValueError
    return value


FLAG = Field("true or false", {"type": "boolean"}, instance(bool))
STRING = Field("a string", {"type": "string"}, instance(str))
OBJECT = Field("an object", {"type": "object"}, instance(dict))
TOKENS = Field("a list of token ids", items("integer"), _tokens)
GUIDE_SCHEMA = Field("a JSON schema", {"type": ["object", "string"]}, _schema)
GUIDE_CHOICE = Field("a list of strings, at least one", items("string"), _choices)
GUIDE_REGEX = Field("a regular expression", {"type": "string"}, instance(str))
NO_FUNCTIONS = Unsupported("this is the older form of tools: use tools and tool_choice", ([], "none", "auto"))
NO_GRAMMAR = Unsupported("grammars are not supported: give json, choice or regex")

STRUCTURED_OUTPUTS: Fields = {
    "json": GUIDE_SCHEMA,
    "choice": GUIDE_CHOICE,
    "regex": GUIDE_REGEX,
    "json_object": Field("true or false", {"type": "boolean"}, _whole_object),
    "grammar": NO_GRAMMAR,
    "structural_tag": NO_GRAMMAR,
}
JSON_SCHEMA: Fields = {"name": STRING, "description": STRING, "strict": FLAG, "schema": OBJECT._replace(required=True)}
RESPONSE_FORMAT: Fields = {
    "type": choice("text", "json_object", "json_schema")._replace(required=True),
    "json_schema": Field("an object with a schema", {"type": "object"}, fields=JSON_SCHEMA),
}
STREAM_OPTIONS: Fields = {"include_usage": FLAG, "continuous_usage_stats": FLAG, "include_obfuscation": FLAG}

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
        "an object with one of json, choice, regex and json_object",
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
    "cache_salt": Field("a string that is not empty", {"type": "string", "minLength": 1}, nonempty_text),
}
"""When a request runs, and with which others it shares the cache."""

UNSUPPORTED: Fields = {
    **dict.fromkeys(("guided_grammar", "ebnf", "structural_tag"), NO_GRAMMAR),
    **dict.fromkeys(("lora_path", "prompt_embeds", "return_hidden_states"), Unsupported("leave it out", ("", False))),
    "use_beam_search": Unsupported("set beams to the width of the search", (False,)),
    "bad_words": Unsupported("use logit_bias, which takes token ids", ([],)),
    "allowed_token_ids": Unsupported("use guided_choice or guided_regex"),
    "logits_processors": Unsupported("no code of clients runs here", ([],)),
    "truncate_prompt_tokens": Unsupported("shorten the prompt before it is sent"),
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

PART: Fields = {
    "type": Field(
        "text: other content than text is not supported",
        {"enum": ["text", "refusal"]},
        one_of("text", "refusal"),
        required=True,
    ),
    "text": STRING,
    "refusal": STRING,
}
MESSAGE: Fields = {
    "role": choice(*ROLES)._replace(required=True),
    "content": Field("a string or a list of parts", {"type": ["string", "array"]}, _text, fields=PART),
    "name": STRING,
    "refusal": STRING,
    "audio": Unsupported("only text is supported"),
    "tool_calls": Field(
        "a list of calls, each with a function: its name, and its arguments as JSON",
        {"type": "array", "items": {"type": "object"}},
        _calls,
    ),
    "tool_call_id": STRING,
    "reasoning_content": STRING,
    "function_call": NO_FUNCTIONS,
}
MESSAGES = Field("a list with a message or more", {"type": "array", "minItems": 1}, _messages, fields=MESSAGE)
RENDERING: Fields = {
    "add_generation_prompt": FLAG,
    "continue_final_message": FLAG,
    "chat_template_kwargs": Field(
        f"an object without {', '.join(RENDERING_NAMES)}, which the server sets", {"type": "object"}, _variables
    ),
    "chat_template": Unsupported("templates are chosen when the server starts (inference.template)"),
    "tools": Field(
        "a list of objects with type function and a function: its name, and parameters as a JSON schema",
        {"type": "array", "items": {"type": "object"}},
        _tools,
    ),
    "documents": Unsupported("write documents into a message, or into chat_template_kwargs", ([],)),
}
"""How messages become a prompt."""

CHAT_NO_EFFECT: Fields = {
    "verbosity": STRING,
    "modalities": Field('["text"]', items("string"), one_of(["text"])),
    "prediction": OBJECT,
}
"""Fields of /v1/chat/completions that are accepted without effect."""

CHAT: Fields = {
    **COMMON,
    **RENDERING,
    **CHAT_NO_EFFECT,
    "messages": MESSAGES._replace(required=True),
    "max_completion_tokens": number("max_tokens"),
    "logprobs": FLAG,
    "top_logprobs": number("logprobs"),
    "reasoning_effort": STRING,
    "tool_choice": Field(
        "none, auto, required, or an object with type function and the name of a function",
        {"type": ["string", "object"]},
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
