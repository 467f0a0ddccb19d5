"""The fields of chats: messages, tools, and how they become a prompt; and those of /tokenize and /detokenize."""

from typing import Any

from megajax.config.read_limits import parse_json
from megajax.inference.server.fields import COMMON, FLAG, IMAGE_URL, OBJECT, STRING, TOKENS, joined, nonempty
from megajax.inference.server.values import Field, Fields, Unsupported, Values, choice, instance, items, number, one_of

ROLES = ("system", "developer", "user", "assistant", "tool")
RENDERING_NAMES = ("self", "messages", "prompt", "add_generation_prompt", "tools")
"""Variables of templates that a request cannot set."""


def _content(value: Any) -> str | list[dict[str, Any]]:
    """A text, or the joined parts. Raises RequestError for an image without a URL."""
    return joined(list(map(_part, value))) if isinstance(value, list) else instance(str)(value)


def _part(part: Values) -> dict[str, Any]:
    if part["type"] != "image_url":
        return {"type": "text", "text": part.get(part["type"], "")}
    if "image_url" not in part:
        raise part.invalid("image_url", "must be given")
    return {"type": "image", "data": part["image_url"]["url"]}


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


def _arguments(value: Any) -> dict[str, Any]:
    return instance(dict)(parse_json(value or "{}") if isinstance(value, str) else value)


def _calls(value: Any) -> list[dict[str, Any]]:
    """Calls for templates, which take arguments as objects."""
    calls = instance(list)(value)
    return [{**call, "type": "function", "function": {"arguments": {}, **call["function"]}} for call in calls]


def _variables(value: Any) -> dict[str, Any]:
    if set(RENDERING_NAMES) & instance(dict)(value).keys():
        raise ValueError
    return value


NO_FUNCTIONS = Unsupported("this is the older form of tools: use tools and tool_choice", ([], "none", "auto"))

PART: Fields = {
    "type": Field(
        "text or image_url: other content is not supported",
        {"enum": ["text", "refusal", "image_url"]},
        one_of("text", "refusal", "image_url"),
        required=True,
    ),
    "text": STRING,
    "refusal": STRING,
    "image_url": Field(
        "an object with a url",
        {"type": "object"},
        instance(Values),
        fields={"url": IMAGE_URL._replace(required=True), "detail": STRING},
    ),
}
FUNCTION: Fields = {
    "name": STRING._replace(required=True),
    "arguments": Field("an object as JSON", {"type": ["string", "object"]}, _arguments),
}
CALL: Fields = {
    "id": STRING,
    "index": Field("an integer", {"type": "integer"}, instance(int)),
    "type": choice("function"),
    "function": Field(
        "an object with a name and arguments", {"type": "object"}, instance(Values), fields=FUNCTION, required=True
    ),
}
MESSAGE: Fields = {
    "role": choice(*ROLES)._replace(required=True),
    "content": Field("a string or a list of parts", {"type": ["string", "array"]}, _content, fields=PART),
    "name": STRING,
    "refusal": STRING,
    "audio": Unsupported("only text is supported"),
    "tool_calls": Field(
        "a list of calls, each with a function: its name, and its arguments as JSON",
        {"type": "array"},
        _calls,
        fields=CALL,
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
