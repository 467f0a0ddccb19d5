"""The gate around all routes: keys, host names, counts, a line of log, and errors as JSON."""

import json
import time
import traceback
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Callable, Collection, Mapping, Sequence
from hmac import compare_digest
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megajax.inference.server.config import host_of, is_ip_address
from megajax.inference.server.errors import RequestError
from megajax.inference.server.metrics import ServerMetrics
from megajax.inference.server.state import Readiness

PUBLIC_ROUTES = ("/health",)
"""Routes that require neither a key nor a known host name."""
CLIENT_GONE = 499
"""Status in the log if a client closed the connection before the answer."""
SAFE_METHODS = ("GET", "HEAD")


class Gate:
    """An ASGI application around another.

    Args:
        app: the routes.
        keys: requests must have one of them; empty: no key is required.
        hosts: without keys, the allowed names in the Host header. IP addresses are always allowed.
        paths: paths of the routes, for the counts.
        log: called with a line for each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[bytes],
        hosts: Collection[str],
        paths: Collection[str],
        metrics: ServerMetrics,
        readiness: Readiness,
        log: Callable[[str], None],
    ):
        self._app, self._keys, self._hosts, self._paths = app, keys, hosts, paths
        self._metrics, self._readiness, self._log = metrics, readiness, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        notes: dict[str, Any] = {}
        scope["state"] = {"log": notes}
        began, status, writes = time.monotonic(), CLIENT_GONE, scope["method"] not in SAFE_METHODS

        async def record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._readiness.active += writes
        try:
            self._demand_access(scope)
            await self._app(scope, receive, record)
        except ClientDisconnect:
            status = CLIENT_GONE
        except RequestError as error:
            await error_response(error)(scope, receive, record)
        except Exception:
            # The client has its answer already, or the connection ends with a part of it.
            self._log(traceback.format_exc())
        finally:
            self._readiness.active -= writes
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.add(1, route=path, code=str(status))
            self._log(line(scope, status, time.monotonic() - began, notes))

    def _demand_access(self, scope: Scope) -> None:
        """Raises RequestError without a key or, on a server without keys, for an unknown host name: after DNS
        rebinding, a browser sends requests of a web page to this address, with the page's host name, without a key."""
        if scope["path"] in PUBLIC_ROUTES:
            return
        headers = dict(scope["headers"])
        if not self._keys:
            host = host_of(headers.get(b"host", b"").decode("latin-1"))
            if host not in self._hosts and not is_ip_address(host):
                raise RequestError(
                    403, f"the Host header names {host[:60]!r}: add the name to server.hosts to allow it"
                )
            return
        key_sent = _key(headers.get(b"authorization", b""))
        # Compare all keys, so that the time does not reveal which key is similar.
        if not sum([compare_digest(key, key_sent) for key in self._keys]):
            raise RequestError(401, "a key is required: send the header Authorization: Bearer KEY")


def error_response(error: RequestError) -> JSONResponse:
    """The error as JSON, with the headers that its status requires."""
    return JSONResponse(error.body(), error.status, headers=error.headers())


def line(scope: Scope, status: int, seconds: float, notes: Mapping[str, Any]) -> str:
    """The log line of a request, without its headers; prompts only if they are in the notes."""
    client = scope.get("client") or ("-",)
    path = scope.get("raw_path", b"").decode("ascii", errors="replace")[:200]
    more = "".join(f" {name}={json.dumps(value)}" for name, value in notes.items())
    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    return f"{now} {client[0]} {scope['method'][:16]} {path} {status} {seconds:.3f}s{more}"


def _key(header: bytes) -> bytes:
    """The key of Authorization: Bearer KEY, or of Basic with the key as password, which browsers prompt for."""
    scheme, _, value = header.strip().partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() != b"basic":
        return b""
    try:
        return b64decode(value.strip(), validate=True).partition(b":")[2]
    except (Base64Error, ValueError):
        return b""
