"""Tokenized conversations from JSON lines: the tokens of answers, and the skipped lines with reasons."""

import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from megajax.config.errors import UserError
from megajax.config.read_limits import Budget, json_fault, too_many_values, without_mark
from megajax.data.preprocessing.text_files import open_text
from megajax.data.preprocessing.text_formats import LIMITS, read_line
from megajax.storage.index_cache import Arrays, content_digest, content_key, load_or_build
from megajax.storage.local_copies import local_file
from megajax.tokenizers.base import Tokenizer, end_tokens_of
from megajax.tokenizers.chat_template import ChatTemplate, TemplateMisfit, TextPiece, weight_of
from megajax.tokenizers.conversation import Conversation, UnknownRole, template_message

REASONS = ("not a conversation", "unknown role", "no answer", "refused by the template")
"""Reasons to skip a line with conversations."""
WEIGHTS = (1e-6, 1e6)
"""Least and largest nonzero weight of a message: sums and quotients of such weights are finite in float32."""

type Message = dict[str, Any]
type Document = tuple[np.ndarray, np.ndarray]
"""Tokens, int32 [n], and their weights in the loss, float32 [n]."""


class BadLine(Exception):
    """A line without a conversation to train on. reason: one of `ConversationReader.reasons`."""

    def __init__(self, reason: str, problem: str):
        self.reason = reason
        super().__init__(problem)


class Conversations(NamedTuple):
    """Tokenized conversations of files, one after the other."""

    tokens: np.ndarray
    """int32 [T]."""
    weights: np.ndarray
    """float32 [T], weight of each token in the loss; 0 for tokens without loss."""
    starts: np.ndarray
    """int64 [N + 1], first token of each conversation, then T."""
    lines: np.ndarray
    """int64 [L + 1], first conversation of each used line, then N."""
    places: np.ndarray
    """int64 [L, 2], file and line number from 1."""
    skipped: np.ndarray
    """int64 [R], number of skipped lines for each of `ConversationReader.reasons`."""
    named: np.ndarray
    """int64 [1], number of conversations whose messages contain names of special tokens as ordinary text."""
    files: tuple[Path, ...] = ()
    """The cache files of the arrays."""
    identity: str = ""
    """Digest of the files and of all that their tokens depend on."""

    def line_lengths(self, multiple: int) -> np.ndarray:
        """Tokens of each line with conversations padded to a multiple, int64 [L]."""
        sizes = -(-np.diff(self.starts) // multiple) * multiple
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        return np.diff(bounds[self.lines])

    def line_weighs(self, multiple: int, length: int, masked: int | None) -> np.ndarray:
        """Whether each line, with conversations padded to a multiple and cut to `length`, has a loss, bool [L].

        The first token of a conversation is not a label. masked: a token without loss.
        """
        padded = -(-np.diff(self.starts) // multiple) * multiple
        bounds = np.concatenate([[0], np.cumsum(padded)])
        before = bounds[:-1] - np.repeat(bounds[self.lines[:-1]], np.diff(self.lines))
        first = self.starts[:-1]
        room = np.clip(length - before, 0, np.diff(self.starts))
        labels = self.weights > 0 if masked is None else (self.weights > 0) & (self.tokens != masked)
        counts = np.concatenate([[0], np.cumsum(labels)])
        weighs = counts[first + room] > counts[np.minimum(first + 1, first + room)]
        return np.logical_or.reduceat(weighs, self.lines[:-1])


def json_object(line: bytes) -> dict[str, Any]:
    """The object of a line. Raises BadLine."""
    if problem := too_many_values(line):
        raise BadLine(REASONS[0], problem)
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine(REASONS[0], f"not valid JSON ({json_fault(error)}); each line must be one object") from error
    if not isinstance(record, dict):
        raise BadLine(REASONS[0], f"a JSON {type(record).__name__}, not an object")
    return record


def conversations_of(
    record: Mapping[str, Any], *, demand_answers: bool, cut_at_system: bool = False
) -> list[list[Message]]:
    """The conversations of a line's object: one, or with `cut_at_system` one from each system message on.

    Raises:
        BadLine: no messages, an unknown role, or with `demand_answers` no answer.
    """
    messages = record.get("messages", record.get("conversations"))
    if not isinstance(messages, list) or not messages:
        keys = ", ".join(map(repr, record)) or "none"
        raise BadLine(REASONS[0], f"no list of messages under 'messages' or 'conversations'; the keys are {keys}")
    conversations: list[list[Message]] = []
    for number, message in enumerate(messages, 1):
        normalized = normalized_message(message, number)
        if not conversations or (cut_at_system and normalized["role"] == "system"):
            conversations.append([])
        conversations[-1].append(normalized)
    for conversation in conversations if demand_answers else ():
        answers = [message for message in conversation if message["role"] == "assistant"]
        if not answers:
            roles = ", ".join(message["role"] for message in conversation)
            raise BadLine(REASONS[2], f"a conversation without a message of the assistant (its roles: {roles})")
        if any(not answer["content"] and not answer.get("tool_calls") for answer in answers):
            raise BadLine(REASONS[2], "an empty message of the assistant")
    return conversations


def normalized_message(message: Any, number: int) -> Message:
    """A message with role and content, whatever their keys were. number: its place from 1. Raises BadLine."""
    try:
        normalized = template_message(message, f"message {number}")
    except ValueError as error:
        raise BadLine(REASONS[isinstance(error, UnknownRole)], str(error)) from error
    if not isinstance(normalized["content"], str):
        raise BadLine(REASONS[0], f"the content of message {number} is a list with parts other than text")
    weight, (least, most) = message.get("weight", 1), WEIGHTS
    if not isinstance(weight, int | float) or not (weight == 0 or least <= weight <= most):
        text = repr(weight) if len(repr(weight)) <= 40 else f"{repr(weight)[:40]}…"
        raise BadLine(REASONS[0], f"the weight of message {number} is {text}, not 0 or {least:g} to {most:g}")
    return normalized


class ConversationReader:
    """Reads files of conversations.

    Args:
        template: renders conversations as text.
        tokenizer: tokenizes the text.
        names_are_text, next_marker: see `Conversation` and its `tokenize`.
        cut_at_system: see `conversations_of`.
        loss: tokens with a loss: of answers, or all.
        end_token: whether the end-of-document token is appended if missing, or only the template's text is used.
        on_error: whether a bad line stops the run or is skipped.
        folder: of the cache.

    Attributes:
        kind: what the lines are, for the key of the cache.
        reasons: reasons to skip a line.
        example: a line, for messages.
    """

    kind: ClassVar[str] = "conversations by spans of tokens"
    reasons: ClassVar[tuple[str, ...]] = REASONS
    example: ClassVar[str] = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        loss: Literal["answers", "all"],
        end_token: Literal["append", "template"],
        on_error: Literal["stop", "skip"],
        folder: Path,
        names_are_text: bool = True,
        next_marker: bool = True,
        cut_at_system: bool = False,
    ):
        self._template, self._tokenizer, self._folder = template, tokenizer, folder
        self._loss, self._end_token, self._on_error = loss, end_token, on_error
        self._conversation = Conversation(template, tokenizer, names_are_text=names_are_text)
        self._next_marker, self._cut_at_system, self._named = next_marker, cut_at_system, 0
        self._settings = {
            "names_are_text": names_are_text,
            "cut_at_system": cut_at_system,
            "ends": sorted(end_tokens_of(tokenizer)) if next_marker else None,
        }

    def read(self, paths: Sequence[str]) -> Conversations:
        """The conversations of files, from the cache if it has them.

        Raises:
            UserError: a file that cannot be read; a bad line, with file and number; or no usable line at all.
        """
        description = {
            "kind": self.kind,
            "files": [_digest(self._folder, path, self.example) for path in paths],
            "template": self._template.identity,
            "tokenizer": self._tokenizer.identity,
            "loss": self._loss,
            "end_token": self._end_token,
            "on_error": self._on_error,
            **self._settings,
        }
        arrays = load_or_build(self._folder, description, lambda _: self._build(paths))
        conversations = Conversations(**arrays, files=arrays.files, identity=content_key(description))
        if named := int(conversations.named[0]):
            warnings.warn(
                f"{', '.join(paths)}: messages of {named:,} conversations contain names of special tokens, which are "
                "ordinary text there. If they should be these tokens, set data.special_tokens=tokens.",
                stacklevel=2,
            )
        if len(conversations.lines) == 1:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.skipped_lines(conversations).items())
            skipped = f"; skipped lines: {reasons}" if reasons else ""
            raise UserError(f"{', '.join(paths)}: no line with a conversation{skipped}.")
        return conversations

    def _build(self, paths: Sequence[str]) -> Arrays:
        tokens, weights, sizes = [np.empty(0, np.int32)], [np.empty(0, np.float32)], [0]
        lines, places, skipped, self._named = [0], [], Counter[str](), 0
        for file, path in enumerate(paths):
            for number, line in _lines(path):
                try:
                    conversations = self.documents(json_object(line))
                except BadLine as error:
                    if self._on_error == "stop":
                        hint = "Fix the line, or skip such lines with data.on_error=skip."
                        raise UserError(f"{path}, line {number}: {error}. {hint}") from error
                    skipped[error.reason] += 1
                    continue
                for ids, counts in conversations:
                    tokens.append(ids)
                    weights.append(counts)
                    sizes.append(len(ids))
                lines.append(len(sizes) - 1)
                places.append((file, number))
        return {
            "tokens": np.concatenate(tokens),
            "weights": np.concatenate(weights),
            "starts": np.cumsum(sizes, dtype=np.int64),
            "lines": np.array(lines, np.int64),
            "places": np.array(places, np.int64).reshape(-1, 2),
            "skipped": np.array([skipped[reason] for reason in self.reasons], np.int64),
            "named": np.array([self._named], np.int64),
        }

    def skipped_lines(self, conversations: Conversations) -> Mapping[str, int]:
        """Reason -> number of skipped lines, if any."""
        counts = zip(self.reasons, conversations.skipped.tolist(), strict=True)
        return {reason: count for reason, count in counts if count}

    def documents(self, record: Mapping[str, Any]) -> list[Document]:
        """The documents of a line's object, here its conversations. Raises BadLine."""
        conversations = conversations_of(
            record, demand_answers=self._loss == "answers", cut_at_system=self._cut_at_system
        )
        return [self.conversation(messages, record.get("tools")) for messages in conversations]

    def conversation(self, messages: Sequence[Message], tools: object) -> Document:
        """The tokens of messages. Raises BadLine for messages that the template refuses."""
        more, conversation = {} if tools is None else {"tools": tools}, self._conversation
        try:
            parts = conversation.parts(messages, more, answers=self._loss == "answers")
        except TemplateMisfit as error:
            raise BadLine(REASONS[3], str(error)) from error
        self._named += conversation.texts.has_names(messages)
        last = messages[-1]
        learns_end = self._loss == "all" or last["role"] == "assistant"
        return self.ended(parts, weight_of(last) * learns_end if self._loss == "answers" else 1)

    def ended(self, parts: Sequence[TextPiece], weight: float) -> Document:
        """The tokens of a text, with an end token of this weight if the setting asks for one."""
        ids, weights = self._conversation.texts.tokenize(parts, next_marker=self._next_marker)
        if self._end_token == "append" and (not len(ids) or ids[-1] != self._tokenizer.eod):
            ids, weights = np.append(ids, np.int32(self._tokenizer.eod)), np.append(weights, np.float32(weight))
        return ids, weights


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, numbered from 1."""
    with open_text(str(local_file(path))) as (stream, _):
        for number, line in enumerate(iter(lambda: read_line(stream, Budget(path, LIMITS)), b""), 1):
            text = without_mark(line, path) if number == 1 else line
            if text.strip():
                yield number, text


def _digest(folder: Path, path: str, example: str) -> str:
    """SHA-256 of a file. Raises UserError, with an example of a line, if it cannot be read."""
    file = local_file(path)
    try:
        file.open("rb").close()
    except OSError as error:
        raise UserError(
            f"data: {path} cannot be read: {error.strerror} (looked for in {Path.cwd()}). It must be a file of JSON "
            f"lines such as {example}"
        ) from error
    return content_digest(folder, file).hex()
