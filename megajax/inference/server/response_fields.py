"""The fields of /v1/responses, and its items as the messages of a chat."""

from collections.abc import Mapping
from typing import Any

from megajax.config.read_limits import parse_json
from megajax.inference.server.chat_fields import RENDERING
from megajax.inference.server.fields import (
    FLAG,
    IMAGE_URL,
    JSON_OBJECT,
    NO_EFFECT,
    OBJECT,
    SAMPLING,
    SCHEDULING,
    STRING,
    joined,
    nonempty,
)
from megajax.inference.server.values import Field, Fields, Unsupported, Values, choice, instance, items, number, one_of

ROLES = ("user", "assistant", "system", "developer")
PART_TEXTS: Mapping[str, str] = {
    **dict.fromkeys(("input_text", "output_text", "summary_text", "reasoning_text", "text"), "text"),
    "refusal": "refusal",
}
"""Type of a part -> the field with its text."""
IMAGE_PART = "input_image"
NEEDED: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""Type of an item -> the fields that it must have."""
NOT_STORED = Unsupported("no response is stored: send all items in input")


def _content(value: Any) -> str | list[dict[str, Any]]:
    """A text, or the joined parts of a message. Raises RequestError for an image without a URL."""
    return joined(list(map(_part, value))) if isinstance(value, list) else instance(str)(value)


def _part(part: Values) -> dict[str, Any]:
    if part["type"] != IMAGE_PART:
        return {"type": "text", "text": part.get(PART_TEXTS[part["type"]], "")}
    if "image_url" not in part:
        raise part.invalid("image_url", "must be given")
    return {"type": "image", "data": part["image_url"]}


def _text(value: Any) -> str:
    """A text, or the joined texts of parts."""
    if isinstance(value, list):
        return "".join(part.get(PART_TEXTS[part["type"]], "") for part in value)
    return instance(str)(value)


def _arguments(value: Any) -> dict[str, Any]:
    return instance(dict)(parse_json(instance(str)(value) or "{}"))


def _messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a chat. Raises ValueError, and RequestError for an item without a field that it needs."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    for item in nonempty(value):
        kind = item.get("type", "message")
        for name in NEEDED[kind]:
            if name not in item:
                raise item.invalid(name, "must be given")
        message = _message(kind, item)
        if len(message) == 1:  # Reasoning without a text, as other servers encrypt it.
            continue
        last = messages[-1] if messages else {}
        if message["role"] == "assistant" == last.get("role") and (kind == "function_call" or "content" not in last):
            # Reasoning, text and calls of one answer are items of their own.
            calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
            messages[-1] = {**last, **message} | ({"tool_calls": calls} if calls else {})
        else:
            messages.append(message)
    return [{"content": "", **message} for message in messages]


def _message(kind: str, item: Values) -> dict[str, Any]:
    if kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        return {"role": "assistant", "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]}
    if kind == "reasoning":
        text = item.get("content") or item.get("summary", "")
        return {"role": "assistant"} | ({"reasoning_content": text} if text else {})
    return {"role": item["role"], "content": item["content"]}


def _tools(value: Any) -> list[dict[str, Any]]:
    """Functions in the form of the chat route."""
    return [{"type": "function", "function": {**tool}} for tool in map(_function, instance(list)(value))]


def _function(value: Any) -> dict[str, Any]:
    """A function without its type."""
    tool = instance(dict)(value)
    one_of("function")(tool.get("type"))
    instance(str)(tool.get("name"))
    if not isinstance(tool.get("parameters"), dict | None):
        raise ValueError
    return {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}


def _tool_choice(value: Any) -> Any:
    if isinstance(value, str):
        return one_of("none", "auto", "required")(value)
    one_of("function")(instance(dict)(value).get("type"))
    return {"type": "function", "function": {"name": instance(str)(value.get("name"))}}


def _format(value: Any) -> Any:
    if (instance(Values)(value)["type"] == "json_schema") != ("schema" in value):
        raise ValueError
    return value


def guide_of(text: Mapping[str, Any]) -> Any:
    """The guide of the field `text`; None for any text."""
    described = text.get("format", {"type": "text"})
    return described.get("schema") if described["type"] != "json_object" else JSON_OBJECT


PART: Fields = {
    "type": Field(
        f"one of {', '.join(PART_TEXTS)}: other content than text is not supported",
        {"enum": list(PART_TEXTS)},
        one_of(*PART_TEXTS),
        required=True,
    ),
    "text": STRING,
    "refusal": STRING,
    **dict.fromkeys(("annotations", "logprobs"), Field("a list", {"type": "array"}, instance(list))),
}
CONTENT_PART: Fields = {
    **PART,
    "type": Field(
        f"one of {', '.join((*PART_TEXTS, IMAGE_PART))}: other content is not supported",
        {"enum": [*PART_TEXTS, IMAGE_PART]},
        one_of(*PART_TEXTS, IMAGE_PART),
        required=True,
    ),
    "image_url": IMAGE_URL,
    "detail": STRING,
    "file_id": Unsupported("no files are stored: give the image as a data: URL in image_url"),
}
PARTS = Field("a string or a list of parts", {"type": ["string", "array"]}, _text, fields=PART)
ITEM: Fields = {
    "type": Field(f"one of {', '.join(NEEDED)}", {"enum": list(NEEDED)}, one_of(*NEEDED)),
    "role": choice(*ROLES),
    "content": PARTS._replace(read=_content, fields=CONTENT_PART),
    "summary": PARTS,
    "output": PARTS,
    **dict.fromkeys(("id", "status", "phase", "call_id", "name", "encrypted_content"), STRING),
    "arguments": Field("an object as JSON", {"type": "string"}, _arguments),
}
FORMAT: Fields = {
    "type": choice("text", "json_object", "json_schema")._replace(required=True),
    **dict.fromkeys(("name", "description"), STRING),
    "strict": FLAG,
    "schema": OBJECT,
}
TEXT: Fields = {
    "format": Field(
        "an object with a type (text, json_object or json_schema) and, for json_schema alone, a schema",
        {"type": "object"},
        _format,
        fields=FORMAT,
    ),
    "verbosity": STRING,
}
REASONING: Fields = dict.fromkeys(("effort", "summary", "generate_summary"), STRING)

RESPONSES_NO_EFFECT: Fields = {
    **NO_EFFECT,
    "include": Field("a list of strings", items("string"), instance(list)),
    "max_tool_calls": Field("an integer", {"type": "integer"}, instance(int)),
    "stream_options": Field("an object", {"type": "object"}, instance(dict)),
}
"""Fields of /v1/responses that are accepted without effect."""

RESPONSES: Fields = {
    **{
        name: SAMPLING[name]
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
            *("seed", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
        )
    },
    **RESPONSES_NO_EFFECT,
    **SCHEDULING,
    "model": STRING,
    "stream": FLAG,
    "input": Field(
        "a string, or a list of items: messages, calls of functions and their outputs",
        {"type": ["string", "array"], "minItems": 1},
        _messages,
        fields=ITEM,
        required=True,
    ),
    "instructions": STRING,
    "max_output_tokens": number("max_tokens"),
    "tools": Field(
        "a list of objects with type function, a name, and parameters as a JSON schema: only functions are supported",
        {"type": "array", "items": {"type": "object"}},
        _tools,
    ),
    "tool_choice": Field(
        "none, auto, required, or an object with type function and the name of a function",
        {"type": ["string", "object"]},
        _tool_choice,
    ),
    "parallel_tool_calls": FLAG,
    "text": Field("an object with a format", {"type": "object"}, instance(Values), fields=TEXT),
    "reasoning": Field("an object with an effort", {"type": "object"}, instance(Values), fields=REASONING),
    "chat_template_kwargs": RENDERING["chat_template_kwargs"],
    "truncation": Field("disabled: items are never left out", {"enum": ["disabled"]}, one_of("disabled")),
    **dict.fromkeys(("previous_response_id", "conversation"), NOT_STORED),
    "prompt": Unsupported("no prompts are stored: write it into instructions and input"),
    "background": Unsupported("a response is answered at once, and not stored", (False,)),
    "context_management": Unsupported("items are never left out", ([],)),
    "top_logprobs": Unsupported("use /v1/chat/completions", (0,)),
}
"""Fields of /v1/responses."""
