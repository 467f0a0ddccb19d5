"""How plain text is divided into documents."""

import re
from dataclasses import dataclass
from typing import Protocol


class DocumentRule(Protocol):
    """How plain text is divided into documents."""

    def starts(self, previous: bytes, line: bytes) -> bool:
        """Whether a document starts at `line`, which follows `previous`; both include their line ends."""
        ...

    def trim(self, document: bytes) -> bytes | None:
        """The document to tokenize; None if it is not a document."""
        ...


@dataclass(frozen=True, slots=True)
class EachLine:
    """Every line that is not blank is a document, without its line end."""

    def starts(self, previous: bytes, line: bytes) -> bool:
        return True

    def trim(self, document: bytes) -> bytes | None:
        return document.removesuffix(b"\n").removesuffix(b"\r") if document.strip() else None


@dataclass(frozen=True, slots=True)
class EachParagraph:
    """Documents are separated by blank lines, which are dropped; the last line end of a document is removed."""

    def starts(self, previous: bytes, line: bytes) -> bool:
        return not previous.strip() and bool(line.strip())

    def trim(self, document: bytes) -> bytes | None:
        lines = document.split(b"\n")
        while lines and not lines[-1].strip():
            lines.pop()
        while lines and not lines[0].strip():
            lines.pop(0)
        return b"\n".join(lines).removesuffix(b"\r") if lines else None


@dataclass(frozen=True, slots=True)
class MarkedLines:
    """A document starts at each line that contains `pattern` (without the line end); all bytes are kept.

    Text before the first such line is a document too, unless it is blank.
    """

    pattern: re.Pattern[str]

    def starts(self, previous: bytes, line: bytes) -> bool:
        text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", errors="surrogateescape")
        return self.pattern.search(text) is not None

    def trim(self, document: bytes) -> bytes | None:
        return document if document.strip() else None


@dataclass(frozen=True, slots=True)
class WholeFile:
    """Every file is one document."""

    def starts(self, previous: bytes, line: bytes) -> bool:
        return False

    def trim(self, document: bytes) -> bytes | None:
        return document
