"""A shell script cut into statements and words, quotes and comments taken away and nothing replaced yet."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megajax.config.errors import UserError

BLANK = " \t"
ENDING = "\n;&|()"


@dataclass(frozen=True, slots=True)
class Literal:
    """Text that stays as it is."""

    text: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Expansion:
    """What stands behind a $ sign, brackets included: NAME, {NAME:-x}, ((1 + 2)), (date)."""

    source: str
    quoted: bool = False


type Part = Literal | Expansion


@dataclass(frozen=True, slots=True)
class RawWord:
    """A word of the script, in parts."""

    parts: tuple[Part, ...]
    line: int

    def plain(self) -> str:
        """The text where no part is quoted or to be replaced, else ""."""
        texts = [part.text for part in self.parts if isinstance(part, Literal) and not part.quoted]
        return "".join(texts) if len(texts) == len(self.parts) else ""

    def start(self) -> str:
        """The text before the first part that is quoted or to be replaced."""
        first = self.parts[0] if self.parts else None
        return first.text if isinstance(first, Literal) and not first.quoted else ""

    def without(self, count: int) -> "RawWord":
        """The word without its first `count` signs."""
        return replace(self, parts=(Literal(self.start()[count:]), *self.parts[1:]))

    @staticmethod
    def of(text: str, line: int) -> "RawWord":
        """A text as one word, whatever blanks it holds."""
        scanner = _Scanner(text, line)
        parts: list[Part] = []
        while scanner.left():
            parts += scanner.part("")
        return RawWord(tuple(parts), line)


@dataclass(frozen=True, slots=True)
class Array:
    """NAME=( words )."""

    name: str
    adds: str
    words: tuple[RawWord, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Statement:
    """Words up to an operator or the end of the line."""

    words: tuple[RawWord | Array, ...]
    end: str
    """The operator behind them: a line's end, ;, &&, ||, |, & or a bracket; "" at the end of the text."""
    redirected: bool = False
    """Whether a < or > was left out."""


def statements(text: str) -> Iterator[Statement]:
    """The statements of a script, in order. Raises UserError for what nothing closes."""
    scanner = _Scanner(text, 1)
    while scanner.left():
        found = scanner.statement()
        if found.words:
            yield found


class _Scanner:
    def __init__(self, text: str, line: int):
        self.text, self.place, self.line = text.replace("\r\n", "\n"), 0, line
        self.documents: list[str] = []

    def left(self) -> bool:
        return self.place < len(self.text)

    def next(self) -> str:
        return self.text[self.place : self.place + 1]

    def take(self, count: int = 1) -> str:
        found = self.text[self.place : self.place + count]
        self.place += count
        self.line += found.count("\n")
        return found

    def blanks(self, also: str = "") -> None:
        """Past blanks, joined lines and comments."""
        while self.left():
            if self.text.startswith("\\\n", self.place):
                self.take(2)
            elif self.next() in BLANK + also:
                self.take()
            elif self.next() == "#":
                self.take(_until(self.text, "\n", self.place) - self.place)
            else:
                return

    def statement(self) -> Statement:
        words: list[RawWord | Array] = []
        redirected = False
        while self.left():
            self.blanks()
            if self.next() in "<>" or re.match(r"\d*[<>]|&>", self.text[self.place : self.place + 12]):
                self.redirection()
                redirected = True
            elif not words and self.text.startswith("((", self.place):
                words += self.arithmetic()
            elif self.next() in ENDING:
                end = self.take(2 if self.text[self.place : self.place + 2] in ("&&", "||") else 1)
                if end == "\n":
                    self.past_documents()
                return Statement(tuple(words), end, redirected)
            else:
                words.append(self.word())
        return Statement(tuple(words), "", redirected)

    def arithmetic(self) -> list[RawWord]:
        """(( ... )) as a command of this name and one quoted word."""
        line = self.line
        end = self.text.find("))", self.place)
        if end < 0:
            raise UserError(f"line {line}: nothing closes this ((")
        inner = self.take(end + 2 - self.place)[2:-2]
        return [RawWord((Literal("(("),), line), RawWord((Literal(inner, True),), line)]

    def word(self) -> RawWord | Array:
        line, parts = self.line, []
        while self.left() and self.next() not in BLANK + ENDING + "<>":
            if self.text.startswith("\\\n", self.place):
                self.take(2)
                continue
            parts += self.part(BLANK + ENDING + "<>")
            word = RawWord(tuple(parts), line)
            match = re.fullmatch(r"([A-Za-z_]\w*)(\+?)=", word.plain())
            if match and self.next() == "(":
                self.take()
                return Array(match[1], match[2], tuple(self.entries(line)), line)
        return RawWord(_joined(parts), line)

    def entries(self, line: int) -> Iterator[RawWord]:
        while True:
            self.blanks("\n")
            if not self.left():
                raise UserError(f"line {line}: nothing closes this (")
            if self.next() == ")":
                self.take()
                return
            if self.next() in ENDING + "<>":
                raise UserError(f"line {self.line}: {self.next()} stands in a list of words")
            found = self.word()
            yield found if isinstance(found, RawWord) else RawWord((), self.line)

    def part(self, ends: str) -> list[Part]:
        """The next quoted piece, expansion, or run of plain text."""
        sign = self.next()
        if sign == "'":
            return [Literal(self.quoted("'"), True)]
        if sign == '"':
            return self.in_double_quotes()
        if sign in "$`" and (found := self.expansion()):
            return [Expansion(found)]
        if sign == "\\":
            return [Literal(self.take(2)[1:], True)]
        text = self.take()
        while self.left() and self.next() not in ends + "'\"$`\\=":
            text += self.take()
        return [Literal(text)]

    def quoted(self, sign: str) -> str:
        line = self.line
        end = self.text.find(sign, self.place + 1)
        if end < 0:
            raise UserError(f"line {line}: nothing closes this {sign}")
        return self.take(end + 1 - self.place)[1:-1]

    def in_double_quotes(self) -> list[Part]:
        line = self.line
        parts: list[Part] = [Literal("", True)]
        self.take()
        while self.next() != '"':
            if not self.left():
                raise UserError(f'line {line}: nothing closes this "')
            if self.next() in "$`" and (found := self.expansion()):
                parts.append(Expansion(found, True))
            elif self.next() == "\\" and self.text[self.place + 1 : self.place + 2] in ("\n", '"', "$", "`", "\\"):
                parts.append(Literal(self.take(2)[1:].strip("\n"), True))
            else:
                parts.append(Literal(self.take(), True))
        self.take()
        return list(_joined(parts))

    def expansion(self) -> str:
        """What follows a $ (or stands between `); "" where the sign stands for itself."""
        rest = self.text[self.place + 1 :]
        if self.next() == "`":
            return f"`{self.quoted('`')}`"
        if match := re.match(r"[A-Za-z_]\w*|[\d@*#?$!-]", rest):
            self.take(1 + match.end())
            return match[0]
        if rest[:1] not in ("{", "("):
            return ""
        depth, line = 0, self.line
        for count, sign in enumerate(rest):
            depth += (sign in "{(") - (sign in "})")
            if depth == 0:
                self.take(count + 2)
                return rest[: count + 1]
        raise UserError(f"line {line}: nothing closes this {rest[:1]}")

    def redirection(self) -> None:
        match = re.match(r"\d*(&>>?|<<<|<<-?|>>|[<>]&?)", self.text[self.place :])
        self.take(match.end() if match else 1)
        self.blanks()
        word = self.word()
        if match and match[1] in ("<<", "<<-") and isinstance(word, RawWord):
            self.documents.append("".join(part.text for part in word.parts if isinstance(part, Literal)))

    def past_documents(self) -> None:
        """Past the texts that << announced in the line before."""
        for end in self.documents:
            while self.left():
                if self.take(_until(self.text, "\n", self.place) + 1 - self.place).strip() == end:
                    break
        self.documents = []


def _until(text: str, sign: str, place: int) -> int:
    found = text.find(sign, place)
    return len(text) if found < 0 else found


def _joined(parts: list[Part]) -> tuple[Part, ...]:
    """Neighbours of one kind as one part."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Literal) and isinstance(last, Literal) and part.quoted == last.quoted:
            found[-1] = Literal(last.text + part.text, part.quoted)
        else:
            found.append(part)
    return tuple(found)
