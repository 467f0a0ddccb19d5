"""Incremental text of tokens: whole characters only, without any part of a stop string."""

from codecs import getincrementaldecoder
from collections.abc import Collection, Sequence

from megajax.tokenizers.base import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Decoded from invalid or incomplete UTF-8."""
TAIL, WINDOW = 12, 24
"""Number of prompt tokens decoded before an answer, and number of tokens after which a window is shortened."""


class Decoding:
    """Incremental text of an answer: joined, `add` and `rest` return the answer's part of the text of all tokens.

    This class is for answers without a tokenizer, which have no text.
    """

    def add(self, token: int) -> str:
        """Add a token -> new text that no later token can change."""
        return ""

    def rest(self) -> str:
        """The rest of the text."""
        return ""


class ByteDecoding(Decoding):
    """Incremental text for tokenizers with a table of bytes."""

    def __init__(self, table: Sequence[bytes | None], prompt: Sequence[int]):
        """table: bytes of each id, None for gaps."""
        self._table, self._decoder = table, getincrementaldecoder("utf-8")("replace")
        # The answer may complete a character that starts in the prompt.
        for token in prompt[-TAIL:]:
            self.add(token)

    def add(self, token: int) -> str:
        return self._decoder.decode(self._table[token] or b"")

    def rest(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDecoding(Decoding):
    """Incremental text for any tokenizer: decodes a window of the last tokens, and returns the text added at its end.

    The window starts in the prompt, with visible text that was returned before. Tokenizers treat the start of a text
    specially, for example drop a space; this affects only that text.
    """

    def __init__(self, tokenizer: Tokenizer, single_bytes: Collection[int], prompt: Sequence[int]):
        """single_bytes: ids of tokens that are one byte each."""
        self._tokenizer, self._bytes = tokenizer, single_bytes
        count = TAIL
        self._window = list(prompt[-count:])
        while not self._decoded().strip() and count < len(prompt):
            count *= 4
            self._window = list(prompt[-count:])
        self._emitted = len(self._decoded().rstrip(REPLACEMENT))
        self._part = 0

    def add(self, token: int) -> str:
        self._window.append(token)
        # Some tokenizers replace a whole run of bytes if one of them is invalid.
        if token in self._bytes:
            return ""
        text = self._decoded()
        if len(text) <= self._emitted or text.endswith(REPLACEMENT):
            return ""
        new, self._emitted = text[self._emitted :], len(text)
        if len(self._window) > WINDOW and new.strip():
            self._window = self._window[self._part :]
            self._emitted = len(self._decoded())
        # Index of the first token of the next text.
        self._part = len(self._window)
        return new

    def rest(self) -> str:
        text = self._decoded()[self._emitted :]
        self._emitted += len(text)
        return text

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._window)


class TextStream:
    """The text of an answer, which ends before the first stop string, or after it.

    The first stop string is the one whose end comes first; among equal ends, the longest. So the result does not depend
    on how the text is divided into tokens.
    """

    def __init__(self, decoding: Decoding):
        self._decoding, self._stops, self._keep, self._held_back = decoding, (), False, ""
        self.stopped = False
        """Whether a stop string was complete; no text follows."""

    def watch(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """Set the stop strings. They match only text that was not returned yet. keep: end the text after the match."""
        self._stops, self._keep = stops, keep

    def add(self, token: int) -> str:
        """Add a token -> text that can neither change nor become part of a stop string."""
        text = self._before_stop(self._decoding.add(token))
        if not self.stopped:
            count = max((overlap(text, stop) for stop in self._stops), default=0)
            text, self._held_back = text[: len(text) - count], text[len(text) - count :]
        return text

    def end(self) -> str:
        """The rest of the text, when no token follows."""
        text, self._held_back = self._before_stop(self._decoding.rest()), ""
        return text

    def _before_stop(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held_back + new
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self.stopped = True
            return text[: min(matches)[0 if self._keep else 1]]
        return text


class Detokenizer:
    """Creates the text streams of answers."""

    def __init__(self, tokenizer: Tokenizer | None):
        """None: answers have no text."""
        self._tokenizer = tokenizer
        names = (f"<0x{value:02X}>" for value in range(256))
        ids = () if tokenizer is None or tokenizer.table else map(tokenizer.token_id, names)
        self._single_bytes = frozenset(number for number in ids if number is not None)

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """The text that follows a prompt."""
        if self._tokenizer is None:
            return TextStream(Decoding())
        if self._tokenizer.table:
            return TextStream(ByteDecoding(self._tokenizer.table, prompt))
        return TextStream(WindowDecoding(self._tokenizer, self._single_bytes, prompt))


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of the text that is a prefix of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
