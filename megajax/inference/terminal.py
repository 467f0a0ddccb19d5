"""Text generation at a terminal: answers to prompts, and conversations. Runs the engine on the caller's thread."""

import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Protocol, TextIO

from megajax.inference.prompts import Answer
from megajax.inference.request import Piece, Refused, Request, Sampling
from megajax.metrics.text import visible
from megajax.tokenizers.chat_template import TemplateMisfit
from megajax.tokenizers.conversation import Conversation

HELP = "/reset forgets the conversation, /system TEXT sets a system message, /exit or Ctrl-D ends"


class Engine(Protocol):
    """What runs requests; `megajax.inference.engine.Engine` is one."""

    def submit(self, request: Request) -> None:
        """Raises Refused."""
        ...

    def cancel(self, identifier: str) -> None:
        """End a request."""
        ...

    def step(self) -> bool:
        """One step on the devices; False: nothing to do."""
        ...


class Asking:
    """Requests to an engine from one thread, which runs it."""

    def __init__(self, engine: Engine, sampling: Sampling, *, waiting: int):
        """waiting: most requests that the engine has at a time."""
        self._engine, self._sampling, self._waiting, self._names = engine, sampling, waiting, count()
        self.choices = sampling.n
        """Answers to each prompt."""
        self.first_seconds: float | None = None
        """To the first token of the first answer."""

    def answer(self, prompt: tuple[int, ...], show: Callable[[Piece], None] = lambda piece: None) -> list[Answer]:
        """All answers to one prompt; Ctrl-C ends them where they are. show: called with each piece. Raises Refused."""
        with interrupts() as interrupted:
            (answers,) = self._run([prompt], show, interrupted)
        return answers

    def all_answers(self, prompts: Iterable[tuple[int, ...]]) -> Iterator[list[Answer]]:
        """The answers to many prompts, in their order. Raises Refused."""
        return self._run(prompts, lambda piece: None, lambda: False)

    def _run(
        self, prompts: Iterable[tuple[int, ...]], show: Callable[[Piece], None], interrupted: Callable[[], bool]
    ) -> Iterator[list[Answer]]:
        prompts, running, started = iter(prompts), deque[tuple[str, list[Answer]]](), time.monotonic()

        def deliver(answers: list[Answer], piece: Piece) -> None:
            if self.first_seconds is None:
                self.first_seconds = time.monotonic() - started
            answers[piece.choice].add(piece)
            show(piece)

        more = True
        while more or running:
            while more and len(running) < self._waiting:
                prompt = next(prompts, None)
                more = prompt is not None
                if prompt is not None:
                    name, answers = str(next(self._names)), [Answer() for _ in range(self._sampling.n)]
                    deliver_to = partial(deliver, answers)
                    request = Request(identifier=name, prompt=prompt, sampling=self._sampling, deliver=deliver_to)
                    self._engine.submit(request)
                    running.append((name, answers))
            if interrupted():
                for name, _ in running:
                    self._engine.cancel(name)
            self._engine.step()
            while running and all(answer.finish for answer in running[0][1]):
                yield running.popleft()[1]


@contextmanager
def interrupts() -> Generator[Callable[[], bool]]:
    """Ctrl-C is told to who asks, once; it does not break into a step, which would lose the cache."""
    told = list[bool]()
    before = signal.signal(signal.SIGINT, lambda *_: told.append(True))

    def asked() -> bool:
        was = bool(told)
        told.clear()
        return was

    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


class Screen:
    """Writes an answer as it comes: at a terminal with control characters escaped, elsewhere as it is."""

    def __init__(self, stream: TextIO | None = None):
        """stream: None: the standard output."""
        self._stream = sys.stdout if stream is None else stream
        self._safe = self._stream.isatty()

    def write(self, text: str) -> None:
        """Show text at once."""
        self._stream.write(visible(text) if self._safe else text.encode(errors="replace").decode())
        self._stream.flush()


def print_answers(asking: Asking, prompt: tuple[int, ...], screen: Screen) -> list[Answer]:
    """Answers to one prompt: a single one as it comes, several one after another when they are complete."""
    single = asking.choices == 1
    answers = asking.answer(prompt, (lambda piece: screen.write(piece.text)) if single else lambda piece: None)
    for number, answer in enumerate(answers if not single else (), start=1):
        screen.write(f"[{number}] {answer.text}\n")
    if single:
        screen.write("\n")
    return answers


class Chat:
    """A conversation at a terminal: reads lines, and writes answers as they come."""

    def __init__(self, asking: Asking, conversation: Conversation, screen: Screen, *, live: bool):
        """live: a person types."""
        self._asking, self._conversation, self._screen, self._live = asking, conversation, screen, live
        self.messages: list[dict[str, str]] = []

    def run(self, read: Callable[[str], str] = input) -> None:
        """Until the lines end, or /exit. read: shows a text and gives a line, or raises EOFError."""
        if self._live:
            self._screen.write(f"{HELP}. Ctrl-C stops an answer.\n")
        while True:
            try:
                line = read("> " if self._live else "").strip()
            except EOFError:
                self._screen.write("\n" * self._live)
                return
            except KeyboardInterrupt:
                self._screen.write("\n(Ctrl-D ends)\n")
                continue
            if line == "/exit":
                return
            if line.startswith("/"):
                self._screen.write(self._command(line))
            elif line:
                self._turn(line)

    def _command(self, line: str) -> str:
        name, _, text = line.partition(" ")
        match name:
            case "/reset":
                self.messages = [message for message in self.messages if message["role"] == "system"]
                return "(the conversation is forgotten)\n"
            case "/system":
                others = [message for message in self.messages if message["role"] != "system"]
                self.messages = [{"role": "system", "content": text.strip()}] * bool(text.strip()) + others
                return "(the system message is set)\n" if text.strip() else "(no system message)\n"
            case _:
                return f"(there is no {name}: {HELP})\n"

    def _turn(self, line: str) -> None:
        """A question and its answer, which are part of the conversation afterwards, unless it cannot be answered."""
        asked = [*self.messages, {"role": "user", "content": line}]
        try:
            prompt = tuple(self._conversation.encode(asked))
            answer = self._asking.answer(prompt, lambda piece: self._screen.write(piece.text * (piece.choice == 0)))[0]
        except (TemplateMisfit, Refused) as error:
            self._screen.write(f"({error})\n")
            return
        notes = {"cancelled": " (stopped)", "length": " (cut off: --max-tokens)", "error": " (not a number)"}
        self._screen.write(notes.get(answer.finish or "", "") + "\n")
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
