"""Errors for clients: a status and {"error": {"type", "message", "param"}}."""

from collections.abc import Mapping
from typing import Any

from megajax.inference.request import Refused

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


def refused(refusal: Refused, names: Mapping[str, str]) -> RequestError:
    """The error of a request that the engine rejected. names: setting of `Sampling` -> field of the request."""
    param = None if refusal.field is None else names.get(refusal.field, refusal.field)
    return RequestError(REFUSALS[refusal.reason], refusal.message, param)


def failed() -> RequestError:
    """A fault of the engine, which the server's log describes."""
    return RequestError(500, "the engine failed on this request; see the server's log")


def shutting_down() -> RequestError:
    """A request that arrives, or is unfinished, while the server shuts down."""
    return RequestError(503, "the server is shutting down")
