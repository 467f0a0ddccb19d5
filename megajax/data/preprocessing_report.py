"""What preprocessing says while it works and at its end."""

import math
import os
import time
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """How much was done.

    Attributes:
        stored: bytes of input files, as they are on disk.
        text: bytes of text (UTF-8) that were tokenised; for JSON lines only what the keys hold.
        documents: lines of JSON, or documents of plain text; `empty`: those without a token under any key.
        tokens: tokens written, ends of documents included.
    """

    stored: int = 0
    text: int = 0
    documents: int = 0
    empty: int = 0
    tokens: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            stored=self.stored + other.stored,
            text=self.text + other.text,
            documents=self.documents + other.documents,
            empty=self.empty + other.empty,
            tokens=self.tokens + other.tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessed:
    """What came out: the prefixes of the datasets, in the order of the keys, and how much went into them."""

    prefixes: tuple[str, ...]
    counts: Counts
    seconds: float
    files: int
    workers: int

    def summary(self) -> str:
        """Several lines for the person at the terminal: how much, how fast, which files, and how to use them."""
        counts = self.counts
        empty = f" ({counts.empty:,} empty)" if counts.empty else ""
        sizes = [
            f"{path}  {os.stat(path).st_size:,} bytes"
            for prefix in self.prefixes
            for path in (f"{prefix}.bin", f"{prefix}.idx")
        ]
        return "\n".join(
            [
                f"{counts.documents:,} documents{empty} from {self.files:,} file(s), {counts.tokens:,} tokens, "
                f"{counts.tokens / max(counts.text, 1):.4f} tokens per byte of text",
                f"{counts.text / 1e6:,.1f} MB of text in {self.seconds:.1f} s with {self.workers} worker(s): "
                f"{counts.text / self.seconds / 1e6:.1f} MB/s",
                *sizes,
                f"to train on it: --data.paths={','.join(self.prefixes)}",
            ]
        )


class Progress:
    """How far `preprocess` is: on a terminal one line that changes, elsewhere a new line every `interval` seconds."""

    def __init__(self, stream: TextIO, interval: float):
        self._stream = stream
        self._live = stream.isatty()
        self._interval = 0.1 if self._live else interval
        self._started = self._last = time.monotonic()

    def __call__(self, counts: Counts, total: int) -> None:
        """Show, unless it is too soon, what is done of `total` bytes on disk."""
        now = time.monotonic()
        if now - self._last < self._interval:
            return
        self._last = now
        seconds = now - self._started
        left = seconds * (total - counts.stored) / max(counts.stored, 1)
        line = (
            f"{counts.documents:,} documents  {counts.text / seconds / 1e6:.1f} MB/s  "
            f"{100 * counts.stored / max(total, 1):.0f} %  {_duration(left)} left"
        )
        self._stream.write(f"\r{line}\x1b[K" if self._live else f"{line}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Take the changing line away."""
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
