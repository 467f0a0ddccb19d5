"""The requests to the engine that one HTTP request makes, and what their answers grow by."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol
from uuid import uuid4

from megajax.inference.request import Finish, Piece, Refused, Request, Sampling, TokenScore
from megajax.inference.server.errors import failed, refused, shutting_down
from megajax.inference.server.metrics import ServerMetrics


class Worker(Protocol):
    """The engine, as threads other than its own see it."""

    def submit(self, request: Request) -> None:
        """Raises Refused."""
        ...

    def cancel(self, identifier: str) -> None: ...


class Growth(NamedTuple):
    """What the answer `number` grew by: of prompt p, its choice c is answer p x n + c."""

    number: int
    text: str
    tokens: tuple[int, ...]
    scores: tuple[TokenScore, ...]
    finish: Finish | None
    prompt_scores: tuple[TokenScore | None, ...] = ()

    def then(self, later: "Growth") -> "Growth":
        """Both together."""
        return Growth(
            self.number,
            self.text + later.text,
            self.tokens + later.tokens,
            self.scores + later.scores,
            later.finish,
            self.prompt_scores + later.prompt_scores,
        )


class Call:
    """Prompts that are answered together.

    The engine's thread puts pieces into a queue of the event loop and never waits. A slow reader costs its own answer
    in memory, no more.
    """

    def __init__(self, worker: Worker, metrics: ServerMetrics, names: dict[str, str]):
        """names: settings of `Sampling` -> fields of the request, for messages."""
        self._worker, self._metrics, self._names = worker, metrics, names
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self._running: set[str] = set()
        self._left = self._choices = 0
        self._began = time.monotonic()
        self._last: dict[int, float] = {}
        self.generated = 0
        """Tokens of all answers."""

    def submit(self, prompts: Sequence[tuple[int, ...]], sampling: Sampling, adapter: str | None) -> None:
        """Raises RequestError if the engine refuses one of the prompts; none of them runs then."""
        self._choices = sampling.n
        for number, prompt in enumerate(prompts):
            identifier = uuid4().hex
            request = Request(
                identifier=identifier,
                prompt=prompt,
                sampling=sampling,
                adapter=adapter,
                deliver=lambda piece, number=number: self._deliver(number, piece),
            )
            try:
                self._worker.submit(request)
            except Refused as refusal:
                self.cancel()
                raise refused(refusal, self._names) from None
            self._running.add(identifier)
            self._left += sampling.n

    def _deliver(self, number: int, piece: Piece) -> None:
        """On the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, (number, piece))

    def cancel(self) -> None:
        """Frees what the answers that are not finished take; at any time."""
        while self._running:
            self._worker.cancel(self._running.pop())

    async def grow(self) -> AsyncIterator[list[Growth]]:
        """What answers grew by since the last time, each once, until all are finished.

        Raises RequestError: 500 where the engine failed, 503 where it was told to end.
        """
        try:
            while self._left:
                grown: dict[int, Growth] = {}
                pending = [await self._pieces.get()]
                while not self._pieces.empty():  # a slow reader gets several tokens in one event
                    pending.append(self._pieces.get_nowait())
                for prompt, piece in pending:
                    growth = Growth(prompt * self._choices + piece.choice, *piece[1:])
                    grown[growth.number] = grown[growth.number].then(growth) if growth.number in grown else growth
                    self._count(growth)
                yield list(grown.values())
            self._running.clear()
            self._metrics.seconds.observe(time.monotonic() - self._began)
        finally:
            self.cancel()

    def _count(self, growth: Growth) -> None:
        now = time.monotonic()
        self.generated += len(growth.tokens)
        if growth.tokens:
            before = self._last.get(growth.number)
            if before is None:
                self._metrics.first_token_seconds.observe(now - self._began)
            else:
                self._metrics.token_seconds.observe((now - before) / len(growth.tokens))
            self._last[growth.number] = now
        if growth.finish is not None:
            self._left -= 1
            self._metrics.answers.add(1, finish=growth.finish)
        if growth.finish == "error":
            raise failed()
        if growth.finish == "cancelled":
            raise shutting_down()


async def whole(call: Call, gone: asyncio.Task[None]) -> dict[int, Growth] | None:
    """All answers of a call; None if the client has gone, which cancels it. Raises RequestError.

    gone: ends when the client has closed the connection.
    """
    answers: dict[int, Growth] = {}

    async def collect() -> None:
        async for grown in call.grow():
            for growth in grown:
                before = answers.get(growth.number)
                answers[growth.number] = growth if before is None else before.then(growth)

    task = asyncio.ensure_future(collect())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return None
        task.result()
    finally:
        task.cancel()
        gone.cancel()
        call.cancel()
    return answers
