"""Errors that a client sees: a status and {"error": {"type", "message", "param"}}."""

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
"""Of the errors by status; for the others, invalid_request_error."""

REFUSALS: Mapping[str, int] = {"queue_full": 429, "too_long": 400, "invalid": 400, "draining": 503}
"""Status by the engine's reason to refuse a request."""
RETRY_SECONDS: Mapping[int, int] = {429: 1, 503: 5}
"""What the header Retry-After says."""


class RequestError(Exception):
    """Ends a request with an error response.

    Args:
        status: of HTTP.
        message: what is wrong, in a sentence.
        param: name of the field that is wrong; None: of no field.
    """

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    def body(self) -> dict[str, Any]:
        """The object of a response or of an event."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"type": kind, "message": self.message, "param": self.param, "code": self.status}}

    def headers(self) -> dict[str, str]:
        """Those that the status asks for."""
        own = {"Retry-After": str(RETRY_SECONDS[self.status])} if self.status in RETRY_SECONDS else {}
        return own | ({"WWW-Authenticate": 'Basic realm="the key is the password"'} if self.status == 401 else {})


def invalid(param: str | None, message: str) -> RequestError:
    """A bad request."""
    return RequestError(400, message, param)


def refused(refusal: Refused, names: Mapping[str, str]) -> RequestError:
    """What the engine refused. names: a setting of `Sampling` -> the field of the request."""
    param = None if refusal.field is None else names.get(refusal.field, refusal.field)
    return RequestError(REFUSALS[refusal.reason], refusal.message, param)


def failed() -> RequestError:
    """The engine had a fault; what it was is in the server's log."""
    return RequestError(500, "the engine failed on this request; the server's log says why")


def shutting_down() -> RequestError:
    """A request that came, or did not end, while the server shuts down."""
    return RequestError(503, "the server is shutting down")
