"""How models write calls of tools: a stage for each format, and the signs of the format in a chat template."""

import json
import re
from collections.abc import Callable, Mapping

from megajax.inference.server.chat.answer_parts import Calls, Part, Stage, call_of, calls_of
from megajax.inference.server.chat.harmony import CHANNEL, Harmony

CALL, CALLED = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
CALLS_BEGIN, CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_BEGIN, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
"""The texts around calls, as models write them; the last five are DeepSeek's, with its wide bars and low blocks."""


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
    calls, pieces = list[Part | None](), text.split(CALL_BEGIN)
    for piece in pieces[1:]:
        inner, closed, _ = piece.partition(CALL_END)
        name, separated, arguments = inner.partition(SEPARATOR)
        if name.strip() == "function":
            name, _, arguments = arguments.partition("\n")
            arguments = arguments.strip().removeprefix("```json").removesuffix("```")
        try:
            calls.append(call_of(name.strip(), json.loads(arguments)) if closed and separated else None)
        except (ValueError, RecursionError):
            return []
    before = pieces[0].replace(CALLS_BEGIN, "").strip()
    return [call for call in calls if call is not None] if all(calls) and not before else []


CALL_FORMATS: Mapping[str, Callable[[int | None], Stage]] = {
    "hermes": lambda most: Calls(CALL, CALLED, most=most),
    "llama3": lambda most: Calls(PYTHON_TAG, "", bare=True, most=most),
    "mistral": lambda most: Calls(TOOL_CALLS, "", read=mistral_calls, most=most),
    "deepseek": lambda most: Calls(CALLS_BEGIN, CALLS_END, read=deepseek_calls, most=most),
    "harmony": lambda most: Harmony(most=most),
}
"""Name of a format of calls -> its stage, for at most that many calls."""
SIGNS: Mapping[str, tuple[str, ...]] = {
    "harmony": (CHANNEL,),
    "deepseek": (CALLS_BEGIN,),
    "mistral": (TOOL_CALLS,),
    "hermes": (CALL,),
    "llama3": (PYTHON_TAG, '"parameters"', "ipython"),
}
"""Format -> texts of which a template for it has one."""


def call_format(template: str) -> str | None:
    """The format of calls that a chat template asks for; None if it is not known."""
    return next((name for name, signs in SIGNS.items() if any(sign in template for sign in signs)), None)
