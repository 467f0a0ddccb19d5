"""Read a shell script's variables and commands without running anything; what only a shell could tell stays unknown."""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from megajax.config.errors import UserError
from megajax.tools.flags import UNKNOWN, Word
from megajax.tools.shell_words import Array, Expansion, Literal, Part, RawWord, Statement, statements

NAME = r"[A-Za-z_]\w*"
ASSIGNMENT = re.compile(rf"({NAME})(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
OPENING = {"for", "while", "until", "case", "select", "{"}
CLOSING = {"fi", "done", "esac", "}"}
PASSING = {"do", "!", "time"}
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
DECLARING = {"export", "declare", "typeset", "local", "readonly"}
SURE = DECLARING | {"cd", "echo", "mkdir", "pushd", "popd", "set", "unset", "source", ".", ":", "true"}
"""Commands that are taken to succeed, whatever && or || stands behind them."""
CHANGING = {"read", "mapfile", "readarray", "getopts", "let", "((", "eval"}
"""Commands that set variables as only a shell could tell."""
ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a script, variables replaced by their values."""

    words: tuple[Word, ...]
    line: int


def read_script(text: str, *, arguments: Sequence[str] = (), defined: Mapping[str, str] | None = None) -> list[Command]:
    """The commands of a script, in order, as far as its own text tells them.

    arguments: what $1, $2, … stand for; defined: variables from outside, which win over assignments of the script.

    Raises:
        UserError: a quote or a bracket that nothing closes.
    """
    return _Reader(tuple(arguments), dict(defined or {})).run(text)


@dataclass
class _Part:
    """A part of the script that may be passed by: a branch of an if, a loop, a function."""

    runs: bool | None = None
    """None where only a shell could tell."""
    done: bool | None = None
    """Whether a branch before it ran."""
    function: bool = False
    """Whether it is a function's, whose $1, $2, ... are its own."""


@dataclass
class _Reader:
    """The variables as they are at one line of the script."""

    arguments: tuple[str, ...]
    defined: dict[str, str]
    variables: dict[str, list[Word]] = field(default_factory=dict)
    parts: list[_Part] = field(default_factory=list)
    condition: list[tuple[bool | None, str]] | None = None
    """The tests since an if, and what joins each with the next."""
    moved: str = ""
    ended: str = ""
    """The operator behind the statement before."""
    held: bool | None = True
    """Whether the statement before succeeded."""
    names_function: bool = False
    """Whether a name of a function came, and not yet its {."""

    def run(self, text: str) -> list[Command]:
        return [command for statement in statements(text) for command in self._statement(statement)]

    def _statement(self, statement: Statement) -> Iterator[Command]:
        words = list(statement.words)
        before, self.ended = self.ended, statement.end
        self.names_function |= before == "("
        while words and self._is_keyword(first := _plain(words[0])):
            if first in ("for", "select") and self._may_run():
                self._change(words[1:2], words[0].line)
            words = words[1 + (first == "function") :]
            self.held = None
        self.names_function &= not words
        if self.condition is not None:
            if words:
                self.condition.append((None if statement.redirected else self._tested(words), statement.end))
            return
        # What stands behind && runs where the statement before succeeded, behind || where it did not.
        runs = {"&&": self.held, "||": _not(self.held)}.get(before, True)
        if not words or runs is False or not self._may_run():
            return
        self.parts.append(_Part(runs=runs or None))
        yield from self._simple(words)
        self.parts.pop()
        self.held = self._succeeds(words, redirected=statement.redirected) if runs else None

    def _may_run(self) -> bool:
        return not any(part.runs is False for part in self.parts)

    def _succeeds(self, words: list[RawWord | Array], *, redirected: bool) -> bool | None:
        first = _plain(words[0])
        if first in ("[", "[[", "test"):
            return None if redirected else self._tested(words)
        return True if first in SURE or self._is_assignment(words, 0) else None

    def _is_keyword(self, word: str) -> bool:
        """Whether a first word is none of a command, with what follows from it."""
        if word in ("if", "elif"):
            if word == "if":
                self.parts.append(_Part(done=False))
            self.condition = []
        elif word == "then":
            self._branch(_decided(self.condition or []))
            self.condition = None
        elif word == "else":
            self._branch(True)
        elif word == "function":
            self.names_function = True
            return True
        elif word in OPENING:
            self.parts.append(_Part(function=word == "{" and self.names_function))
        elif word == "!" and self.condition is not None:
            return False
        elif word in CLOSING:
            self.parts = self.parts[:-1]
        return word in {"if", "elif", "then", "else"} | OPENING | CLOSING | PASSING

    def _branch(self, holds: bool | None) -> None:
        """The next branch of an if, which runs where this holds and none before it ran."""
        if self.parts:
            part = self.parts[-1]
            part.runs = _both(_not(part.done), holds)
            part.done = _not(_both(_not(part.done), _not(part.runs)))

    def _tested(self, words: list[RawWord | Array]) -> bool | None:
        """What [ … ], [[ … ]] or test says; None where that is not known."""
        name = _plain(words[0])
        if name == "[[" and not any(isinstance(word, Array) for word in words):
            fields = [self._joined(word.parts, word.line) for word in words if isinstance(word, RawWord)]
        else:
            fields = [found for word in words for found in self._fields(word)]
        texts = [one.text for one in fields[1:]]
        closing = {"[": "]", "[[": "]]"}.get(name)
        if any(one.unknown for one in fields) or (closing and texts[-1:] != [closing]):
            return None
        return _test(texts[:-1] if closing else texts) if closing or name == "test" else None

    def _simple(self, words: list[RawWord | Array]) -> Iterator[Command]:
        assignments = 0
        while assignments < len(words) and self._is_assignment(words, assignments):
            assignments += 1
        if assignments == len(words):
            self._assign_all(words)
            return
        first, line = _plain(words[assignments]), words[assignments].line
        if first in DECLARING:
            self._assign_all(words[assignments + 1 :])
            return
        if first == "shift" or (first == "set" and _sets_arguments(words[assignments + 1 :])):
            self.moved = f"changed by {first} in line {line}"
        if first in CHANGING or [first, *map(_plain, words[assignments + 1 : assignments + 2])] == ["printf", "-v"]:
            self._change(words[assignments + 1 :], line)
        if first == "unset":
            for word in words[assignments + 1 :]:
                self.variables.pop(_plain(word), None)
        fields = [found for word in words[assignments:] for found in self._fields(word)]
        if fields:
            yield from self._commands(fields, line)

    def _commands(self, fields: list[Word], line: int) -> Iterator[Command]:
        """The command, or the one that is a word of it: sh -c "python ..."."""
        inner = [word for word in fields if re.search(r"\.py\s", word.text)]
        if not inner:
            yield Command(tuple(fields), line)
        for word in inner:
            for command in _Reader((), {}).run(word.text):
                found = tuple(
                    replace(one, place=f"line {line}", unknown=word.unknown if UNKNOWN in one.text else ())
                    for one in command.words
                )
                yield Command(found, line)

    def _change(self, words: Sequence[RawWord | Array], line: int) -> None:
        """Variables that a command may set are not known behind it."""
        texts = [part.text for word in words if isinstance(word, RawWord) for part in word.parts[:1]
                 if isinstance(part, Literal)]  # fmt: skip
        for name in re.findall(rf"(?<![\w$-]){NAME}", " ".join(texts)):
            if name in self.variables:
                self._assign(
                    name, "", [_unknown(f"line {line}: only a shell can tell what ${name} is set to", line)], line
                )

    def _is_assignment(self, words: list[RawWord | Array], place: int) -> bool:
        word = words[place]
        return isinstance(word, Array) or ASSIGNMENT.fullmatch(word.start()) is not None

    def _assign_all(self, words: Sequence[RawWord | Array]) -> None:
        for word in words:
            if isinstance(word, Array):
                self._assign(word.name, word.adds, [f for one in word.words for f in self._fields(one)], word.line)
            elif match := ASSIGNMENT.fullmatch(word.start()):
                name, index, adds, _ = match.groups()
                # What follows the sign; the parts behind it are as they were.
                rest = word.without(match.start(4))
                value = self._joined(rest.parts, word.line)
                if index:
                    value = _unknown(f"line {word.line}: ${name} is set entry by entry", word.line)
                if adds and self.variables.get(name):
                    *before, last = self.variables[name]
                    value = _glued([last, value], word.line)
                    self._assign(name, "", [*before, value], word.line)
                else:
                    self._assign(name, "", [value], word.line)

    def _assign(self, name: str, adds: str, values: list[Word], line: int) -> None:
        if name in self.defined:
            return
        if self.parts and any(part.runs is None for part in self.parts):
            why = f"line {line}: ${name} is set where only a shell knows if it comes by"
            self.variables[name] = [_unknown(why, line)]
        else:
            self.variables[name] = [*self.variables.get(name, []), *values] if adds else values

    def _fields(self, word: RawWord | Array) -> list[Word]:
        """The words that this one becomes: variables outside quotes are split at blanks, arrays give one per entry."""
        if isinstance(word, Array):
            return [found for one in word.words for found in self._fields(one)]
        fields: list[list[Word]] = []
        open_field = False
        for part in word.parts:
            pieces, starts, ends = self._pieces(part, word.line)
            if starts or not open_field:
                fields.extend([[]] if pieces or part.quoted else [])
            for number, piece in enumerate(pieces):
                if number:
                    fields.append([])
                fields[-1].append(piece)
            open_field = bool(fields) and not ends if pieces or part.quoted else open_field and not starts
        return [_glued(pieces, word.line) for pieces in fields]

    def _pieces(self, part: Part, line: int) -> tuple[list[Word], bool, bool]:
        """Pieces of different words, whether the first begins a new word, whether the last ends one."""
        if not isinstance(part, Expansion):
            return [Word(part.text, f"line {line}")], False, False
        values = self._value(part.source, line)
        if part.quoted:
            if not part.source.rstrip("}").endswith("[@]") and part.source not in ("@", "{@}"):
                values = [_glued(_spaced(values), line)]
            return values, False, False
        pieces = [replace(value, text=text) for value in values for text in value.text.split()]
        starts = bool(values) and values[0].text[:1].isspace()
        ends = bool(values) and values[-1].text[-1:].isspace()
        return pieces, starts, ends

    def _joined(self, parts: Sequence[Part], line: int) -> Word:
        """Parts as one word, as an assignment takes them."""
        found = []
        for part in parts:
            found += _spaced(self._value(part.source, line)) if isinstance(part, Expansion) else [Word(part.text)]
        return _glued(found, line)

    def _value(self, source: str, line: int) -> list[Word]:
        """What stands behind a $: NAME, {NAME}, {NAME[@]}, {NAME:-default}, 1, @, ((sum)) or (command)."""
        if source.startswith("(("):
            return [self._sum(source[2:-2], line)]
        if source.startswith(("(", "`")):
            return [_unknown(f"line {line}: only a shell can run {'$' * (source[0] == '(')}{source}", line)]
        inner = source[1:-1] if source.startswith("{") else source
        match = re.fullmatch(rf"({NAME}|\d+|[@*])(\[[@*]\])?(?:(:?[-=])(.*))?", inner, re.DOTALL)
        if match is None:
            return [_unknown(f"line {line}: ${source} is more than this reads", line)]
        name, _, sign, default = match.groups()
        known = self._known(name, line)
        if sign and (known is None or (sign[0] == ":" and not "".join(word.text for word in known))):
            return [self._joined(RawWord.of(default, line).parts, line)]
        if known is None:
            whose = "a function" if any(part.function for part in self.parts) else "the script"
            what = f"argument {name} of {whose} is" if name.isdigit() else f"${name} is"
            return [_unknown(f"line {line}: {what} not known{self.moved and f' ({self.moved})'}", line)]
        return known

    def _known(self, name: str, line: int) -> list[Word] | None:
        place = f"line {line}"
        if (name in "@*" or name.isdigit()) and any(part.function for part in self.parts):
            return None
        if name in "@*":
            return None if self.moved else [Word(text, place) for text in self.arguments]
        if name.isdigit():
            number = int(name) - 1
            there = not self.moved and 0 <= number < len(self.arguments)
            return [Word(self.arguments[number], place)] if there else None
        if name in self.defined:
            return [Word(self.defined[name], place)]
        values = self.variables.get(name)
        return None if values is None else [replace(value, place=place) for value in values]

    def _sum(self, source: str, line: int) -> Word:
        """A sum of whole numbers."""
        names = re.sub(rf"\$?\{{?\b({NAME})\b\}}?", lambda m: self._joined([Expansion(m[1])], line).text, source)
        try:
            return Word(str(_calculated(ast.parse(names.replace("/", "//").strip(), mode="eval").body)), f"line {line}")
        except (SyntaxError, ValueError, ZeroDivisionError):
            return _unknown(f"line {line}: $(({source})) is not known", line)


def _calculated(node: ast.AST) -> int:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in ARITHMETIC:
            return ARITHMETIC[type(sign)](_calculated(left), _calculated(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_calculated(operand)
    raise ValueError("more than sums of whole numbers")


def _both(one: bool | None, other: bool | None) -> bool | None:
    """And, with None for what is not known."""
    if one is False or other is False:
        return False
    return None if one is None or other is None else True


def _not(one: bool | None) -> bool | None:
    return None if one is None else not one


def _decided(tests: Sequence[tuple[bool | None, str]]) -> bool | None:
    """Tests joined by && and ||, from left to right."""
    if not tests or any(end not in ("&&", "||") for _, end in tests[:-1]) or tests[-1][1] not in (";", "\n"):
        return None
    holds = tests[0][0]
    for (_, join), (test, _) in pairwise(tests):
        holds = _both(holds, test) if join == "&&" else _not(_both(_not(holds), _not(test)))
    return holds


def _test(words: list[str]) -> bool | None:
    """A comparison of texts or whole numbers, or whether a text is empty; None for another test."""
    match words:
        case ["!", _, *_]:
            return _not(_test(words[1:]))
        case [word]:
            return bool(word)
        case ["-z" | "-n" as sign, word]:
            return (word == "") == (sign == "-z")
        case [one, "=" | "==" | "!=" as sign, other] if not re.search(r"[*?\[]", other):
            return (one == other) == (sign != "!=")
        case [one, sign, other] if sign in COMPARISONS and (one + other).isdigit():
            return COMPARISONS[sign](int(one), int(other))
    return None


def _sets_arguments(words: Sequence[RawWord | Array]) -> bool:
    """Whether what follows `set` is more than options such as -euo pipefail."""
    texts = [_plain(word) for word in words]
    return any(
        text[:1] not in ("-", "+") or text in ("-", "--")
        for place, text in enumerate(texts)
        if not (place and texts[place - 1][:1] in ("-", "+") and texts[place - 1].endswith("o"))
    )


def _plain(word: RawWord | Array) -> str:
    return "" if isinstance(word, Array) else word.plain()


def _unknown(why: str, line: int) -> Word:
    return Word(UNKNOWN, f"line {line}", (why,))


def _spaced(values: Sequence[Word]) -> list[Word]:
    """Entries of an array with blanks between."""
    return [one for number, value in enumerate(values) for one in ([Word(" ")] if number else []) + [value]]


def _glued(words: Sequence[Word], line: int) -> Word:
    unknown = tuple(dict.fromkeys(why for word in words for why in word.unknown))
    return Word("".join(word.text for word in words), f"line {line}", unknown)


@dataclass(frozen=True, slots=True)
class Training:
    """The command of a script that trains, and what its launcher says."""

    script: str
    words: tuple[Word, ...]
    devices: int | None = None
    """Processes, one for each GPU, where torchrun is told both counts."""


def find_training(commands: Sequence[Command], place: str) -> Training:
    """The command that runs a Python file with flags, pretrain_*.py before others.

    Raises:
        UserError: none, or several.
    """
    for command in commands:
        if command.words[0].text.startswith("--"):
            what = f"line {command.line}: {command.words[0].text} belongs to no command"
            raise UserError(f"{place}, {what}: the line before has a comment, or no \\ at its very end")
    found = [training for command in commands if (training := as_training(command.words)) is not None]
    found = [one for one in found if any(word.text.startswith("--") for word in one.words)] or found
    named = [one for one in found if one.script.rpartition("/")[2].startswith("pretrain")] or found
    if not named:
        raise UserError(f"{place}: no command runs a Python file, such as torchrun … pretrain_gpt.py --num-layers …")
    if len(named) > 1:
        scripts = ", ".join(f"{one.script} ({one.words[0].place if one.words else 'without flags'})" for one in named)
        raise UserError(f"{place}: several commands train: {scripts}. Leave one of them in the script.")
    return named[0]


def as_training(words: Sequence[Word]) -> Training | None:
    """`[launcher …] FILE.py [flags …]`, or None for another command."""
    place = next((number for number, word in enumerate(words) if word.text.endswith(".py")), None)
    if place is None:
        return None
    counts = {}
    texts = [text for word in words[:place] for text in word.text.split("=")]
    for name, value in pairwise(texts):
        if name.startswith("-") and value.isdigit():
            counts[name.strip("-").replace("-", "_")] = int(value)
    each, nodes = counts.get("nproc_per_node"), counts.get("nnodes", 1)
    return Training(words[place].text, tuple(words[place + 1 :]), each and each * nodes)
