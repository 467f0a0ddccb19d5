"""Bodies of requests: read within bounds, then JSON without exceptions to its rules."""

import asyncio
import json
from collections import Counter
from typing import Any, NoReturn

from starlette.requests import Request

from megajax.inference.server.config import ServerConfig
from megajax.inference.server.errors import RequestError, invalid

DEPTH = 32
"""Most objects and lists that are inside each other."""


async def read_object(request: Request, config: ServerConfig) -> dict[str, Any]:
    """The JSON object of a request.

    Raises RequestError: 413 for a body that is too large, 408 for one that takes too long, 400 for another content type
    or what is no JSON object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise invalid(None, f"the header Content-Type must be application/json, got {kind[:60]!r}")
    return parse_object(await read_body(request, config))


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """At most `body_bytes`, whatever the headers say. Raises RequestError, and ClientDisconnect of starlette."""
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
    """Raises RequestError for what is not UTF-8, not JSON, no object, too deep, or has a key twice."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not UTF-8: byte {error.start}") from None
    try:
        # Numbers with thousands of digits are refused by Python with a ValueError.
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
    made = dict(pairs)
    if len(made) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise invalid(name[:60], f"{name[:60]!r} is given twice")
    return made


def _check(value: dict[str, Any], *, escapes: bool) -> None:
    """Raises RequestError for a deep value, or text with half a surrogate pair: JSON can write it, UTF-8 cannot."""
    left = [(1, name, part) for name, part in value.items()]
    left += [(1, name, name) for name in value]
    while left:
        depth, name, part = left.pop()
        if isinstance(part, str) and escapes and not _is_text(part):
            shown = name.encode("utf-8", errors="replace").decode()
            raise invalid(shown[:60], f"{shown[:60]!r} has half of a surrogate pair, which is not a character")
        if isinstance(part, (dict, list)):
            if depth == DEPTH:
                raise invalid(name[:60], f"{name[:60]!r} has more than {DEPTH} levels of objects and lists")
            parts = [*part, *part.values()] if isinstance(part, dict) else part
            left += [(depth + 1, name, inner) for inner in parts]


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
