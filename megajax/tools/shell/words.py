"""Expand the words of a script: quotes, $NAME, ${…}, $((…)) and $(…)."""

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megajax.config.errors import UserError
from megajax.tools.shell.arithmetic import Number, evaluate
from megajax.tools.shell.state import State, is_known, plain
from megajax.tools.shell.syntax import NAME, pieces

PARAMETER = re.compile(rf"(?P<hash>#(?=.))?(?P<name>{NAME}|\d+|[@*#?$!-])(?P<rest>.*)", re.DOTALL)
OPERATION = re.compile(r":?[-=?+]|%%?|##?|//?[#%]?|\^\^?|,,?|:")
RANGE = re.compile(r"\{(-?\d{1,6})\.\.(-?\d{1,6})\}")
LONGEST = 10_000
"""Characters of a value that patterns are compared with, and entries of {1..N}."""
BREAK = "\ufdd0"
"""A border between words in a text."""
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "e": "\x1b"}


@dataclass
class Words:
    """The words of one line."""

    state: State
    line: int
    run: Callable[[str, int], str | None]
    """The output of the commands in $(…); None: not known."""

    def unknown(self, text: str) -> str:
        """An unknown value with the line."""
        return self.state.report.unknown(f"{self.state.place(self.line)}: {text}")

    def fields(self, word: str) -> list[str]:
        """The expansion of a word. Unquoted values are split at blanks, and arrays give one word per entry."""
        if match := RANGE.search(word):
            low, high = int(match[1]), int(match[2])
            if match[0] == word and abs(high - low) <= LONGEST:
                return [str(number) for number in range(low, high + 1, 1)] or [
                    str(number) for number in range(low, high - 1, -1)
                ]
        words: list[str] = []
        current: str | None = None
        for piece in pieces(word):
            is_quoted = piece[0] in "\"'\\" or piece.startswith("$'")
            if is_quoted:
                entries = self.quoted(piece)
            elif is_expansion(piece):
                entries = re.split(r"[ \t\n]+", BREAK.join(self.values(piece)).replace(BREAK, " "))
            else:
                entries = [piece]
            for number, entry in enumerate(entries):
                if number and current is not None:
                    words.append(current)
                    current = None
                if entry or is_quoted:
                    current = (current or "") + entry
        return words if current is None else [*words, current]

    def text(self, word: str) -> str:
        """The expansion of a word without splitting, as in an assignment."""
        return "".join(" ".join(self.entries(piece)) for piece in pieces(word))

    def entries(self, piece: str) -> Sequence[str]:
        """The values of a piece of a word."""
        if piece[0] in "\"'\\" or piece.startswith("$'"):
            return self.quoted(piece)
        return self.values(piece) if is_expansion(piece) else [piece]

    def quoted(self, piece: str) -> list[str]:
        """The value of '…', "…", $'…' or an escaped character; an array in double quotes has several."""
        if piece[0] == "\\":
            return [piece[1:].strip("\n")]
        if piece[0] == "$":
            return [re.sub(r"\\(.)", lambda match: ESCAPES.get(match[1], match[1]), piece[2:-1])]
        if piece[0] == "'":
            return [piece[1:-1]]
        inner = piece[1:-1]
        if inner in ("$@", "${@}"):
            return list(self.state.arguments)
        return self.inside(inner)

    def inside(self, text: str, quote: str = '"') -> list[str]:
        """The value of a text in double quotes, or in a here-document (<); several where it holds ${NAME[@]}."""
        words = [""]
        for piece in pieces(text, quote):
            if piece[0] == "\\":
                entries = [piece[1:].strip("\n") if piece[1:] in ("\n", quote, "$", "`", "\\") else piece]
            elif is_expansion(piece):
                entries = list(self.values(piece))
                if not (piece in ("$@", "${@}") or re.search(r"\[@\]", piece)):
                    entries = [" ".join(entries)]
                elif not entries and piece == text:
                    return []
            else:
                entries = [piece]
            words[-1] += entries[0] if entries else ""
            words += entries[1:]
        return words

    def document(self, text: str) -> str:
        """The text of a here-document."""
        return "".join(" ".join(self.inside(line, "<")) for line in text.splitlines(keepends=True))

    def pattern(self, word: str) -> str | None:
        """A regular expression for a pattern with * ? [ ]; None: not known. Quoted parts match themselves."""
        text = ""
        for piece in pieces(word):
            is_quoted = piece[0] in "\"'\\" or piece.startswith("$'")
            value = " ".join(self.entries(piece))
            text += re.sub(r"([*?[])", r"[\1]", value) if is_quoted else value
        return fnmatch.translate(text) if is_known(text) and len(text) <= LONGEST else None

    def values(self, source: str) -> Sequence[str]:
        """The values of an expansion."""
        if source.startswith("$(("):
            number = self.number(source[3:-2])
            return [str(number) if number is not None else self.unknown(f"{source} is not known")]
        if source.startswith(("$(", "`")):
            output = self.run(source[2:-1] if source[0] == "$" else source[1:-1].replace("\\`", "`"), self.line)
            return [self.unknown(f"only a shell can run {source}") if output is None else output]
        if source[:2] in ("<(", ">("):
            return [self.unknown(f"only a shell can run {source}")]
        return self.parameter(source[2:-1] if source.startswith("${") else source[1:], source)

    def number(self, text: str) -> int | None:
        """The value of arithmetic."""
        text = "".join(" ".join(self.values(piece)) if is_expansion(piece) else piece for piece in pieces(text))

        def value_of(name: str) -> str:
            return " ".join(self.parameter(name, f"${name}"))

        def assign(name: str, value: Number) -> None:
            text = self.unknown(f"${name} is not known") if value is None else str(value)
            self.state.assign(name, {**(self.state.value(name) or {}), "0": text})

        return evaluate(text.replace('"', ""), value_of, assign) if is_known(text) else None

    def parameter(self, inner: str, source: str) -> Sequence[str]:
        """The values of the inner part of ${…}."""
        if inner.startswith("!"):
            return self.indirect(inner[1:], source)
        match = PARAMETER.fullmatch(inner)
        if match is None:
            return [self.unknown(f"the expansion {source} is not supported")]
        name, rest = match["name"], match["rest"]
        index, rest = self.subscript(rest)
        values = self.look_up(name, index)
        if match["hash"]:
            return [str(len(values or ()) if index in ("@", "*") or name in "@*" else len("".join(values or ())))]
        if not rest:
            return values if values is not None else self.state.missing_value(name, self.line)
        operation = OPERATION.match(rest)
        if operation is None:
            return [self.unknown(f"the expansion {source} is not supported")]
        return self.changed(name, values, operation[0], rest[operation.end() :], source)

    def subscript(self, rest: str) -> tuple[str, str]:
        """The index of NAME[index], "0" without one; and the text after it."""
        if not rest.startswith("["):
            return "", rest
        inner, bracket, after = rest[1:].partition("]")
        if inner in ("@", "*"):
            return inner, after
        index = self.text(inner) if bracket else "0"
        number = self.number(index) if re.fullmatch(r"[\w\s+*/-]+", index) else None
        return index if number is None else str(number), after

    def look_up(self, name: str, index: str) -> list[str] | None:
        """The values of a variable or of an argument; None: not set."""
        arguments = self.state.arguments
        special = {"#": [str(len(arguments))], "0": [self.state.script], "?": None, "-": [""]}
        if name in ("@", "*"):
            return arguments
        if name in special:
            return special[name]
        if name.isdigit():
            return arguments[int(name) - 1 : int(name)] or None
        value = self.state.value(name)
        if value is None:
            return [] if index in ("@", "*") and self.state.missing is not None else None
        if index in ("@", "*"):
            return list(value.values())
        if index.startswith("-") and index[1:].isdigit():
            return list(value.values())[int(index) :][:1] or None
        entry = value.get(index or "0")
        return None if entry is None else [entry]

    def indirect(self, inner: str, source: str) -> Sequence[str]:
        """${!NAME} and ${!NAME[@]}."""
        if match := re.fullmatch(rf"({NAME})\[[@*]\]", inner):
            return list(self.state.value(match[1]) or {})
        name = " ".join(self.parameter(inner, source))
        if not re.fullmatch(NAME, name):
            return [self.unknown(f"the expansion {source} is not supported")]
        return self.parameter(name, source)

    def changed(self, name: str, values: list[str] | None, operation: str, rest: str, source: str) -> Sequence[str]:
        """The values after an operation of ${NAME operation rest}."""
        if operation[-1] in "-=?+":
            return self.default(name, values, operation, rest)
        if values is None:
            return self.state.missing_value(name, self.line)
        if operation == ":":
            return self.slice(values, rest, is_list=name in "@*" or "[@]" in source or "[*]" in source)
        if any(len(value) > LONGEST or not is_known(value) for value in values):
            return values if all(map(is_known, values)) else [self.unknown(f"{plain(source)} is not known")]
        if operation[0] in "^,":
            end = None if len(operation) > 1 else 1
            change = str.upper if operation[0] == "^" else str.lower
            return [change(value[:end]) + (value[end:] if end else "") for value in values]
        if operation[0] == "/":
            return self.replaced(values, operation, rest)
        pattern = self.pattern(rest)
        if pattern is None:
            return [self.unknown(f"{plain(source)} is not known")]
        return [_trimmed(value, re.compile(pattern), operation) for value in values]

    def default(self, name: str, values: list[str] | None, operation: str, rest: str) -> Sequence[str]:
        """${NAME:-default} and its kin."""
        is_set = values is not None and (operation[0] != ":" or bool("".join(values)))
        if operation[-1] == "+":
            return self.fields(rest) if is_set else []
        if is_set:
            assert values is not None
            return values
        if operation[-1] == "?":
            return self.state.missing_value(name, self.line)
        default = [self.text(rest)]
        if operation[-1] == "=":
            self.state.assign(name, {"0": default[0]})
        return default

    def slice(self, values: list[str], rest: str, *, is_list: bool) -> Sequence[str]:
        """${NAME:start:length}."""
        start_text, _, length_text = rest.partition(":")
        start, length = self.number(start_text), self.number(length_text) if length_text else None
        if start is None or (length_text and length is None):
            return [self.unknown(f"the expansion of :{rest} is not known")]
        if is_list:
            return values[start:][:length]
        text = "".join(values)
        if not is_known(text):
            return [self.unknown("a part of an unknown value is not known")]
        return [text[start:][:length]]

    def replaced(self, values: list[str], operation: str, rest: str) -> Sequence[str]:
        """${NAME/pattern/text}."""
        parts, word = [""], rest
        for piece in pieces(word):
            if piece == "/" and len(parts) == 1:
                parts.append("")
            else:
                parts[-1] += piece
        pattern, new = self.pattern(parts[0]), self.text(parts[1]) if len(parts) > 1 else ""
        if pattern is None or re.search(r"\*|\?", re.sub(r"\[[*?]\]", "", parts[0])):
            return [self.unknown(f"the pattern {parts[0]} is not supported")]
        inner = pattern.removeprefix("(?s:").removesuffix(r")\z").removesuffix(r")\Z")
        anchored = rf"\A(?:{inner})" if operation.endswith("#") else inner
        anchored = rf"(?:{inner})\Z" if operation.endswith("%") else anchored
        count = 0 if operation == "//" else 1
        return [re.sub(anchored, lambda _: new, value, count=count) for value in values]


def is_expansion(piece: str) -> bool:
    """Whether a piece of a word is $…, `…` or <(…)."""
    return len(piece) > 1 and piece[0] in "$`<>" and not piece.startswith("$'")


def _trimmed(value: str, pattern: re.Pattern, operation: str) -> str:
    """A value without the beginning (#, ##) or the end (%, %%) that a pattern matches."""
    lengths = range(len(value) + 1) if len(operation) == 1 else range(len(value), -1, -1)
    for length in lengths:
        if operation[0] == "#" and pattern.match(value[:length]):
            return value[length:]
        if operation[0] == "%" and pattern.match(value[len(value) - length :]):
            return value[: len(value) - length]
    return value


def checked_text(text: str) -> str:
    """The text. Raises UserError for characters that the reader uses itself."""
    for character in text:
        if character == BREAK or not is_known(character) or character == "\ufffe":
            raise UserError(f"it has the character U+{ord(character):04X}, which is reserved for internal use")
    return text
