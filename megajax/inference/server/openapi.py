"""The description of the routes in OpenAPI 3.1, made from the tables by which bodies are checked."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from megajax.inference.server.chat_fields import CHAT_NO_EFFECT
from megajax.inference.server.fields import NO_EFFECT
from megajax.inference.server.response_fields import RESPONSES_NO_EFFECT
from megajax.inference.server.values import Field, Fields, Unsupported


class Endpoint(NamedTuple):
    """A route of the server."""

    path: str
    method: str
    text: str
    """What it does, in a sentence."""
    answer: Callable[[Request], Awaitable[Response]]
    fields: Fields | None = None
    """Fields of the body; None for a route without one."""


def document(endpoints: Iterable[Endpoint], version: str, *, strict: bool) -> dict[str, Any]:
    """The OpenAPI document. strict: whether unknown fields are refused."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path, strict)
    title = {"title": "MegaJAX", "version": version}
    return {"openapi": "3.1.0", "info": title, "paths": paths, "components": {"schemas": {"Error": ERROR}}}


ERROR: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the invalid field"},
                "code": {"type": "integer", "description": "the status"},
            },
        }
    },
}


def _operation(endpoint: Endpoint, path: str, strict: bool) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses = {"200": {"description": "the answer"}, "default": {"description": "an error", "content": error}}
    operation: dict[str, Any] = {"summary": endpoint.text, "responses": responses}
    names = [part.partition("}")[0] for part in path.split("{")[1:]]
    if names:
        string = {"type": "string"}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": string} for name in names]
    if endpoint.fields is not None:
        schema = object_schema(endpoint.fields, strict=strict)
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def object_schema(fields: Fields, *, strict: bool) -> dict[str, Any]:
    """The JSON Schema of an object with these fields."""
    properties = {
        name: _unsupported(field) if isinstance(field, Unsupported) else _property(name, field, strict)
        for name, field in fields.items()
    }
    required = [name for name, field in fields.items() if isinstance(field, Field) and field.required]
    schema = {"type": "object", "properties": properties, "additionalProperties": not strict}
    return schema | ({"required": required} if required else {})


def _unsupported(field: Unsupported) -> dict[str, Any]:
    return {"enum": [*field.neutral, None], "description": f"not supported: {field.reason}"}


def _property(name: str, field: Field, strict: bool) -> dict[str, Any]:
    schema = dict(field.schema)
    if field.fields is not None:
        nested = object_schema(field.fields, strict=strict)
        schema |= {"items": nested} if "array" in schema["type"] else nested
    if not field.required:
        schema = {"anyOf": [schema, {"type": "null"}]}
    idle = any(field == fields.get(name) for fields in (NO_EFFECT, CHAT_NO_EFFECT, RESPONSES_NO_EFFECT))
    effect = "; accepted without effect" if idle else ""
    return schema | {"description": field.kind + effect}
