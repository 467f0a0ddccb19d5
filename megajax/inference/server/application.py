"""The ASGI application: the routes behind the gate."""

from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from megajax.config.errors import UserError
from megajax.inference.server.config import Access, ServerConfig
from megajax.inference.server.errors import RequestError
from megajax.inference.server.gate import Gate, error_response
from megajax.inference.server.metrics import ServerMetrics
from megajax.inference.server.models import ServedModel
from megajax.inference.server.routes import Routes
from megajax.inference.server.state import Readiness


def build_application(
    model: ServedModel,
    config: ServerConfig,
    access: Access,
    readiness: Readiness,
    log: Callable[[str], None],
) -> Gate:
    """The ASGI application of a model. Raises UserError for an invalid file of keys."""
    metrics = ServerMetrics()
    routes = Routes(model, config, metrics, readiness, log_prompts=access.log_prompts).table()
    handlers: dict[Any, Any] = {
        RequestError: _error,
        UserError: _user_error,
        HTTPException: _http_error,
        Exception: _fault,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    paths = {route.path for route in routes}
    hosts = {"localhost", access.host.lower(), *config.hosts}
    return Gate(app, keys=access.keys(), hosts=hosts, paths=paths, metrics=metrics, readiness=readiness, log=log)


async def _error(request: Request, error: RequestError) -> Response:
    del request
    return error_response(error)


async def _user_error(request: Request, error: UserError) -> Response:
    """An error of a tokenizer about tokens or text."""
    del request
    return error_response(RequestError(400, str(error)))


async def _fault(request: Request, error: Exception) -> Response:
    """An internal error, without details for the client. Starlette raises it again, and the gate logs it."""
    del request, error
    return error_response(RequestError(500, "the server failed on this request; see its log"))


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Unknown paths and methods."""
    message = f"no route {request.url.path[:200]}" if error.status_code == 404 else str(error.detail)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.method[:16]} is not allowed here" + f": use {allowed}" * bool(allowed)
    response = error_response(RequestError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response
