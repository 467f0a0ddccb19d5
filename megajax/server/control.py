"""Routes that pause the engine, let it sleep, abort its requests, and give it other weights, by the names that vLLM or
SGLang have for them (server.control)."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megajax.config.errors import UserError
from megajax.inference.engine import Engine
from megajax.inference.request import RefusedRequest, Running
from megajax.server.body import RequestError, invalid, read_object, refused
from megajax.server.config import ServerConfig
from megajax.server.fields import FLAG, TEXT, Endpoint
from megajax.server.model_list import ModelList
from megajax.server.request_values import Fields, RequestValues, UnknownFields, Unsupported, choice

MODES: dict[str, Running] = {"abort": "abort", "wait": "finish", "keep": "recompute"}
"""vLLM's modes: what becomes of unfinished requests."""
KEEPING_MODES: dict[str, Running] = {**MODES, "keep": "keep"}
"""The same with clear_cache=false."""
BOOLEANS = {"true": True, "false": False}

UPDATE_WEIGHTS: Fields = {
    "model_path": TEXT._replace(required=True),
    "load_format": choice("auto"),
    "abort_all_requests": FLAG,
    "flush_cache": FLAG,
    "weight_version": Unsupported("versions of weights are not kept"),
    "is_async": Unsupported("the answer comes when the weights are there", (False,)),
    "keep_pause": Unsupported("a paused engine stays paused in any case", (False,)),
    **dict.fromkeys(("torch_empty_cache", "recapture_cuda_graph"), FLAG),
}
"""Fields of /update_weights_from_disk, which are SGLang's."""
ABORT: Fields = {
    "abort_all": FLAG,
    "rid": Unsupported("a request is aborted by closing its connection; abort_all=true aborts all of them", ("",)),
}
"""Fields of /abort_request, which are SGLang's."""


class Control:
    """The handlers of the routes."""

    def __init__(self, models: ModelList, config: ServerConfig, unknown: UnknownFields):
        self._models, self._config, self._unknown = models, config, unknown
        self._worker = models.base.worker
        self._changing = asyncio.Lock()

    def endpoints(self) -> list[Endpoint]:
        """All routes."""
        return [
            Endpoint("/pause", "POST", "Runs no step until /resume; query: mode, clear_cache.", self.pause),
            Endpoint("/resume", "POST", "Runs steps again.", self.resume),
            Endpoint("/is_paused", "GET", "Whether the engine is paused.", self.is_paused),
            Endpoint("/sleep", "POST", "Releases the devices' memory; query: level, mode.", self.sleep),
            Endpoint("/wake_up", "POST", "Runs steps again after /sleep; query: tags.", self.wake_up),
            Endpoint("/is_sleeping", "GET", "Whether the engine sleeps.", self.is_sleeping),
            Endpoint("/abort_request", "POST", "Ends all requests with what they have.", self.abort, ABORT),
            Endpoint("/update_weights_from_disk", "POST", "Reads other weights.", self.update_weights, UPDATE_WEIGHTS),
        ]

    async def pause(self, request: Request) -> Response:
        """Pauses in one of `MODES`. Requests that are kept are computed again unless clear_cache=false."""
        clears = self._query(request, "clear_cache", BOOLEANS, "true")
        modes = MODES if clears else KEEPING_MODES
        running = self._query(request, "mode", modes, "abort")
        self._demand_known(request, "mode", "clear_cache")
        await self._call(lambda engine: engine.pause(running), idle=running == "finish")
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """Runs steps again."""
        self._demand_known(request)
        await self._call(Engine.resume)
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """Whether the engine is paused."""
        del request
        return JSONResponse({"is_paused": self._worker.engine.paused})

    async def sleep(self, request: Request) -> Response:
        """Releases the devices' memory of the cache and the weights."""
        level = self._query(request, "level", {"1": 1, "2": 2}, "1")
        running = self._query(request, "mode", MODES, "abort")
        self._demand_known(request, "level", "mode")
        await self._call(lambda engine: engine.sleep(level, running), idle=running == "finish")
        return JSONResponse({"status": "sleeping", "level": level})

    async def wake_up(self, request: Request) -> Response:
        """Runs steps again. With tags=weights alone nothing happens: /update_weights_from_disk brings weights, and the
        cache, without which no step runs, comes with tags=kv_cache."""
        tags = request.query_params.getlist("tags")
        if unknown := [tag for tag in tags if tag not in ("weights", "kv_cache")]:
            raise invalid("tags", f"tags must be weights or kv_cache, got {unknown[0][:60]!r}")
        self._demand_known(request, "tags")
        if not tags or "kv_cache" in tags:
            await self._call(Engine.wake)
        return JSONResponse({"status": "sleeping" if self._worker.engine.asleep else "awake"})

    async def is_sleeping(self, request: Request) -> Response:
        """Whether the engine sleeps."""
        del request
        return JSONResponse({"is_sleeping": self._worker.engine.asleep})

    async def abort(self, request: Request) -> Response:
        """Ends all requests with what they have."""
        values = await self._values(request, ABORT)
        if not values.get("abort_all", False):
            raise invalid("abort_all", "abort_all must be true: a single request is aborted by closing its connection")
        await self._call(Engine.abort_all, first=True)
        return JSONResponse({"status": "aborted"})

    async def update_weights(self, request: Request) -> Response:
        """Reads other weights, when the requests before this one have ended. Those of a paused engine are computed
        again, or keep their keys with flush_cache=false."""
        values = await self._values(request, UPDATE_WEIGHTS)
        aborts, folder = values.get("abort_all_requests", False), Path(values["model_path"])
        stays: Running = "recompute" if values.get("flush_cache", True) else "keep"

        def refit(engine: Engine, make: Callable[[], Any]) -> int:
            engine.refit(make, "abort" if aborts else stays if engine.paused else "finish")
            return engine.requests

        async with self._changing:
            try:
                make = await asyncio.to_thread(self._models.read_weights, folder)
                waiting = await self._call(lambda engine: refit(engine, make), idle=not aborts)
            except (UserError, OSError) as error:
                problem = invalid("model_path", str(error))
                return JSONResponse({"success": False, "message": problem.message, **problem.body()}, problem.status)
        body = {"success": True, "message": f"the weights are those of {folder}"}
        return JSONResponse(body | {"num_paused_requests": waiting})

    def _query[T](self, request: Request, name: str, values: dict[str, T], default: str) -> T:
        value = request.query_params.get(name, default)
        if value not in values:
            raise invalid(name, f"{name} must be one of {', '.join(values)}, got {value[:60]!r}")
        return values[value]

    def _demand_known(self, request: Request, *names: str) -> None:
        _demand_no_page(request)
        if others := [name for name in request.query_params if name not in names]:
            known = ", ".join(names) or "none"
            raise invalid(others[0][:60], f"unknown parameter {others[0][:60]!r}: there is {known}")

    async def _values(self, request: Request, fields: Fields) -> RequestValues:
        _demand_no_page(request)
        return RequestValues(await read_object(request, self._config), fields, self._unknown)

    async def _call[T](self, work: Callable[[Engine], T], *, idle: bool = False, first: bool = False) -> T:
        try:
            return await asyncio.wrap_future(self._worker.call(work, idle=idle, first=first))
        except RefusedRequest as refusal:
            raise refused(refusal, {}) from None


def _demand_no_page(request: Request) -> None:
    """Raises RequestError for a request of a web page: a browser sends one with a query alone to any server, without
    asking it, but always names the page's origin."""
    if "origin" in request.headers:
        raise RequestError(403, "web pages cannot use this route: send the request without the header Origin")
