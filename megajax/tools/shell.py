"""Read the assignments, arrays and plain commands of a launch script without running anything."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megajax.config.budget import Budget, Limits
from megajax.config.errors import UserError
from megajax.tools.flags import UNKNOWN, Word

NAME = r"[A-Za-z_]\w*"
BRACES = r"\$\{(?:[^{}]|\$\{[^{}]*\})*\}"
ROUND = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
EXPANSION = rf"\${ROUND}|`[^`]*`|{BRACES}|\$(?:{NAME}|[\d@*#?$!-])"
# Without backtracking: the parts of an unclosed text match in 2**n ways.
DOUBLE = rf'"(?>\\.|{EXPANSION}|[^"\\])*+"'
WORD = rf"(?>'[^']*'|{DOUBLE}|{EXPANSION}|\\[^\n]|\$(?![{{(])|[^\s;&|<>()'\"\\`$])++"
TOKEN = re.compile(
    rf"(?P<skip>[ \t]+|\\\n|\#[^\n]*|(?:\d*(?:>>?|<)|&>>?)(?:&\d|[ \t]*{WORD}))"
    rf"|(?P<array>{NAME}\+?=\()|(?P<word>{WORD})|(?P<end>\n|&&|\|\||[;&|()]|<+)",
    re.DOTALL,
)
PIECE = re.compile(rf"'(?P<single>[^']*)'|(?P<double>{DOUBLE})|(?P<expansion>{EXPANSION})|\\(?P<escaped>.)", re.DOTALL)
INSIDE = re.compile(rf"(?P<expansion>{EXPANSION})|\\(?P<escaped>[\n\"$`\\])", re.DOTALL)
ASSIGNMENT = re.compile(rf"({NAME})(\+?)=(.*)", re.DOTALL)

LIMITS = Limits(bytes=2**24, entries=1_000_000)
"""Of the values of all expansions of a script."""

DECLARING = {"export", "declare", "typeset", "readonly"}
UNREAD = {
    *("if", "then", "else", "elif", "fi", "for", "while", "until", "do", "done", "case", "esac", "select", "function"),
    *("{", "}", "[[", "!", "local", "read", "mapfile", "readarray", "getopts", "let", "shift"),
}
"""Keywords of control flow, and commands that change variables in ways that only a shell can follow."""

BREAK, QUOTED, UNKNOWN_END = "\ufdd0", "\ufdd1", "\ufdd2"
"""Markers in an expanded word: a border between words, a quoted piece, the end of a reason that follows UNKNOWN."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a script, variables replaced by their values."""

    words: tuple[Word, ...]
    line: int


def read_script(text: str, *, arguments: Sequence[str] = (), defined: Mapping[str, str] | None = None) -> list[Command]:
    """The commands of a script, in order.

    arguments: the values of $1, $2, …; defined: variables from outside, which override assignments of the script.

    Raises:
        UserError: an unclosed quote or bracket, control flow (if, for, functions, read, &&), or values that become too
            long, as by A=$A$A on each line.
    """
    if marks := {BREAK, QUOTED, UNKNOWN, UNKNOWN_END}.intersection(text):
        raise UserError(f"it has the character U+{ord(marks.pop()):04X}, which Unicode reserves for internal use")
    script = _Script(list(arguments), dict(defined or {}))
    return [command for line, words, end in _statements(text) for command in script.commands(words, end, line)]


def _statements(text: str) -> Iterator[tuple[int, list[str | tuple[str, list[str]]], str]]:
    """(Line, unexpanded words, the operator after them); an array is ("NAME=", its words)."""
    text = text.replace("\r\n", "\n").rstrip("\\\n") + "\n"
    place, line, start, words = 0, 1, 1, []
    array: list[str] | None = None
    while place < len(text):
        match = TOKEN.match(text, place)
        if match is None:
            raise UserError(f"line {line}: unclosed {text[place : place + 2].strip()}")
        token, place = match[0], match.end()
        start = start if words else line
        if match["array"]:
            array = []
            words.append((token[:-1], array))
            opened = line
        elif match["word"]:
            (words if array is None else array).append(token)
        elif match["end"] and array is not None:
            if token not in "\n)":
                raise UserError(f"line {line}: {token} is not allowed in an array")
            array = None if token == ")" else array
        elif match["end"]:
            if words or token in ("(", "<<"):
                yield start, words, token
            words = []
        line += token.count("\n")
    if array is not None:
        raise UserError(f"line {opened}: unclosed (")


class _Script:
    """The values of the variables at one line of the script. Scalars are arrays of one."""

    def __init__(self, arguments: list[str], defined: dict[str, str]):
        self.arguments, self.defined = arguments, defined
        self.budget = Budget("the script", LIMITS)
        self.variables: dict[str, list[str]] = {}

    def commands(self, words: list[str | tuple[str, list[str]]], end: str, line: int) -> Iterator[Command]:
        """Run assignments, or yield the command. Raises UserError for control flow."""
        first = words[0] if words and isinstance(words[0], str) else ""
        # Some uses of these change variables.
        changes_variables = first in ("set", "eval", "printf") and any(
            word in ("--", "-v") or "=" in word for word in words[1:]
        )
        unsupported = first if first in UNREAD or changes_variables else end if end in ("&&", "||", "(", "<<") else ""
        if unsupported:
            raise UserError(
                f"line {line}: {unsupported} is not supported, only assignments, arrays and plain commands are. Remove "
                "it from the script, or paste the flags that bash -x shows after -- on this tool's command line"
            )
        is_declaration = first in DECLARING
        count = 0
        for word in words:
            if not is_declaration and isinstance(word, str) and not ASSIGNMENT.fullmatch(word):
                break
            self._assign(word, line)
            count += 1
        words = words[count:]
        if first == "unset":
            for word in words[1:]:
                self.variables.pop(str(word), None)
        fields = [field for word in words if isinstance(word, str) for field in self._fields(word, line)]
        for field in fields:
            if re.search(r"\.py\s", field):  # sh -c "python ...", also where variables hold the whole command
                fields = shlex.split(field)
        if fields:
            yield Command(tuple(_word(field, line) for field in fields), line)

    def _assign(self, word: str | tuple[str, list[str]], line: int) -> None:
        text, entries = (word, None) if isinstance(word, str) else word
        match = ASSIGNMENT.fullmatch(text)
        if match is None or match[1] in self.defined:
            return
        name, adds, value = match.groups()
        previous = self.variables.get(name, []) if adds else []
        self.budget.spend(len(previous), bytes=len("".join(previous[-1:])))
        if entries is not None:
            self.variables[name] = previous + [field for entry in entries for field in self._fields(entry, line)]
        else:
            *before, last = previous or [""]
            self.variables[name] = [*before, last + self._text(value, line)]

    def _fields(self, word: str, line: int) -> list[str]:
        """The expansion of a word: unquoted values are split at blanks, arrays give one word per entry."""

        def piece(match: re.Match) -> str:
            if match["expansion"]:
                return re.sub(r"[ \t\n]+", BREAK, BREAK.join(self._value(match["expansion"], line)))
            if re.fullmatch(r'"\$(@|\{@\}|\{\w+\[@\]\})"', match[0]):
                return BREAK.join(self._value(match[0][1:-1], line))
            return QUOTED + self._text(match[0], line)

        return [field.replace(QUOTED, "") for field in PIECE.sub(piece, word).split(BREAK) if field]

    def _text(self, text: str, line: int, pattern: re.Pattern = PIECE) -> str:
        """The expansion of a text without word splitting, as in an assignment."""

        def piece(match: re.Match) -> str:
            parts = match.groupdict(default="")
            if parts["expansion"]:
                return " ".join(self._value(parts["expansion"], line))
            if parts.get("double"):
                return self._text(parts["double"][1:-1], line, INSIDE)
            return parts.get("single") or parts["escaped"].strip("\n")

        return pattern.sub(piece, text)

    def _value(self, source: str, line: int) -> list[str]:
        """The value of $NAME, ${NAME}, ${NAME[@]}, ${NAME:-default}, $1, $@ or $((sum))."""
        if source.startswith("$(("):
            return [self._sum(source, line)]
        if source.startswith(("$(", "`")):
            return [_unknown(f"line {line}: only a shell can run {source}")]
        inner = source[2:-1] if source.startswith("${") else source[1:]
        match = re.fullmatch(rf"({NAME}|\d+|[@*])(?:\[[@*]\])?(?:(:?)[-=](.*))?", inner, re.DOTALL)
        if match is None:
            return [_unknown(f"line {line}: the expansion {source} is not supported")]
        name, colon, default = match.groups()
        number = int(name) if name.isdigit() else 0
        if name in "@*":
            values = self.arguments
        elif number:
            values = self.arguments[number - 1 : number] or None
        else:
            values = [self.defined[name]] if name in self.defined else self.variables.get(name)
        if default is not None and (values is None or (colon and not "".join(values))):
            return [self._text(default, line)]
        variable = f"argument {name} of the script" if number else f"${name}"
        if values is None:
            return [_unknown(f"line {line}: {variable} is not known")]
        self.budget.spend(len(values), bytes=sum(map(len, values)))
        return values

    def _sum(self, source: str, line: int) -> str:
        """A sum of whole numbers."""
        text = self._text(re.sub(rf"(?<![\w${{])({NAME})", r"$\1", source[3:-2]), line)
        try:
            if re.fullmatch(r"[\d\s()+*/%-]{,1000}", text) and not re.search(r"\d{10}|\*\*", text):
                return str(eval(text.replace("/", "//").strip(), {"__builtins__": {}}))
        except (SyntaxError, TypeError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            pass
        return _unknown(f"line {line}: {source} is not known")


def _unknown(why: str) -> str:
    """An unknown value with the reason, as one word."""
    return UNKNOWN + why.replace(" ", "\N{NO-BREAK SPACE}") + UNKNOWN_END


def _word(text: str, line: int) -> Word:
    reasons = re.findall(f"{UNKNOWN}([^{UNKNOWN_END}]*){UNKNOWN_END}", text)
    why = tuple(dict.fromkeys(reason.replace("\N{NO-BREAK SPACE}", " ") for reason in reasons))
    return Word(re.sub(f"{UNKNOWN}[^{UNKNOWN_END}]*{UNKNOWN_END}", UNKNOWN, text), f"line {line}", why)
