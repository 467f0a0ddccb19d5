"""Text of tokens as they come: whole characters only, and nothing of a stop string."""

from codecs import getincrementaldecoder
from collections.abc import Collection, Sequence
from typing import Protocol

from megajax.tokenizers.base import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Of bytes that are not UTF-8, or not yet."""
TAIL, WINDOW = 12, 24
"""Tokens of a prompt that are decoded before an answer, and after how many a window is cut."""


class Decoding(Protocol):
    """Text of one answer: joined, what `add` and `rest` return is the answer's part of the text of all tokens."""

    def add(self, token: int) -> str:
        """Text that no later token can change."""
        ...

    def rest(self) -> str:
        """What was kept back."""
        ...


class ByteDecoding:
    """For tokenizers whose tokens are bytes."""

    def __init__(self, table: Sequence[bytes | None], prompt: Sequence[int]):
        """table: bytes of each id, None for gaps."""
        self._table, self._decoder = table, getincrementaldecoder("utf-8")("replace")
        # A character that the prompt begins may be completed by the answer.
        for token in prompt[-TAIL:]:
            self.add(token)

    def add(self, token: int) -> str:
        return self._decoder.decode(self._table[token] or b"")

    def rest(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDecoding:
    """For any tokenizer: decodes a window of the last tokens, and returns what was added at its end.

    The window begins in the prompt, and always has visible text that was returned: what a tokenizer does at the
    beginning of a text, such as dropping a space, it does to that.
    """

    def __init__(self, tokenizer: Tokenizer, single_bytes: Collection[int], prompt: Sequence[int]):
        """single_bytes: ids of tokens that are one byte each."""
        self._tokenizer, self._bytes = tokenizer, single_bytes
        count = TAIL
        self._window = list(prompt[-count:])
        while not self._decoded().strip() and count < len(prompt):
            count *= 4
            self._window = list(prompt[-count:])
        self._sent = len(self._decoded().rstrip(REPLACEMENT))
        self._part = 0

    def add(self, token: int) -> str:
        self._window.append(token)
        # Some tokenizers replace a whole run of bytes if one of them is wrong.
        if token in self._bytes:
            return ""
        text = self._decoded()
        if len(text) <= self._sent or text.endswith(REPLACEMENT):
            return ""
        new, self._sent = text[self._sent :], len(text)
        if len(self._window) > WINDOW and new.strip():
            self._window = self._window[self._part :]
            self._sent = len(self._decoded())
        # Where the tokens of the next text begin.
        self._part = len(self._window)
        return new

    def rest(self) -> str:
        text = self._decoded()[self._sent :]
        self._sent += len(text)
        return text

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._window)


class NoText:
    """Without a tokenizer."""

    def add(self, token: int) -> str:
        return ""

    def rest(self) -> str:
        return ""


class TextStream:
    """The text of one answer, which ends before the first stop string.

    The first is the one that is complete first, of those the longest, so that it does not matter how the text was cut
    into tokens.
    """

    def __init__(self, decoding: Decoding):
        self._decoding, self._stops, self._kept = decoding, (), ""
        self.stopped = False
        """A stop string was complete: no text follows."""

    def watch(self, stops: Sequence[str]) -> None:
        """From now on these end the text; text that was returned before is no part of them."""
        self._stops = stops

    def add(self, token: int) -> str:
        """Text that can neither change nor become part of a stop string."""
        text = self._before_stop(self._decoding.add(token))
        if not self.stopped:
            count = max((_overlap(text, stop) for stop in self._stops), default=0)
            text, self._kept = text[: len(text) - count], text[len(text) - count :]
        return text

    def end(self) -> str:
        """What was kept back, when no token follows."""
        text, self._kept = self._before_stop(self._decoding.rest()), ""
        return text

    def _before_stop(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._kept + new
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            return text[: min(ends)[1]]
        return text


class Detokenizer:
    """Begins the texts of answers."""

    def __init__(self, tokenizer: Tokenizer | None):
        """None: answers have no text."""
        self._tokenizer = tokenizer
        names = (f"<0x{value:02X}>" for value in range(256))
        ids = () if tokenizer is None or tokenizer.table else map(tokenizer.token_id, names)
        self._single_bytes = frozenset(number for number in ids if number is not None)

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """The text that follows a prompt."""
        if self._tokenizer is None:
            return TextStream(NoText())
        if self._tokenizer.table:
            return TextStream(ByteDecoding(self._tokenizer.table, prompt))
        return TextStream(WindowDecoding(self._tokenizer, self._single_bytes, prompt))


def _overlap(text: str, stop: str) -> int:
    """Characters of the longest end of the text that begins a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
