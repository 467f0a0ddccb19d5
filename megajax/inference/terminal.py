"""Text generation at a terminal: answers to prompts, and conversations. The engine runs on the caller's thread."""

import hashlib
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import TextIO

from megajax.config.errors import UserError
from megajax.display.text import visible
from megajax.inference.config import ImageFit
from megajax.inference.engine import Engine
from megajax.inference.images import ImageReader
from megajax.inference.prompt_and_answer_files import Prompt, demand_conversation, encode, write_answers
from megajax.inference.request import Output, PromptImage, RefusedRequest, Request
from megajax.inference.sampling_settings import Sampling
from megajax.inference.worker import complete
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.chat_template import TemplateMisfit
from megajax.tokenizers.conversation import Conversation

type PromptAndSampling = tuple[tuple[int, ...], Sampling]
HELP = "/reset forgets the conversation, /system TEXT sets a system message, /exit or Ctrl-D ends"
MARKER = "<image>"
"""The place of an image in --prompt."""
PIXELS = 50_000_000
"""Maximum number of pixels of an image, as in training."""
NOTES = {"cancelled": " (stopped)", "length": " (cut off: raise --max-tokens)", "error": " (logits are not finite)"}
"""Finish -> note printed after an answer of a conversation."""


@contextmanager
def interrupts() -> Generator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C was pressed since its last call. A KeyboardInterrupt within a step
    of the engine would lose the cache."""
    pressed = list[bool]()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))

    def interrupted() -> bool:
        was = bool(pressed)
        pressed.clear()
        return was

    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class Screen:
    """Prints text immediately; control characters are escaped at a terminal."""

    def __init__(self, stream: TextIO | None = None):
        """stream: None for standard output."""
        self._stream = sys.stdout if stream is None else stream
        self._safe = self._stream.isatty()

    def write(self, text: str) -> None:
        """Print text and flush."""
        if text:
            self._stream.write(visible(text) if self._safe else text.encode(errors="replace").decode())
            self._stream.flush()


class Session:
    """The actions of `python -m megajax.generate` with a loaded model."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        conversation: Conversation | None,
        sampling: Sampling,
        where: str,
        screen: Screen | None = None,
    ):
        """conversation: None without a chat template; where: path of the weights."""
        self._engine, self._tokenizer, self._conversation = engine, tokenizer, conversation
        self._sampling, self._where, self._screen = sampling, where, screen or Screen()
        self._suffix = tokenizer.suffix if engine.admission.answer_start else ()
        self._started = time.monotonic()
        self._first_seconds: float | None = None

    def answer(self, text: str, files: Sequence[Path] = (), image_fit: ImageFit = "crop") -> None:
        """Print the answers to a prompt: a single answer while it is generated, several when all are complete.

        files: of images, which take the places of MARKER in the text, or come before it. Raises UserError.
        """
        prompt, single = encode(Prompt("--prompt", text), self._tokenizer, None, self._suffix), self._sampling.n == 1
        images: tuple[PromptImage, ...] = ()
        if files:
            prompt, images = self._with_images(text, files, image_fit)
        answers = self.answers(prompt, self._sampling, lambda output: self._screen.write(output.text * single), images)
        self._screen.write("\n" if single else "".join(f"[{n}] {answer.text}\n" for n, answer in enumerate(answers, 1)))

    def _with_images(
        self, text: str, files: Sequence[Path], image_fit: ImageFit
    ) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        images = self._engine.device.images
        if images is None:
            raise UserError("--image: the model reads text alone")
        reader, pictures = ImageReader(images, image_fit, PIXELS), []
        for path in files:
            try:
                pictures.append(reader.read(path.read_bytes()))
            except OSError as error:
                raise UserError(f"--image={path}: cannot be read: {error.strerror or error}") from error
            except UserError as error:
                raise UserError(f"--image={path}: {error}") from error
        pieces = text.split(MARKER) if MARKER in text else [*[""] * len(files), text]
        tokens = list(self._tokenizer.prefix)
        for number, piece in enumerate(pieces):
            tokens += [*[images.token] * (number > 0), *(self._tokenizer.encode(piece).tolist() if piece else [])]
        prompt, placed = reader.place(tokens, pictures)
        return tuple(prompt), placed

    def answer_all(
        self, prompts: Sequence[Prompt], output: Path | None, progress: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        """Write the answers to many prompts, in order. output: a .jsonl file; None to print the texts.

        progress: called with the number of completed prompts and the number of all prompts. Raises UserError.
        """
        requests = self.requests(prompts)
        answers = lambda first: self.complete(requests[first:])  # noqa: E731
        write_answers(output, self._sampling.n, self.keys(requests), answers, self._screen.write, progress)

    def requests(self, prompts: Sequence[Prompt]) -> list[PromptAndSampling]:
        """The tokens of prompts and their settings. Raises UserError for a prompt that cannot be answered."""
        encoded = [encode(prompt, self._tokenizer, self._conversation, self._suffix) for prompt in prompts]
        chat = None if self._conversation is None else self.of_chat()
        requests = [
            (tokens, chat if chat is not None and prompt.is_conversation else self._sampling)
            for tokens, prompt in zip(encoded, prompts, strict=True)
        ]
        for prompt, (tokens, sampling) in zip(prompts, requests, strict=True):
            try:  # before anything is generated or written
                self._engine.check(
                    Request(identifier="check", prompt=tokens, sampling=sampling, deliver=lambda output: None)
                )
            except RefusedRequest as refusal:
                raise UserError(f"{prompt.where}: {refusal.message}") from None
        return requests

    def complete(self, requests: Sequence[PromptAndSampling]) -> Iterator[list[Output]]:
        """The answers to requests, in order."""
        return complete(self._engine, requests, self._timed)

    def keys(self, requests: Sequence[PromptAndSampling]) -> list[str]:
        """Digests of everything that the answers to requests depend on."""
        texts = (repr((prompt, astuple(sampling), self._where)) for prompt, sampling in requests)
        return [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]

    def chat(self, read_line: Callable[[str], str], *, live: bool) -> None:
        """Run a conversation. read_line: prints a prompt and returns a line, or raises EOFError; live: interactive."""
        Chat(self, demand_conversation(self._conversation, "--chat"), self._screen, live).run(read_line)

    def answers(
        self,
        prompt: tuple[int, ...],
        sampling: Sampling,
        show: Callable[[Output], None],
        images: tuple[PromptImage, ...] = (),
    ) -> list[Output]:
        """All answers to a prompt; Ctrl-C stops them. show: called with each output. Raises RefusedRequest."""

        def show_output(output: Output) -> None:
            self._timed(output)
            show(output)

        with interrupts() as interrupted:
            (answers,) = complete(self._engine, [(prompt, sampling)], show_output, interrupted, images)
        return answers

    def of_chat(self) -> Sampling:
        """The settings of an answer in a conversation: the template's ends of a message are stop strings too."""
        conversation = demand_conversation(self._conversation, "--chat")
        return replace(self._sampling, stop=tuple(dict.fromkeys((*self._sampling.stop, *conversation.stop_texts()))))

    def statistics(self) -> str:
        """Lines with the counts since the model was loaded."""
        counts, seconds = self._engine.statistics(), time.monotonic() - self._started
        first = self._first_seconds
        drafts = f"{counts.accepted_tokens_total:,} of {counts.drafted_tokens_total:,} drafted tokens accepted\n"
        drafts = drafts if self._engine.device.drafts else ""
        first = "" if first is None else f", the first token after {first:.2f} s"
        return (
            f"{self._where}: {counts.tokens_total:,} tokens of answers in {seconds:.1f} s with compilation{first}\n"
            f"{counts.prompt_tokens_total:,} tokens of prompts computed, {counts.shared_tokens_total:,} taken from the "
            f"cache, {counts.preemptions_total:,} preemptions\n"
            f"{drafts}{counts.steps_total:,} steps: {counts.device_seconds_total:.2f} s on the device, "
            f"{counts.scheduler_seconds_total:.2f} s of scheduling and text"
        )

    def _timed(self, output: Output) -> None:
        """Measure the time to the first output."""
        del output
        if self._first_seconds is None:
            self._first_seconds = time.monotonic() - self._started


class Chat:
    """A conversation: reads lines, and prints answers while they are generated."""

    def __init__(self, session: Session, conversation: Conversation, screen: Screen, live: bool):
        """live: whether a person types."""
        self._session, self._conversation, self._screen, self._live = session, conversation, screen, live
        self.messages: list[dict[str, str]] = []

    def run(self, read_line: Callable[[str], str]) -> None:
        """Run until the end of the lines or /exit."""
        self._screen.write(f"{HELP}. Ctrl-C stops an answer.\n" * self._live)
        while True:
            try:
                line = read_line("> " if self._live else "").strip()
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
        system = [message for message in self.messages if message["role"] == "system"]
        if name == "/reset":
            self.messages = system
            return "(the conversation is forgotten)\n"
        if name == "/system":
            text = text.strip()
            self.messages = [{"role": "system", "content": text}] * bool(text) + self.messages[len(system) :]
            return "(the system message is set)\n" if text else "(no system message)\n"
        return f"(there is no {name}: {HELP})\n"

    def _turn(self, line: str) -> None:
        """Answer a question, and add both to the conversation, unless the template or the engine rejects it."""
        messages = [*self.messages, {"role": "user", "content": line}]
        try:
            prompt = tuple(self._conversation.encode(messages))
            sampling = self._session.of_chat()
            (answer,) = self._session.answers(prompt, sampling, lambda output: self._screen.write(output.text))
        except (TemplateMisfit, RefusedRequest) as error:
            self._screen.write(f"({error})\n")
            return
        self._screen.write(NOTES.get(answer.finish or "", "") + "\n")
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
