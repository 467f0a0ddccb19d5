"""Progress lines and summary of preprocessing."""

import math
import os
from dataclasses import asdict, dataclass

from megajax.data.progress_line import ProgressLine


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentCounts:
    """Amounts of processed data.

    Attributes:
        stored: bytes of input files on disk.
        text: bytes of tokenized text (UTF-8); for JSON lines, only the values of the keys.
        documents: lines of JSON, rows of Parquet, pairs of lines, or documents of plain text; `empty`: those without a
            token under any key.
        skipped: invalid rows that were skipped.
        tokens: tokens written, including end-of-document tokens.
    """

    stored: int = 0
    text: int = 0
    documents: int = 0
    empty: int = 0
    skipped: int = 0
    tokens: int = 0

    def __add__(self, counts: "DocumentCounts") -> "DocumentCounts":
        return DocumentCounts(**{name: count + getattr(counts, name) for name, count in asdict(self).items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessResult:
    """The result of preprocessing: the prefixes of the datasets, in the order of the keys, and counts.

    fault: message about the first skipped row; "" without one.
    settings: of a run that trains on the output.
    """

    prefixes: tuple[str, ...]
    counts: DocumentCounts
    fault: str
    settings: str
    seconds: float
    files: int
    workers: int

    def summary(self) -> str:
        """Several lines for the user: amounts, speed, files, and the settings to train on them."""
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
                *([f"{counts.skipped:,} skipped (--on-error=skip); the first: {self.fault}"] if self.fault else []),
                *sizes,
                f"to train on it: {self.settings}",
            ]
        )


class PreprocessingProgress(ProgressLine):
    """Progress of `preprocess`."""

    def __call__(self, counts: DocumentCounts, total: int) -> None:
        """Shows the progress of `total` bytes on disk, unless the last line is too recent."""
        if seconds := self.seconds():
            remaining = seconds * (total - counts.stored) / max(counts.stored, 1)
            self.show(
                f"{counts.documents:,} documents  {counts.text / seconds / 1e6:.1f} MB/s  "
                f"{100 * counts.stored / max(total, 1):.0f} %  {_duration(remaining)} left"
            )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
