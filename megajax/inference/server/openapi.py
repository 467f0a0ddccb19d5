"""The description of the routes in OpenAPI 3.1, made from the tables by which bodies are checked."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from megajax.inference.server.values import Field, Fields


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
