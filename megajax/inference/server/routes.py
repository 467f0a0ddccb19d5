"""The routes of the server."""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from hashlib import sha256
from importlib.resources import files
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from megajax.inference.server.body import read_object
from megajax.inference.server.calls import Call, complete_answers
from megajax.inference.server.config import ServerConfig
from megajax.inference.server.errors import RequestError, invalid, shutting_down
from megajax.inference.server.fields import DETOKENIZE, TOKENIZE, check, demand
from megajax.inference.server.megatron import megatron_job
from megajax.inference.server.metrics import ServerMetrics
from megajax.inference.server.models import ServedModel
from megajax.inference.server.openai import Job, OpenAIForm, chat_job, completion_job
from megajax.inference.server.state import Readiness

type Reader = Callable[[Mapping[str, Any], ServedModel, ServerConfig], Awaitable[Job]]


class Routes:
    """The handlers of the routes."""

    def __init__(
        self,
        model: ServedModel,
        config: ServerConfig,
        metrics: ServerMetrics,
        readiness: Readiness,
        *,
        log_prompts: bool,
    ):
        self._log_prompts = log_prompts
        self._model, self._config, self._metrics, self._readiness = model, config, metrics, readiness
        self._page = files("megajax.inference.server").joinpath("page.html").read_text(encoding="utf-8")

    def table(self) -> list[Route]:
        completions, chat = self._generate(completion_job), self._generate(chat_job)
        return [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/completions", self._generate(_megatron_completions), methods=["POST"]),
            Route("/chat/completions", chat, methods=["POST"]),
            Route("/api", self._generate(megatron_job), methods=["PUT"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
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

    async def metrics(self, request: Request) -> Response:
        """Metrics in Prometheus's text format."""
        del request
        lines = [*self._metrics.lines(), *self._readiness.lines()]
        return Response("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        """The list of models, with a single entry."""
        del request
        return JSONResponse({"object": "list", "data": [self._model.card()]})

    async def model(self, request: Request) -> Response:
        """The model's entry. Raises RequestError 404 for another name."""
        self._model.demand_name({"model": request.path_params["name"]})
        return JSONResponse(self._model.card())

    async def tokenize(self, request: Request) -> Response:
        """Tokens of a prompt, or of messages followed by the header of an answer."""
        values = check(await read_object(request, self._config), TOKENIZE)
        model = self._model
        model.demand_name(values)
        if ("prompt" in values) == ("messages" in values):
            raise invalid("prompt", "give one of prompt and messages")
        if "messages" in values:
            tokens = await model.converse(values["messages"])
        else:
            special, prefix = values.get("special_tokens", False), values.get("add_special_tokens", True)
            tokens = await model.encode(values["prompt"], special_tokens=special, prefix=prefix)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": model.length})

    async def detokenize(self, request: Request) -> Response:
        """Text of tokens."""
        values = check(await read_object(request, self._config), DETOKENIZE)
        self._model.demand_name(values)
        return JSONResponse({"prompt": self._model.decode(demand(values, "tokens"))})

    def _generate(self, read_job: Reader) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            body = await read_object(request, self._config)
            if self._readiness.draining or self._readiness.failed():
                raise shutting_down()
            job = await read_job(body, self._model, self._config)
            log = request.state.log
            log.update(model=self._model.name, prompt_tokens=sum(map(len, job.prompts)))
            logged = self._log_prompts and not body.get("no_log", False)
            if logged:
                log.update(prompt=body.get("prompt") or body.get("messages") or body.get("prompts"))
            call = Call(self._model.worker, self._metrics, job.names)
            prompts = [tuple(prompt) for prompt in job.prompts]
            if job.sampling.guide is None:
                call.submit(prompts, job.sampling)
            else:  # Compiles the schema, which takes time.
                await asyncio.to_thread(call.submit, prompts, job.sampling)
            if job.stream is not None:
                return EventStream(_events(call, job.stream, log, logged=logged))
            answers = await complete_answers(call, asyncio.ensure_future(_disconnected(request)))
            log.update(tokens=call.generated)
            if answers is None:
                raise ClientDisconnect
            if logged:
                log.update(answer=[answer.text for answer in answers])
            return JSONResponse(job.form.response(answers))

        return answer


async def _events(call: Call, form: OpenAIForm, log: dict[str, Any], *, logged: bool) -> AsyncGenerator[str]:
    """Server-sent events. Closed when the client disconnects, which cancels the call. logged: log the answers."""
    texts: dict[int, str] = {}
    try:
        for event in form.opening():
            yield _event(event)
        async for pieces in call.pieces():
            for piece in pieces:
                texts[piece.choice] = texts.get(piece.choice, "") + piece.text
                yield _event(form.event(piece))
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


async def _megatron_completions(body: Mapping[str, Any], model: ServedModel, config: ServerConfig) -> Job:
    """The job of Megatron-LM's /completions, which always has log-probabilities."""
    return await completion_job({"logprobs": 0, **body}, model, config)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
