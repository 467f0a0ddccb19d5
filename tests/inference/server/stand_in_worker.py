"""An engine's thread without a model: every answer repeats its prompt's bytes."""

import queue
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from megajax.inference.detokenizer import Detokenizer, TextStream
from megajax.inference.request import Piece, Refused, Request, TokenScore
from megajax.inference.server.state import TEXTS
from megajax.tokenizers.base import Tokenizer

BLOCK = 16


@dataclass(eq=False)
class Answer:
    request: Request
    choice: int
    text: TextStream
    made: int = 0

    def blocks(self) -> int:
        return (len(self.request.prompt) + self.request.sampling.max_tokens) // BLOCK + 1


@dataclass
class StandInWorker:
    """`rows` answers run at the same time, `queue` wait; a prompt of the bytes `fault` fails, `death` ends the loop."""

    tokenizer: Tokenizer
    rows: int = 16
    queue: int = 32
    blocks: int = 4000
    length: int = 4096
    step_seconds: float = 0.001
    fault: tuple[int, ...] = tuple(b"fault")
    death: tuple[int, ...] = tuple(b"death")
    free: int = 0
    steps: int = 0
    failure: BaseException | None = None
    running: list[Answer] = field(default_factory=list)
    waiting: list[Answer] = field(default_factory=list)
    hung: bool = False
    adapters: list[str | None] = field(default_factory=list)
    guides: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free, self._inbox, self._lock = self.blocks, queue.SimpleQueue[Any](), threading.Lock()
        self._texts, self._pending = Detokenizer(self.tokenizer), 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        if len(request.prompt) + 1 > self.length:
            raise Refused("too_long", f"{len(request.prompt)} tokens, at most {self.length - 1}", "prompt")
        with self._lock:
            if self._pending + request.sampling.n > self.rows + self.queue:
                raise Refused("queue_full", f"{self.queue} answers wait already")
            self._pending += request.sampling.n
        self.adapters.append(request.adapter)
        self.guides.append(request.sampling.guide)
        self._inbox.put(request)

    def cancel(self, identifier: str) -> None:
        self._inbox.put(identifier)

    def healthy(self) -> bool:
        return not self.hung

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def statistics(self) -> Any:
        zero = dict.fromkeys(TEXTS, 0)
        used = {"running": len(self.running), "blocks_used": self.blocks - self.free, "blocks": self.blocks}
        return SimpleNamespace(**zero | used)

    def _run(self) -> None:
        try:
            while self._take():
                while self.waiting and len(self.running) < self.rows and self.free >= self.waiting[0].blocks():
                    self.running.append(self.waiting.pop(0))
                    self.free -= self.running[-1].blocks()
                time.sleep(self.step_seconds)
                self.steps += 1
                for answer in list(self.running):
                    self._advance(answer)
        except RuntimeError as error:
            self.failure = error
            for answer in [*self.running, *self.waiting]:
                answer.request.deliver(Piece(answer.choice, "", (), (), "error"))

    def _take(self) -> bool:
        """False at the end."""
        while not self._inbox.empty() or not (self.running or self.waiting):
            asked = self._inbox.get()
            if asked is None:
                for answer in [*self.running, *self.waiting]:
                    answer.request.deliver(Piece(answer.choice, "", (), (), "cancelled"))
                return False
            if isinstance(asked, Request):
                stops = asked.sampling.stop
                self.waiting += [
                    Answer(asked, choice, self._texts.stream(asked.prompt, stops)) for choice in range(asked.sampling.n)
                ]
                continue
            for answer in [*self.running, *self.waiting]:
                if answer.request.identifier == asked:
                    self._end(answer)
        return True

    def _end(self, answer: Answer) -> None:
        if answer in self.running:
            self.running.remove(answer)
            self.free += answer.blocks()
        else:
            self.waiting.remove(answer)
        with self._lock:
            self._pending -= 1

    def _advance(self, answer: Answer) -> None:
        request, settings = answer.request, answer.request.sampling
        if request.prompt == self.death:
            raise RuntimeError("the device has gone")
        if request.prompt == self.fault:
            self._end(answer)
            request.deliver(Piece(answer.choice, "", (), (), "error"))
            return
        first = answer.made == 0 and answer.choice == 0
        prompt_scores = ()
        if first and settings.prompt_logprobs is not None:
            prompt_scores = (None, *(self._score(token, settings.prompt_logprobs) for token in request.prompt[1:]))
        if settings.max_tokens == 0:
            self._end(answer)
            request.deliver(Piece(answer.choice, "", (), (), "length", prompt_scores))
            return
        token = request.prompt[answer.made % len(request.prompt)]
        answer.made += 1
        text, finish = answer.text.add(token), None
        if answer.text.stopped:
            finish = "stop"
        elif answer.made == min(settings.max_tokens, self.length - len(request.prompt)):
            text, finish = text + answer.text.end(), "length"
        scores = () if settings.logprobs is None else (self._score(token, settings.logprobs),)
        if finish is not None:
            self._end(answer)
        request.deliver(Piece(answer.choice, text, (token,), scores, finish, prompt_scores))

    def _score(self, token: int, count: int) -> TokenScore:
        top = tuple(((token + place) % 256, -0.5 - place) for place in range(count))
        return TokenScore(token, -0.5, 1, top)
