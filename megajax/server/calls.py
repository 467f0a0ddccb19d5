"""The engine requests of an HTTP request, and the outputs of their answers."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any
from uuid import uuid4

from starlette.requests import ClientDisconnect

from megajax.config.errors import UserError
from megajax.inference.request import Output, Pooling, PromptImage, RefusedRequest, Request
from megajax.inference.sampling_settings import Sampling
from megajax.inference.worker import Worker
from megajax.server.body import aborted, failed, refused, shutting_down
from megajax.server.metrics import ServerMetrics


class Call:
    """Prompts that are answered together: choice c of prompt p is answer p x n + c.

    The engine's thread puts outputs into a queue of the event loop and never waits. A slow reader only delays itself,
    and its answers stay in memory.
    """

    def __init__(
        self,
        worker: Worker,
        metrics: ServerMetrics,
        names: dict[str, str],
        adapter: str | None = None,
        *,
        priority: int = 0,
        cache_salt: bytes = b"",
    ):
        """names: settings of `Sampling` -> fields of the request, for messages; the others: as in `Request`."""
        self._worker, self._metrics, self._adapter = worker, metrics, adapter
        self._priority, self._cache_salt = priority, cache_salt
        prompt = names.get("prompt", "prompt")
        self._names = {"adapter": "model", "pooling": "model", "images": prompt, "bad_tokens": "bad_words", **names}
        # The engine may give a prompt to the model's encoder.
        self._names["memory"] = prompt
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()
        self._running: set[str] = set()
        self._unfinished, self._partial = 0, True
        self._began = time.monotonic()
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self.generated = 0
        """Tokens of all answers."""

    async def guided(self, sampling: Sampling, disconnected: Callable[[], Coroutine[Any, Any, None]]) -> Any:
        """The first state of the guide of all prompts; None without one.

        disconnected: ends when the client closes the connection. Then nothing waits for the guide any more.
        Raises RequestError, or ClientDisconnect.
        """
        try:
            future = self._worker.engine.admission.start_guide(sampling)
            return None if future is None else await until_disconnected(asyncio.wrap_future(future), disconnected())
        except RefusedRequest as refusal:
            raise refused(refusal, self._names) from None
        except UserError as error:
            raise refused(RefusedRequest("invalid", f"guide {error}", "guide"), self._names) from None

    def submit(
        self,
        prompts: Sequence[tuple[int, ...]],
        sampling: Sampling,
        pooling: Pooling | None = None,
        images: tuple[PromptImage, ...] = (),
        guided: Any = None,
    ) -> None:
        """Submit all prompts. Raises RequestError if the engine rejects one of them; then none runs.

        guided: the first state of their guide; pooling: which embedding to deliver in place of an answer; images: of a
        single prompt.
        """
        # A part of a text is an answer; a part of an embedding, or of scores, is none.
        self._partial = pooling is None and sampling.prompt_logprobs is None and sampling.max_tokens > 0
        for number, prompt in enumerate(prompts):
            identifier = uuid4().hex
            request = Request(
                identifier=identifier,
                prompt=prompt,
                sampling=sampling,
                pooling=pooling,
                images=images,
                guided=guided,
                adapter=self._adapter,
                priority=self._priority,
                cache_salt=self._cache_salt,
                deliver=lambda output, first=number * sampling.n: self._deliver(
                    output._replace(choice=first + output.choice)
                ),
            )
            try:
                self._worker.submit(request)
            except RefusedRequest as refusal:
                self.cancel()
                raise refused(refusal, self._names) from None
            self._running.add(identifier)
            self._unfinished += sampling.n

    def _deliver(self, output: Output) -> None:
        """Called on the engine's thread."""
        with contextlib.suppress(RuntimeError):  # The event loop is closed: nothing waits.
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)

    def cancel(self) -> None:
        """Cancel unfinished answers; allowed at any time."""
        while self._running:
            self._worker.cancel(self._running.pop())

    async def outputs(self) -> AsyncIterator[list[Output]]:
        """Yield the new text of answers, at most one of each, until all are finished.

        Raises RequestError: 500 if the engine failed, 503 if it was shut down.
        """
        try:
            while self._unfinished:
                grown: dict[int, Output] = {}
                pending = [await self._outputs.get()]
                while not self._outputs.empty():  # A slow reader gets several tokens in one event.
                    pending.append(self._outputs.get_nowait())
                for output in pending:
                    _append(grown, output)
                    self._count(output)
                yield list(grown.values())
            self._running.clear()
            self._metrics.observe("request_seconds", time.monotonic() - self._began)
        finally:
            self.cancel()

    def _count(self, output: Output) -> None:
        now, metrics = time.monotonic(), self._metrics
        self.generated += len(output.tokens)
        if output.admitted is not None:
            metrics.observe("queue_seconds", output.admitted - self._began)
        if output.tokens:
            before = self._last.get(output.choice)
            if before is None:
                self._first[output.choice] = now
                metrics.observe("time_to_first_token_seconds", now - self._began)
                if output.admitted is not None:
                    metrics.observe("prefill_seconds", now - output.admitted)
            else:
                metrics.observe("time_per_token_seconds", (now - before) / len(output.tokens))
            self._last[output.choice] = now
        if output.finish is not None:
            self._unfinished -= 1
            metrics.answers[(output.finish,)] += 1
            if output.choice in self._first:
                metrics.observe("decode_seconds", now - self._first[output.choice])
        if output.finish == "error" and output.problem:
            setting = output.problem.partition(" ")[0]
            raise refused(RefusedRequest("invalid", output.problem, setting), self._names)
        if output.finish == "error":
            raise failed()
        if output.finish == "abort" and not self._partial:
            raise aborted()
        if output.finish == "cancelled":
            raise shutting_down()


async def complete_answers(call: Call, disconnected: Awaitable[None]) -> list[Output]:
    """All answers of a call in order, each as one output.

    disconnected: ends when the client closes the connection, which cancels the call. Raises RequestError, or
    ClientDisconnect.
    """
    answers: dict[int, Output] = {}

    async def collect() -> None:
        async for outputs in call.outputs():
            for output in outputs:
                _append(answers, output)

    try:
        await until_disconnected(collect(), disconnected)
    finally:
        call.cancel()
    return [answers[number] for number in sorted(answers)]


async def until_disconnected[T](work: Awaitable[T], disconnected: Awaitable[None]) -> T:
    """The result of the work. What did not end is cancelled. Raises ClientDisconnect if `disconnected` ends first."""
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected)
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()


def _append(answers: dict[int, Output], output: Output) -> None:
    before = answers.get(output.choice)
    answers[output.choice] = output if before is None else before.merge(output)
