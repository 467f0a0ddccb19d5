"""The parts of a chat's answer, found while its text arrives: content, reasoning, and calls of tools.

An answer goes through stages. Each takes text as it arrives and returns the parts that no later text can change; a
later stage sees the content of earlier ones.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from megajax.config.read_limits import Json
from megajax.inference.detokenizer import overlap

type Kind = Literal["content", "reasoning", "call"]

STRING = r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)'
"""A string of JSON, for `mark_outside`."""
THINK, THOUGHT = "<think>", "</think>"
"""The texts around reasoning, as models write them."""


class Part(NamedTuple):
    """A part of an answer."""

    kind: Kind
    text: str
    """Of a call: its arguments as JSON."""
    name: str = ""
    """Name of the tool of a call."""


class AnswerStage(Protocol):
    """Finds parts in a text."""

    def add(self, text: str) -> list[Part]:
        """More text -> parts that are certain."""
        ...

    def end(self) -> list[Part]:
        """The rest, when no text follows."""
        ...


class AnswerParts:
    """The parts of one answer."""

    def __init__(self, stages: Sequence[AnswerStage]):
        self._stages = stages

    def add(self, text: str, *, last: bool) -> list[Part]:
        """More text -> parts; last: whether no text follows."""
        parts = [Part("content", text)]
        for stage in self._stages:
            passed = [piece for part in parts for piece in (stage.add(part.text) if part.kind == "content" else [part])]
            parts = passed + (stage.end() if last else [])
        return [part for part in parts if part.text or part.kind == "call"]


class Reasoning:
    """Splits off the text between <think> and </think> at the start of an answer."""

    def __init__(self, *, inside: bool):
        """inside: whether the prompt ends with <think>."""
        self._kind: Kind | None = "reasoning" if inside else None
        self._text, self._trims = "", True

    def add(self, text: str) -> list[Part]:
        self._text += text
        if self._kind is None:
            start = self._text.lstrip()
            if THINK.startswith(start):
                return []
            thinks = start.startswith(THINK)
            # Content without reasoning keeps its whitespace, such as the indentation of code.
            self._kind, self._trims = "reasoning" if thinks else "content", thinks
            self._text = start.removeprefix(THINK) if thinks else self._text
        if self._trims:
            self._text = self._text.lstrip()
        if self._kind == "content":
            return self._take(len(self._text))
        at = self._text.find(THOUGHT)
        if at < 0:
            return self._take(len(self._text) - overlap(self._text, THOUGHT))
        thought, self._kind = self._take(at), "content"
        self._text, self._trims = self._text.removeprefix(THOUGHT), True
        return thought + self.add("")

    def end(self) -> list[Part]:
        return self._take(len(self._text))

    def _take(self, count: int) -> list[Part]:
        part = Part(self._kind or "content", self._text[:count])
        self._text = self._text[count:]
        self._trims = self._trims and not part.text
        return [part]


class Calls:
    """Finds calls between two texts, or from the first one to the end of the answer."""

    def __init__(
        self,
        opening: str,
        closing: str,
        *,
        most: int | None,
        bare: bool = False,
        read: Callable[[str], list[Part]] | None = None,
        within: str = STRING,
    ):
        """closing: "" for the end of the answer. bare: whether an answer that begins with { is a call without opening.

        most: maximum number of calls; further ones are left out. read: the calls in a text between both, as `calls_of`
        with the opening, which is the default. within: as in `mark_outside`, for the closing.
        """
        self._opening, self._closing, self._bare, self._most = opening, closing, bare, most
        self._within = within
        self._read = read or partial(calls_of, opening=opening)
        self._text, self._inside, self._trims, self._calls = "", False, False, 0
        self._before = ""
        """Whitespace and the opening before the text inside; they belong to the content if it is no call."""

    def add(self, text: str) -> list[Part]:
        self._text += text
        if self._bare and self._text.strip():
            # Only the start of an answer may be a call without the opening.
            self._bare = False
            self._inside = self._text.lstrip().startswith("{")
        return self._inner() if self._inside else self._outer()

    def _outer(self) -> list[Part]:
        if self._trims:
            self._text = self._text.lstrip()
            self._trims = not self._text
        at = self._text.find(self._opening)
        if at >= 0:
            # Whitespace before a call separates it from the content.
            content, self._inside = self._text[:at].rstrip(), True
            self._before = self._text[len(content) : at + len(self._opening)]
            self._text = self._text[at + len(self._opening) :]
            return [Part("content", content), *self._inner()]
        count = len(self._text) - overlap(self._text, self._opening)
        count = len(self._text[:count].rstrip())
        part, self._text = Part("content", self._text[:count]), self._text[count:]
        return [part]

    def _inner(self) -> list[Part]:
        at, _ = mark_outside(self._text, [self._closing], self._within) if self._closing else (-1, "")
        if at < 0:
            return []
        inner, self._text = self._text[:at], self._text[at + len(self._closing) :]
        calls = self._calls_of(inner)
        self._inside, self._trims = False, calls is not None
        as_text = Part("content", f"{self._before}{inner}{self._closing}")
        return [*([as_text] if calls is None else calls), *self._outer()]

    def end(self) -> list[Part]:
        text, self._text = self._text, ""
        if not self._inside:
            return [Part("content", text if not self._calls else text.rstrip())]
        if (calls := self._calls_of(text)) is None and self._closing:
            # A value without its end hides the closing.
            inner, _, after = text.rpartition(self._closing)
            if (calls := self._calls_of(inner)) is not None:
                calls = [*calls, Part("content", after.strip())]
        return [Part("content", self._before + text)] if calls is None else calls

    def _calls_of(self, text: str) -> list[Part] | None:
        """The calls in a text, up to the maximum; None if it is no call."""
        calls = self._read(text)
        left = len(calls) if self._most is None else max(0, self._most - self._calls)
        self._calls += len(calls)
        return calls[:left] if calls else None


def mark_outside(text: str, marks: Sequence[str], within: str = STRING) -> tuple[int, str]:
    """The place of the first of some marks that does not stand within a value, and which it is; -1 and "" without one.

    within: a regular expression of a value, whole or cut off at the end of the text.
    """
    if any(mark in text for mark in marks):
        for match in re.finditer(f"{within}|({'|'.join(map(re.escape, marks))})", text, re.DOTALL):
            if match[1]:
                return match.start(), match[1]
    return -1, ""


class WholeCalls:
    """The calls of an answer that a guide made: a list of them, or the arguments of the tool `name`."""

    def __init__(self, name: str | None):
        self._name, self._text = name, ""

    def add(self, text: str) -> list[Part]:
        self._text += text
        return []

    def end(self) -> list[Part]:
        if self._name is not None:
            whole = isinstance(json_of(self._text), dict)
            return [Part("call", self._text, self._name) if whole else Part("content", self._text)]
        return calls_of(self._text) or [Part("content", self._text)]


def calls_of(text: str, opening: str = "") -> list[Part]:
    """The calls in a text of JSON objects, or a list of them, each with `name` and `arguments` or `parameters`.

    Empty if anything in it is no call. opening: a text that may stand before each of them.
    """
    values: list[Any] = []
    decoder, at = json.JSONDecoder(), 0
    while (at := _blanks(text, at, opening)) < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        values += value if isinstance(value, list) else [value]
    calls = [_call(value) for value in values]
    return [call for call in calls if call is not None] if all(calls) else []


def _blanks(text: str, at: int, opening: str) -> int:
    """The place after whitespace and what models write between two calls."""
    match = re.compile(rf"(?:[\s;,]|{re.escape(opening)})*").match(text, at)
    return match.end() if match else at


def _call(value: Json) -> Part | None:
    if not isinstance(value, dict):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return call_of(value.get("name"), json_of(arguments) if isinstance(arguments, str) else arguments)


def call_of(name: Json, arguments: Json) -> Part | None:
    """A call; None if the name is no text, or the arguments are no object."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        return Part("call", json.dumps(arguments, ensure_ascii=False, allow_nan=False), name)
    except ValueError:
        return None


def json_of(text: str) -> Any:
    """The value of JSON; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
