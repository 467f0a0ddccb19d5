"""Bodies of requests, read within limits and parsed as strict JSON; and the errors for clients.

An error is a status and {"error": {"type", "message", "param", "code"}}. `fields.py` has the fields of bodies.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from starlette.requests import Request

from megajax.inference.request import RefusedRequest
from megajax.server.config import ServerConfig

DEPTH = 32
"""Maximum nesting of objects and lists."""
TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
"""Status -> type of the error; invalid_request_error for others."""

REFUSALS: Mapping[str, int] = {"queue_full": 429, "too_long": 400, "invalid": 400, "draining": 503}
"""The engine's reason for rejecting a request -> status."""
RETRY_SECONDS: Mapping[int, int] = {429: 1, 503: 5}
"""Status -> value of the header Retry-After."""


class RequestError(Exception):
    """Ends a request with an error response.

    Args:
        status: HTTP status.
        message: the problem, in a sentence.
        param: name of the invalid field; None if it is not about a field.
    """

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    def body(self) -> dict[str, Any]:
        """The object of a response or of an event."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"type": kind, "message": self.message, "param": self.param, "code": self.status}}

    def headers(self) -> dict[str, str]:
        """Headers that the status requires."""
        headers = {"Retry-After": str(RETRY_SECONDS[self.status])} if self.status in RETRY_SECONDS else {}
        return headers | ({"WWW-Authenticate": 'Basic realm="the key is the password"'} if self.status == 401 else {})


def invalid(param: str | None, message: str) -> RequestError:
    """A bad request."""
    return RequestError(400, message, param)


def refused(refusal: RefusedRequest, names: Mapping[str, str]) -> RequestError:
    """The error of a request that the engine rejected. names: setting of `Sampling` -> field of the request."""
    if refusal.field is None:
        return RequestError(REFUSALS[refusal.reason], refusal.message)
    param, begin = names.get(refusal.field, refusal.field), f"{refusal.field} "
    message = refusal.message
    if message.startswith(begin):
        message = f"{param} {message.removeprefix(begin)}"
    return RequestError(REFUSALS[refusal.reason], message, param)


def failed() -> RequestError:
    """A fault of the engine, which the server's log describes."""
    return RequestError(500, "the engine failed on this request; see the server's log")


def aborted() -> RequestError:
    """A request without a use for a part of its answer, when all requests were aborted."""
    return RequestError(503, "the request was aborted")


def large_head(most: int) -> RequestError:
    """The first line and the headers have more bytes than `server.header_bytes`."""
    return RequestError(431, f"the first line and the headers must have at most {most:,} bytes (server.header_bytes)")


SHUTTING_DOWN = "the server is shutting down"


def shutting_down() -> RequestError:
    """A request that arrives, or is unfinished, while the server shuts down."""
    return RequestError(503, SHUTTING_DOWN)


async def read_object(request: Request, config: ServerConfig) -> dict[str, Any]:
    """The JSON object of a request.

    Raises RequestError: 413 if the body is too large, 408 if it takes too long, 400 for another content type or if it
    is not a JSON object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise invalid(None, f"the header Content-Type must be application/json, got {kind[:60]!r}")
    return parse_object(await read_body(request, config))


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """Read at most `body_bytes`, regardless of the headers. Raises RequestError, and starlette's ClientDisconnect."""
    most = config.body_bytes
    too_large = RequestError(413, f"the body must have at most {most:,} bytes")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 18 or int(length) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise RequestError(408, f"the body must arrive within {config.body_seconds:g} seconds") from None
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises RequestError unless the body is UTF-8 and a JSON object, without duplicate keys or deep nesting."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not UTF-8: byte {error.start}") from None
    try:
        # Python raises ValueError for numbers with thousands of digits.
        value = json.loads(text, parse_constant=_no_number, object_pairs_hook=_without_duplicates)
    except RequestError:
        raise
    except json.JSONDecodeError as error:
        raise invalid(None, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise invalid(None, f"the body has more than {DEPTH} levels of objects and lists") from None
    except ValueError:
        raise invalid(None, "the body has a number with too many digits") from None
    if not isinstance(value, dict):
        raise invalid(None, "the body must be a JSON object")
    _check(value, escapes="\\u" in text)
    return value


def _no_number(word: str) -> NoReturn:
    raise invalid(None, f"the body is not JSON: {word} is not a JSON number")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise invalid(name[:60], f"{name[:60]!r} is given twice")
    return values


def _check(value: dict[str, Any], *, escapes: bool) -> None:
    """Raises RequestError for deep nesting, or half a surrogate pair, which JSON can express but UTF-8 cannot."""
    pending = [(1, name, part) for name, part in value.items()]
    pending += [(1, name, name) for name in value]
    while pending:
        depth, name, part = pending.pop()
        if isinstance(part, str) and escapes and not _is_text(part):
            printable = name.encode("utf-8", errors="replace").decode()
            raise invalid(printable[:60], f"{printable[:60]!r} has half of a surrogate pair, which is not a character")
        if isinstance(part, (dict, list)):
            if depth == DEPTH:
                raise invalid(name[:60], f"{name[:60]!r} has more than {DEPTH} levels of objects and lists")
            parts = [*part, *part.values()] if isinstance(part, dict) else part
            pending += [(depth + 1, name, inner) for inner in parts]


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
