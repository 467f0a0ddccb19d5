"""Tools of a request: what the chat template shows, and how calls are found in answers.

A format of calls is a stage of an answer's text, and the signs of the format in a chat template.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from megajax.inference.detokenizer import overlap
from megajax.inference.sampling.json_schema import anchors, moved
from megajax.server.body import invalid
from megajax.server.chat.answer_parts import (
    STRING,
    AnswerStage,
    Calls,
    Kind,
    Part,
    WholeCalls,
    call_of,
    calls_of,
    json_of,
    mark_outside,
)  # fmt: skip
from megajax.server.chat.tagged_calls import (
    CALL,
    CALLED,
    KEY,
    NO_SCHEMAS,
    PARAMETER,
    Schemas,
    glm,
    qwen_coder,
)  # fmt: skip
from megajax.server.config import ServerConfig
from megajax.server.models import ServedModel
from megajax.server.request_values import RequestValues

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
"""The names of tokens that end the text of a message; the last one begins another message."""


class Harmony:
    """Finds reasoning, calls and content in answers of gpt-oss: messages with channels, in OpenAI's format harmony.

    An answer goes on after `<|start|>assistant`. Each of its messages is a header, `<|message|>`, a text, and the name
    of a token that ends it. The channel of a header is analysis (reasoning), commentary or final; a header with a
    recipient `to=functions.NAME` makes the text the arguments of a call.
    """

    def __init__(self, *, most: int | None, inside: bool = False, analysis: Kind = "reasoning"):
        """most: maximum number of calls; further ones are left out. inside: whether the prompt ends within the text of
        an answer. analysis: what the channel analysis becomes."""
        self._most, self._analysis, self._text, self._name, self._calls = most, analysis, "", "", 0
        self._kind: Kind | None = "content" if inside else None

    def add(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        while (pieces := self._next()) is not None:
            parts += pieces
        return parts

    def _next(self) -> list[Part] | None:
        """The parts up to the next border between headers and texts; None if the rest has to wait for more text."""
        if self._kind is None:
            header, message, rest = self._text.partition(MESSAGE)
            if not message:
                return None
            recipient = re.search(r"\bto=(?:functions\.)?([^\s<]+)", header)
            self._name, self._text = recipient[1] if recipient else "", rest
            channel = header.partition(CHANNEL)[2]
            self._kind = "call" if recipient else self._analysis if channel.startswith("analysis") else "content"
            return []
        # The arguments of a call may have these texts in their strings.
        at, end = mark_outside(self._text, ENDS, STRING if self._kind == "call" else "(?!)")
        if at < 0:
            count = len(self._text) - max(overlap(self._text, end) for end in ENDS)
            if self._kind == "call" or not count:
                return None
            part, self._text = Part(self._kind, self._text[:count]), self._text[count:]
            return [part]
        text, self._text = self._text[:at], self._text[at + len(end) :]
        return self._close(text)

    def _close(self, text: str) -> list[Part]:
        """The end of a message."""
        kind, self._kind = self._kind or "content", None
        if kind != "call":
            return [Part(kind, text)]
        call = call_of(self._name, json_of(text or "{}"))
        if call is None:
            return [Part("content", text)]
        self._calls += 1
        return [call] if self._most is None or self._calls <= self._most else []

    def end(self) -> list[Part]:
        text, self._text = self._text, ""
        if self._kind is not None:
            return self._close(text)
        # A header that was cut off has no text; an answer without headers is one.
        return [] if text.lstrip().startswith(("<|", "to=", "assistant")) else [Part("content", text)]


PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
CALLS_BEGIN, CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_BEGIN, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
"""The texts around calls, as models write them; the last five are DeepSeek's, with its wide bars and low blocks."""
DEEPSEEK_HEAD = re.compile(
    rf"\s*{CALL_BEGIN}(?:function{SEPARATOR}([^\n]*)\n```json|((?:(?!{SEPARATOR}).)*){SEPARATOR})\s*"
)
DEEPSEEK_TAIL = re.compile(rf"\s*(?:```)?\s*{CALL_END}")
"""What stands before and after the JSON of a call of DeepSeek."""


def mistral_calls(text: str) -> list[Part]:
    """A list of objects, or, of later models, NAME[ARGS]{JSON} one after the other, perhaps with [CALL_ID]ID."""
    if listed := calls_of(text, TOOL_CALLS):
        return listed
    calls, decoder, at = list[Part | None](), json.JSONDecoder(), 0
    while at < len(text.rstrip()):
        head = re.compile(r"(?:\s|\[TOOL_CALLS\])*([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*").match(text, at)
        if head is None:
            return []
        try:
            value, at = decoder.raw_decode(text, head.end())
        except (ValueError, RecursionError):
            return []
        calls.append(call_of(head[1], value))
    return [call for call in calls if call is not None] if all(calls) else []


def deepseek_calls(text: str) -> list[Part]:
    """Calls between their own texts: NAME and JSON (V3.1), or `function`, and NAME before a code block of JSON."""
    calls, at, decoder = list[Part | None](), 0, json.JSONDecoder()
    while head := DEEPSEEK_HEAD.match(text, at):
        try:
            value, at = decoder.raw_decode(text, head.end())
        except (ValueError, RecursionError):
            return []
        calls.append(call_of((head[1] or head[2]).strip(), value))
        if (tail := DEEPSEEK_TAIL.match(text, at)) is None:
            return []
        at = tail.end()
    return [call for call in calls if call is not None] if all(calls) and not text[at:].strip() else []


class CallFormat(Protocol):
    """Makes the stage of a format of calls."""

    def __call__(self, most: int | None, schemas: Schemas = NO_SCHEMAS, /) -> AnswerStage:
        """most: maximum number of calls; schemas: those of the arguments of the tools."""
        ...


CALL_FORMATS: Mapping[str, CallFormat] = {
    "hermes": lambda most, _=NO_SCHEMAS: Calls(CALL, CALLED, most=most),
    "llama3": lambda most, _=NO_SCHEMAS: Calls(PYTHON_TAG, "", bare=True, most=most),
    "mistral": lambda most, _=NO_SCHEMAS: Calls(TOOL_CALLS, "", read=mistral_calls, most=most),
    "deepseek": lambda most, _=NO_SCHEMAS: Calls(CALLS_BEGIN, CALLS_END, read=deepseek_calls, most=most),
    "harmony": lambda most, _=NO_SCHEMAS: Harmony(most=most),
    "glm": glm,
    "qwen_coder": qwen_coder,
}
"""Name of a format of calls -> its stage, for at most that many calls."""
UNKNOWN = (
    "<tool_sep>", "<tool_calls>", "<function_calls>", "<seed:tool_call>", "<minimax:tool_call>", "<|tool_call|>",
    "<|tool_call>", "<|tool_call_start|>", "<|tool_calls_section_begin|>", "<start_function_call>", "<|START_ACTION|>",
    "<TOOLCALL>", "<action>", "functools[", "\uff5cDSML\uff5c",
)  # fmt: skip
"""Signs of formats that are not known, whose templates may have signs of others."""
SIGNS: Mapping[str, tuple[str, ...]] = {
    "": UNKNOWN,
    "harmony": (CHANNEL,),
    "deepseek": (CALLS_BEGIN,),
    "mistral": (TOOL_CALLS,),
    "glm": (KEY,),
    "qwen_coder": (PARAMETER,),
    "hermes": (CALL,),
    "llama3": (PYTHON_TAG, '"parameters"', "ipython"),
}
"""Format -> texts of which a template for it has one."""


def call_format(template: str) -> str | None:
    """The format of calls that a chat template asks for; None if it is not known."""
    return next((name for name, signs in SIGNS.items() if any(sign in template for sign in signs)), "") or None


class ToolUse(NamedTuple):
    """How a request uses its tools."""

    guide: object = None
    """A JSON schema of an answer that has to call a tool."""
    stage: Callable[[], AnswerStage] | None = None
    """Makes the stage that finds calls in an answer; None without tools."""
    finds_reasoning: bool = False
    """Whether this stage finds reasoning as well."""


def tool_use(values: RequestValues, model: ServedModel, config: ServerConfig) -> ToolUse:
    """How a chat uses its tools. Raises RequestError if the model's template shows none, or has no known format."""
    tools, choice = values.get("tools", []), values.get("tool_choice", "auto")
    by_name = {tool["function"]["name"]: tool["function"] for tool in tools}
    if len(by_name) < len(tools):
        names = [tool["function"]["name"] for tool in tools]
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise invalid("tools", f"two tools have the name {twice!r}: a call could mean either")
    most = None if values.get("parallel_tool_calls", True) else 1
    if choice not in ("auto", "none"):
        return _demanded(choice, by_name, most)
    template = "" if model.conversation is None else model.conversation.template
    name = config.tool_format or call_format(template)
    if tools and choice != "none" and template and "tools" not in template:
        raise invalid("tools", "tools are not shown by the chat template of this model: leave them out")
    if name == "harmony":
        # Its answers have channels, also without tools.
        inside = values.get("continue_final_message", False)
        analysis = "reasoning" if values.get("separate_reasoning", True) else "content"
        return ToolUse(stage=lambda: Harmony(most=most, inside=inside, analysis=analysis), finds_reasoning=True)
    if not tools or choice == "none" or not template:
        return ToolUse()
    if name is None:
        raise invalid("tools", "the chat template has no known format of calls: start with server.tool_format")
    schemas = {name: tool.get("parameters") or {} for name, tool in by_name.items()}
    return ToolUse(stage=lambda: CALL_FORMATS[name](most, schemas))


def _demanded(choice: Any, by_name: dict[str, Any], most: int | None) -> ToolUse:
    """choice: "required", or an object with the name of a tool. most: maximum number of calls."""
    names = list(by_name) if choice == "required" else [choice["function"]["name"]]
    if not names or names[0] not in by_name:
        message = f"tool_choice names {names[0]!r}, which is not in tools" if names else "tool_choice needs tools"
        raise invalid("tool_choice", message)
    schemas = {name: by_name[name].get("parameters") or {"type": "object"} for name in names}
    if len(names) == 1:
        return ToolUse(schemas[names[0]], lambda: WholeCalls(names[0]))
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{number}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, name in enumerate(schemas)
    ]
    named = [anchor for schema in schemas.values() for anchor in set(anchors(schema))]
    if len(set(named)) < len(named):
        twice = next(anchor for number, anchor in enumerate(named) if anchor in named[:number])
        raise invalid("tools", f"two tools have the $anchor {twice!r}: give references of the form #/$defs/NAME")
    parameters = {str(number): moved(schema, f"#/$defs/{number}") for number, schema in enumerate(schemas.values())}
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": parameters}
    return ToolUse(schema | ({"maxItems": most} if most else {}), lambda: WholeCalls(None))
