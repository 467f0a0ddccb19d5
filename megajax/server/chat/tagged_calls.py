"""Calls whose arguments stand between marks, not in JSON: GLM-4.5 to 4.7, and Qwen3-Coder, Qwen3.5 and Nemotron 3.

The text of a value says nothing of its type, which is that of the tool's JSON schema.
"""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megajax.config.read_limits import Json
from megajax.server.chat.answer_parts import AnswerStage, Calls, Part, call_of

type Schemas = Mapping[str, Any]
"""Name of a tool -> JSON schema of its arguments."""
NO_SCHEMAS: Schemas = MappingProxyType({})
CALL, CALLED = "<tool_call>", "</tool_call>"
KEY, PARAMETER = "<arg_key>", "<parameter="
"""The texts around a call, and before the name of an argument."""
GLM_VALUE = r"<arg_value>[^<]*(?:<(?!/arg_value>)[^<]*)*(?:</arg_value>|\Z)"
QWEN_CODER_VALUE = r"<parameter=[^<]*(?:<(?!/parameter>)[^<]*)*(?:</parameter>|\Z)"
"""Values, as in `mark_outside`."""
GLM = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
# Models leave out the end of a value at times.
QWEN_CODER = re.compile(r"\s*<parameter=([^>]+)>\n?(.*?)(?:\n?</parameter>|\n(?=<parameter=)|\n?\Z)\s*", re.DOTALL)
FUNCTION = re.compile(r"\s*<function=([^>]+)>(.*)</function>\s*", re.DOTALL)
WORDS = MappingProxyType({"True": "true", "False": "false", "None": "null"})
"""Constants as the templates write them -> JSON."""
DEPTH = 16
"""Maximum number of references and alternatives that lead to a type."""


def glm(most: int | None, schemas: Schemas = NO_SCHEMAS, /) -> AnswerStage:
    """Finds calls of GLM: NAME, and the name and the value of each argument between marks."""

    def read(text: str) -> list[Part]:
        name, mark, rest = text.partition(KEY)
        return _call(name.strip(), f"{mark}{rest}", GLM, schemas)

    return Calls(CALL, CALLED, read=read, within=GLM_VALUE, most=most)


def qwen_coder(most: int | None, schemas: Schemas = NO_SCHEMAS, /) -> AnswerStage:
    """Finds calls of Qwen3-Coder: <function=NAME>, <parameter=NAME>, the value in lines of its own."""

    def read(text: str) -> list[Part]:
        function = FUNCTION.fullmatch(text)
        return [] if function is None else _call(function[1].strip(), function[2], QWEN_CODER, schemas)

    return Calls(CALL, CALLED, read=read, within=QWEN_CODER_VALUE, most=most)


def _call(name: str, text: str, argument: re.Pattern[str], schemas: Schemas) -> list[Part]:
    """The call of a tool. text: its arguments, each of which `argument` matches."""
    root, arguments, at = schemas.get(name, {}), dict[str, Any](), 0
    properties = _members(_members(root).get("properties"))
    while match := argument.match(text, at):
        key, at = match[1].strip(), match.end()
        arguments[key] = value_of(match[2], kinds_of(properties.get(key), root))
    call = call_of(name, arguments)
    return [] if call is None or text[at:].strip() or len(name.split()) > 1 else [call]


def value_of(text: str, kinds: frozenset[str]) -> Any:
    """The value of a text whose type is one of `kinds`; empty: any. A text that is no other type is a string."""
    if kinds == {"string"}:
        return text
    word = text.strip()
    try:
        value = json.loads(WORDS.get(word, word) if kinds else word)
    except (ValueError, RecursionError):
        return text
    fits = not kinds or _kind(value) in kinds or (_kind(value) == "integer" and "number" in kinds)
    return value if fits or "string" not in kinds else text


def kinds_of(schema: Json, root: Json, depth: int = DEPTH) -> frozenset[str]:
    """The types of the values of a schema; empty if it does not say. root: the document of its references."""
    match _members(schema if depth else None):
        case {"type": str(kind)}:
            return frozenset([kind])
        case {"type": list(kinds)}:
            return frozenset(map(str, kinds))
        case {"enum": list(values)}:
            return frozenset(map(_kind, values))
        case {"const": value}:
            return frozenset([_kind(value)])
        case {"$ref": str(reference)}:
            return kinds_of(_referenced(reference, root), root, depth - 1)
        case {"anyOf": list(parts)} | {"oneOf": list(parts)}:
            kinds = [kinds_of(part, root, depth - 1) for part in parts]
            return frozenset().union(*kinds) if all(kinds) else frozenset()
        case {"allOf": list(parts)}:
            return next(filter(None, (kinds_of(part, root, depth - 1) for part in parts)), frozenset())
    return frozenset()


def _members(value: Json) -> Mapping[str, Json]:
    """The members of an object; none for another value."""
    return value if isinstance(value, dict) else {}


def _referenced(reference: str, root: Json) -> Json:
    """The schema of a reference such as #/$defs/place; None if there is none."""
    place = root if reference.startswith("#") else None
    for name in reference.split("/")[1:]:
        place = _members(place).get(name.replace("~1", "/").replace("~0", "~"))
    return place


def _kind(value: object) -> str:
    """The JSON type of a value."""
    kinds: Mapping[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else kinds.get(type(value), "object")
