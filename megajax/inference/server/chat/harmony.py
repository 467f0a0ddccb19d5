"""The answers of gpt-oss: messages with channels, in OpenAI's format harmony.

An answer goes on after `<|start|>assistant`. Each of its messages is a header, `<|message|>`, a text, and the name of a
token that ends it. The channel of a header is analysis (reasoning), commentary or final; a header with a recipient
`to=functions.NAME` makes the text the arguments of a call.
"""

import re

from megajax.inference.detokenizer import overlap
from megajax.inference.server.chat.answer_parts import Kind, Part, call_of, json_of

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
"""The names of tokens that end the text of a message; the last one begins another message."""


class Harmony:
    """Finds reasoning, calls and content."""

    def __init__(self, *, most: int | None, inside: bool = False, analysis: Kind = "reasoning"):
        """most: maximum number of calls; further ones are left out. inside: whether the prompt ends within the text of
        an answer. analysis: what the channel analysis becomes."""
        self._most, self._analysis, self._text, self._name, self._calls = most, analysis, "", "", 0
        self._kind: Kind | None = "content" if inside else None

    def add(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        while (pieces := self._next()) is not None:
            parts += pieces
        return parts

    def _next(self) -> list[Part] | None:
        """The parts up to the next border between headers and texts; None if the rest has to wait for more text."""
        if self._kind is None:
            header, message, rest = self._text.partition(MESSAGE)
            if not message:
                return None
            recipient = re.search(r"\bto=(?:functions\.)?([^\s<]+)", header)
            self._name, self._text = recipient[1] if recipient else "", rest
            channel = header.partition(CHANNEL)[2]
            self._kind = "call" if recipient else self._analysis if channel.startswith("analysis") else "content"
            return []
        at, end = min(((place, end) for end in ENDS if (place := self._text.find(end)) >= 0), default=(-1, ""))
        if at < 0:
            count = len(self._text) - max(overlap(self._text, end) for end in ENDS)
            if self._kind == "call" or not count:
                return None
            part, self._text = Part(self._kind, self._text[:count]), self._text[count:]
            return [part]
        text, self._text = self._text[:at], self._text[at + len(end) :]
        return self._close(text)

    def _close(self, text: str) -> list[Part]:
        """The end of a message."""
        kind, self._kind = self._kind or "content", None
        if kind != "call":
            return [Part(kind, text)]
        call = call_of(self._name, json_of(text or "{}"))
        if call is None:
            return [Part("content", text)]
        self._calls += 1
        return [call] if self._most is None or self._calls <= self._most else []

    def end(self) -> list[Part]:
        text, self._text = self._text, ""
        if self._kind is not None:
            return self._close(text)
        # A header that was cut off has no text; an answer without headers is one.
        return [] if text.lstrip().startswith(("<|", "to=", "assistant")) else [Part("content", text)]
