"""Bodies of requests: read within limits, and parsed as strict JSON."""

import asyncio
import json
from collections import Counter
from typing import Any, NoReturn

from starlette.requests import Request

from megajax.inference.server.config import ServerConfig
from megajax.inference.server.errors import RequestError, invalid

DEPTH = 32
"""Maximum nesting of objects and lists."""


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
