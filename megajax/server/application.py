"""The ASGI application: the routes, behind a gate that checks keys and host names, counts, logs, and answers errors."""

import json
import time
import traceback
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from hashlib import sha256
from hmac import compare_digest
from importlib.resources import files
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megajax import __version__
from megajax.config.errors import UserError
from megajax.server.body import RequestError, invalid, large_head, read_object
from megajax.server.calls import Call, complete_answers
from megajax.server.config import Access, ServerConfig, host_of, is_ip_address
from megajax.server.control import Control
from megajax.server.embeddings import EMBEDDINGS, embedding_job
from megajax.server.fields import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, Endpoint, document
from megajax.server.megatron import FIELDS, megatron_job
from megajax.server.metrics import Readiness, ServerMetrics
from megajax.server.model_list import LOAD_ADAPTER, UNLOAD_ADAPTER, ModelList
from megajax.server.models import ServedModel
from megajax.server.openai import Job, OpenAIForm, chat_job, completion_job
from megajax.server.request_values import Fields, RequestValues, UnknownFields

type Reader = Callable[[RequestValues, ServedModel, ServerConfig], Awaitable[Job]]

PUBLIC_ROUTE = "/health"
"""The route that requires neither a key nor a known host name."""
PROMPTS = ("prompt", "messages", "prompts", "input")
"""Fields with the text of a request, for the log."""
CLIENT_GONE = 499
"""Status in the log if a client closed the connection before the answer."""
SAFE_METHODS = ("GET", "HEAD")


async def _answer_error(request: Request, error: Exception) -> Response:
    """The answer to an error of a route, without details of internal ones.

    A UserError is a tokenizer's about tokens or text. HTTPException stands for unknown paths and methods. Starlette
    raises other errors again, and the gate logs them.
    """
    headers: Mapping[str, str] = {}
    if isinstance(error, HTTPException):
        headers, message = error.headers or {}, str(error.detail)
        if error.status_code == 404:
            message = f"no route {request.url.path[:200]}"
        elif error.status_code == 405:
            allowed = headers.get("Allow", "")
            message = f"{request.method[:16]} is not allowed here" + f": use {allowed}" * bool(allowed)
        error = RequestError(error.status_code, message)
    elif isinstance(error, UserError):
        error = RequestError(400, str(error))
    elif not isinstance(error, RequestError):
        error = RequestError(500, "the server failed on this request; see its log")
    response = error_response(error)
    response.headers.update(headers)
    return response


class Routes:
    """The handlers of the routes."""

    def __init__(
        self,
        models: ModelList,
        config: ServerConfig,
        metrics: ServerMetrics,
        readiness: Readiness,
        unknown: UnknownFields,
        *,
        log_prompts: bool,
    ):
        self._unknown, self._log_prompts = unknown, log_prompts
        self._models, self._config, self._metrics, self._readiness = models, config, metrics, readiness
        self._registry = CollectorRegistry()
        for collector in (metrics, readiness):
            self._registry.register(collector)
        self._page = files("megajax.server").joinpath("page.html").read_text(encoding="utf-8")

    def endpoints(self) -> list[Endpoint]:
        """All routes, as they are served and as /openapi.json describes them."""
        completions, chat = self._generate(COMPLETIONS, completion_job), self._generate(CHAT, chat_job)
        embeddings, megatron = self._generate(EMBEDDINGS, embedding_job), self._generate(FIELDS, megatron_job)
        adapters = [
            Endpoint("/v1/load_lora_adapter", "POST", "Loads an adapter.", self.load_adapter, LOAD_ADAPTER),
            Endpoint("/v1/unload_lora_adapter", "POST", "Drops an adapter.", self.unload_adapter, UNLOAD_ADAPTER),
        ]
        control = Control(self._models, self._config, self._unknown)
        return [
            *(adapters if self._config.load_adapters else []),
            *(control.endpoints() if self._config.control else []),
            Endpoint("/", "GET", "The page for trying prompts.", self.page),
            Endpoint("/health", "GET", "Status 200 while the server answers requests, else 503.", self.health),
            Endpoint("/version", "GET", "The version of MegaJAX.", self.version),
            Endpoint("/openapi.json", "GET", "This document.", self.openapi),
            Endpoint("/metrics", "GET", "Metrics in Prometheus's text format.", self.metrics),
            Endpoint("/v1/models", "GET", "The list of models.", self.models),
            Endpoint("/v1/models/{name:path}", "GET", "The model's entry.", self.model),
            Endpoint("/v1/completions", "POST", "Continues texts.", completions, COMPLETIONS),
            Endpoint("/v1/chat/completions", "POST", "Answers messages.", chat, CHAT),
            Endpoint("/v1/embeddings", "POST", "Vectors of texts.", embeddings, EMBEDDINGS),
            Endpoint("/api", "PUT", "Continues texts, as Megatron-LM's server.", megatron, FIELDS),
            Endpoint("/tokenize", "POST", "Tokens of a prompt or of messages.", self.tokenize, TOKENIZE),
            Endpoint("/detokenize", "POST", "Text of tokens.", self.detokenize, DETOKENIZE),
        ]

    async def page(self, request: Request) -> Response:
        """The page for trying prompts."""
        del request
        return HTMLResponse(self._page, headers=page_headers(self._page))

    async def health(self, request: Request) -> Response:
        """Status 200 while the server answers requests, else 503."""
        del request
        status = self._readiness.status()
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def version(self, request: Request) -> Response:
        """The version of MegaJAX."""
        del request
        return JSONResponse({"version": __version__})

    async def openapi(self, request: Request) -> Response:
        """The routes in OpenAPI 3.1."""
        del request
        return JSONResponse(document(self.endpoints(), __version__, strict=self._config.strict))

    async def metrics(self, request: Request) -> Response:
        """Metrics in Prometheus's text format."""
        del request
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        """The list of models: that of the server, and its adapters."""
        del request
        return JSONResponse({"object": "list", "data": self._models.cards()})

    async def model(self, request: Request) -> Response:
        """The model's entry. Raises RequestError 404 for another name."""
        return JSONResponse(self._models.named({"model": request.path_params["name"]}).card())

    async def load_adapter(self, request: Request) -> Response:
        """The entry of an adapter, after it was loaded from a folder of the server."""
        values = await self._values(request, LOAD_ADAPTER)
        self._demand_ready()
        return JSONResponse((await self._models.load(values)).card())

    async def unload_adapter(self, request: Request) -> Response:
        """The name of an adapter that no further request can use."""
        values = await self._values(request, UNLOAD_ADAPTER)
        self._demand_ready()
        await self._models.unload(values)
        return JSONResponse({"id": values["lora_name"], "object": "model", "deleted": True})

    async def tokenize(self, request: Request) -> Response:
        """Tokens of a prompt, or of messages followed by the header of an answer."""
        values = await self._values(request, TOKENIZE)
        model = self._models.named(values)
        if ("prompt" in values) == ("messages" in values):
            raise invalid("prompt", "give one of prompt and messages")
        if "messages" in values:
            tokens, _ = await model.converse(values)
        else:
            special, prefix = values.get("special_tokens", False), values.get("add_special_tokens", True)
            tokens = await model.encode(values["prompt"], special_tokens=special, prefix=prefix)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": model.length})

    async def detokenize(self, request: Request) -> Response:
        """Text of tokens."""
        values = await self._values(request, DETOKENIZE)
        return JSONResponse({"prompt": self._models.named(values).decode(values["tokens"])})

    def _demand_ready(self) -> None:
        """Raises RequestError 503 while the server starts or shuts down."""
        if (refusal := self._readiness.refusal()) is not None:
            raise RequestError(503, refusal)

    async def _values(self, request: Request, fields: Fields) -> RequestValues:
        return RequestValues(await read_object(request, self._config), fields, self._unknown)

    def _generate(self, fields: Fields, read_job: Reader) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            values = await self._values(request, fields)
            self._demand_ready()
            model = self._models.named(values)
            job = await read_job(values, model, self._config)
            if job.pooling is None and not model.generates:
                raise invalid("model", f"{model.name} gives embeddings and no text: use /v1/embeddings")
            log = request.state.log
            log.update(model=model.name, prompt_tokens=sum(map(len, job.prompts)))
            logged = self._log_prompts and not values.get("no_log", False)
            if logged:
                log.update(prompt=next((values[name] for name in PROMPTS if values.get(name)), None))
            call = Call(
                model.worker,
                self._metrics,
                job.names,
                model.adapter,
                priority=values.get("priority", 0),
                cache_salt=request.state.salt + values.get("cache_salt", "").encode(),
            )
            prompts = [tuple(prompt) for prompt in job.prompts]
            guided = await call.guided(job.sampling, partial(_disconnected, request))
            call.submit(prompts, job.sampling, job.pooling, job.images, guided)
            if job.stream is not None:
                return EventStream(_events(call, job.stream, log, logged=logged))
            try:
                answers = await complete_answers(call, _disconnected(request))
            finally:
                log.update(tokens=call.generated)
            if logged:
                log.update(answer=[answer.text for answer in answers])
            return JSONResponse(job.response(answers))

        return answer


async def _events(call: Call, form: OpenAIForm, log: dict[str, Any], *, logged: bool) -> AsyncGenerator[str]:
    """Server-sent events. Closed when the client disconnects, which cancels the call. logged: log the answers."""
    texts: dict[int, str] = {}
    try:
        for event in form.opening():
            yield _event(event)
        async for outputs in call.outputs():
            for output in outputs:
                texts[output.choice] = texts.get(output.choice, "") + output.text
                yield _event(form.event(output))
        for event in form.closing():
            yield _event(event)
        yield "data: [DONE]\n\n"
    except RequestError as error:
        log.update(error=error.status)
        yield _event(error.body())
    finally:
        call.cancel()
        log.update(tokens=call.generated)
        if logged:
            log.update(answer=list(texts.values()))


class EventStream(StreamingResponse):
    """Server-sent events, which end when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str]):
        super().__init__(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


def page_headers(page: str) -> dict[str, str]:
    """Headers that allow only the page's own script and style, and connections only to this server."""
    hashes = {}
    for tag in ("script", "style"):
        text = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        hashes[tag] = b64encode(sha256(text.encode()).digest()).decode()
    policy = "; ".join(
        (
            "default-src 'none'",
            *(f"{tag}-src 'sha256-{digest}'" for tag, digest in hashes.items()),
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


class Gate:
    """An ASGI application around another.

    Args:
        app: the routes.
        keys: requests must have one of them; empty: no key is required.
        hosts: the allowed names in the Host header; None: all. IP addresses are always allowed.
        paths: paths of the routes, for the counts.
        head_bytes: maximum size of the first line and the headers.
        cache_per_key: whether requests share the cache only with those of the same key.
        log: called with a line for each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        head_bytes: int,
        keys: Sequence[bytes],
        cache_per_key: bool,
        hosts: Collection[str] | None,
        paths: Collection[str],
        metrics: ServerMetrics,
        readiness: Readiness,
        log: Callable[[str], None],
    ):
        self._app, self._keys, self._hosts, self._paths, self._head_bytes = app, keys, hosts, paths, head_bytes
        self._metrics, self._readiness, self._log, self._cache_per_key = metrics, readiness, log, cache_per_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        notes: dict[str, Any] = {}
        scope["state"] = {"log": notes, "salt": b""}
        began, status, writes = time.monotonic(), CLIENT_GONE, scope["method"] not in SAFE_METHODS

        async def record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._readiness.active += writes
        try:
            self._demand_size(scope)
            key = self._demand_access(scope)
            if self._cache_per_key:
                scope["state"]["salt"] = sha256(key).digest()
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
            self._metrics.requests[path, str(status)] += 1
            self._log(line(scope, status, time.monotonic() - began, notes))

    def _demand_size(self, scope: Scope) -> None:
        """Raises RequestError for a head of too many bytes; the protocol limits those that are incomplete."""
        parts = [scope["method"].encode(), scope["raw_path"], scope["query_string"]]
        size = sum(map(len, parts)) + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > self._head_bytes:
            raise large_head(self._head_bytes)

    def _demand_access(self, scope: Scope) -> bytes:
        """The key of a request; empty if none is needed. Raises RequestError without a key or for an unknown host name:
        after DNS rebinding, a browser sends requests of a web page to this address, with the page's host name, without
        a key."""
        if scope["path"] == PUBLIC_ROUTE:
            return b""
        headers = dict(scope["headers"])
        host = host_of(headers.get(b"host", b"").decode("latin-1"))
        if self._hosts is not None and host not in self._hosts and not is_ip_address(host):
            raise RequestError(403, f"the Host header names {host[:60]!r}: add the name to server.hosts to allow it")
        if not self._keys:
            return b""
        key_sent = _key(headers.get(b"authorization", b""))
        # Compare all keys, so that the time does not reveal which key is similar.
        if not sum([compare_digest(key, key_sent) for key in self._keys]):
            raise RequestError(401, "a key is required: send the header Authorization: Bearer KEY")
        return key_sent


def build_application(
    models: ModelList,
    config: ServerConfig,
    access: Access,
    readiness: Readiness,
    log: Callable[[str], None],
) -> Gate:
    """The ASGI application of a model and its adapters. Raises UserError for an invalid file of keys."""
    metrics = ServerMetrics(models.base.name)
    unknown = UnknownFields(strict=config.strict, log=log)
    endpoints = Routes(models, config, metrics, readiness, unknown, log_prompts=access.log_prompts).endpoints()
    routes = [Route(endpoint.path, endpoint.answer, methods=[endpoint.method]) for endpoint in endpoints]
    handlers: dict[Any, Any] = dict.fromkeys((RequestError, UserError, HTTPException, Exception), _answer_error)
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    paths = {route.path for route in routes}
    keys = access.keys()
    hosts = {"localhost", access.host.lower(), *config.hosts} if config.hosts or not keys else None
    return Gate(
        app,
        head_bytes=config.header_bytes,
        keys=keys,
        cache_per_key=config.cache_per_key,
        hosts=hosts,
        paths=paths,
        metrics=metrics,
        readiness=readiness,
        log=log,
    )


def error_response(error: RequestError) -> JSONResponse:
    """The error as JSON, with the headers that its status requires."""
    return JSONResponse(error.body(), error.status, headers=error.headers())


def line(scope: Scope, status: int, seconds: float, notes: Mapping[str, Any]) -> str:
    """The log line of a request, without its headers; prompts only if they are in the notes."""
    client = scope.get("client") or ("-",)
    path = scope.get("raw_path", b"").decode("ascii", errors="replace")[:200]
    more = "".join(f" {name}={json.dumps(value, default=_size)}" for name, value in notes.items())
    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    return f"{now} {client[0]} {scope['method'][:16]} {path} {status} {seconds:.3f}s{more}"


def _size(data: bytes) -> str:
    """An image, in the log."""
    return f"{len(data):,} bytes"


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
