"""Tools of a request: what the chat template shows, and how calls are found in answers."""

from collections.abc import Callable
from typing import Any, NamedTuple

from megajax.inference.server.body import invalid
from megajax.inference.server.chat.answer_parts import Stage, WholeCalls
from megajax.inference.server.chat.call_formats import CALL_FORMATS, call_format
from megajax.inference.server.chat.harmony import Harmony
from megajax.inference.server.config import ServerConfig
from megajax.inference.server.models import ServedModel
from megajax.inference.server.values import Values


class ToolUse(NamedTuple):
    """How a request uses its tools."""

    guide: Any = None
    """A JSON schema of an answer that has to call a tool."""
    stage: Callable[[], Stage] | None = None
    """Makes the stage that finds calls in an answer; None without tools."""
    finds_reasoning: bool = False
    """Whether this stage finds reasoning as well."""


def tool_use(values: Values, model: ServedModel, config: ServerConfig) -> ToolUse:
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
    return ToolUse(stage=lambda: CALL_FORMATS[name](most))


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
    parameters = {str(number): moved(schema, f"#/$defs/{number}") for number, schema in enumerate(schemas.values())}
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": parameters}
    return ToolUse(schema | ({"maxItems": most} if most else {}), lambda: WholeCalls(None))


def moved(schema: Any, place: str) -> Any:
    """A JSON schema whose references hold when it stands at another place. place: as a reference."""
    if isinstance(schema, list):
        return [moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: moved(part, place) for name, part in schema.items()}
    reference = parts.get("$ref")
    local = isinstance(reference, str) and reference.startswith("#")
    return {**parts, "$ref": f"{place}{reference[1:]}"} if local else parts
