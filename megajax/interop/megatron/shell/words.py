"""Expand the words of a script: quotes, $NAME, ${…}, $((…)) and $(…); and evaluate its arithmetic and conditions.

Arithmetic is that of whole numbers as far as it is Python's. A condition is true, false or not known.
"""

import ast
import fnmatch
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megajax.config.errors import UserError
from megajax.interop.megatron.shell.state import State, Value, is_known, plain
from megajax.interop.megatron.shell.syntax import NAME, Document, pieces

type Number = int | None
"""None: not known."""

PARAMETER = re.compile(
    rf"(?P<hash>#(?=.))?(?P<name>{NAME}|\d+|[@*#?$-])(?:\[(?P<index>[^]]*)\])?"
    r"(?:(?P<operation>:?[-=?+]|%%?|##?|//?)(?P<rest>.*))?",
    re.DOTALL,
)
LIST = re.compile(r"\$\{?@|\[@\]")
RANGE = re.compile(r"\{(-?\d{1,6})\.\.(-?\d{1,6})\}")
LONGEST = 10_000
"""Characters of a value that patterns are compared with, and entries of {1..N}."""
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
        if match := RANGE.fullmatch(word):
            low, high = int(match[1]), int(match[2])
            step = 1 if high >= low else -1
            if abs(high - low) <= LONGEST:
                return [str(number) for number in range(low, high + step, step)]
        words: list[str] = []
        current: str | None = None
        for piece in pieces(word):
            entries, is_whole = self.entries(piece), is_quoted(piece)
            if is_expansion(piece):
                entries = re.split(r"[ \t\n]+", " ".join(entries))
            for number, entry in enumerate(entries):
                if number and current is not None:
                    words.append(current)
                    current = None
                if entry or is_whole:
                    current = (current or "") + entry
        return words if current is None else [*words, current]

    def text(self, word: str) -> str:
        """The expansion of a word without splitting, as in an assignment."""
        return "".join(" ".join(self.entries(piece)) for piece in pieces(word))

    def entries(self, piece: str) -> Sequence[str]:
        """The values of a piece of a word; an array in double quotes has several."""
        if piece[0] == "\\":
            return [piece[1:].strip("\n")]
        if piece.startswith("$'"):
            return [re.sub(r"\\(.)", lambda match: ESCAPES.get(match[1], match[1]), piece[2:-1])]
        if is_quoted(piece):
            return [piece[1:-1]] if piece[0] == "'" else self.inside(piece[1:-1])
        return self.values(piece) if is_expansion(piece) else [piece]

    def inside(self, text: str, quote: str = '"') -> list[str]:
        """The value of a text in double quotes, or in a here-document (<); several where it holds ${NAME[@]}."""
        words = [""]
        for piece in pieces(text, quote):
            entries: Sequence[str] = [piece]
            if piece[0] == "\\" and piece[1:] in ("\n", quote, "$", "`", "\\"):
                entries = [piece[1:].strip("\n")]
            elif is_expansion(piece):
                entries = self.values(piece)
                if not LIST.search(piece):
                    entries = [" ".join(entries)]
                elif not entries and piece == text:
                    return []
            words[-1] += "".join(entries[:1])
            words += entries[1:]
        return words

    def document(self, document: Document) -> str:
        """The text of a here-document, or of the word after <<<."""
        if document.kind == "expands":
            return "".join(" ".join(self.inside(line, "<")) for line in document.text.splitlines(keepends=True))
        return document.text if document.kind == "plain" else self.text(document.text)

    def pattern(self, word: str) -> re.Pattern | None:
        """A regular expression for a pattern with * ? [ ]; None: not known, or with a class such as [:alpha:].

        Quoted parts match themselves.
        """
        text = ""
        for piece in pieces(word):
            value = " ".join(self.entries(piece))
            text += re.sub(r"([*?[])", r"[\1]", value) if is_quoted(piece) else value
        is_read = is_known(text) and len(text) <= LONGEST and "[:" not in text
        return re.compile(fnmatch.translate(text.replace("[^", "[!"))) if is_read else None

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

    def number(self, text: str) -> Number:
        """The value of arithmetic."""
        text = "".join(" ".join(self.values(piece)) if is_expansion(piece) else piece for piece in pieces(text))

        def value_of(name: str) -> str:
            return " ".join(self.parameter(name, f"${name}"))

        def assign(name: str, value: Number) -> None:
            number = self.unknown(f"${name} is not known") if value is None else str(value)
            self.state.assign(name, number, *(self.state.value(name) or ())[1:])

        try:
            return evaluate(text.replace('"', ""), value_of, assign) if is_known(text) else None
        except UserError as error:
            raise UserError(f"line {self.line}: {error}") from error

    def parameter(self, inner: str, source: str) -> Sequence[str]:
        """The values of the inner part of ${…}."""
        match = PARAMETER.fullmatch(inner)
        if match is None:
            return [self.unknown(f"the expansion {source} is not supported")]
        name, index, operation = match["name"], match["index"], match["operation"] or ""
        is_list = name in "@*" or index in ("@", "*")
        values = self.look_up(name, index, is_list=is_list)
        if match["hash"]:
            return [str(len(values or ()) if is_list else len("".join(values or ())))]
        if operation and operation[-1] in "-=?+":
            return self.default(name, values, operation, match["rest"])
        if values is None:
            return self.state.missing_value(name, self.line)
        return self.changed(values, operation, match["rest"], source) if operation else values

    def look_up(self, name: str, index: str | None, *, is_list: bool) -> Value | None:
        """The values of a variable or of an argument; None: not set."""
        arguments = tuple(self.state.arguments)
        special: dict[str, Value | None] = {"#": (str(len(arguments)),), "0": (self.state.script,), "-": ("",)}
        if name in ("@", "*"):
            return arguments
        if name in special:
            return special[name]
        if name.isdigit():
            return arguments[int(name) - 1 : int(name)] or None
        value = self.state.value(name)
        if value is None:
            return () if is_list and self.state.missing is not None else None
        return value if is_list else self.entry(value, index)

    def entry(self, value: Value, index: str | None) -> Value | None:
        """An entry of an array, the first without an index; None: there is none."""
        number = 0 if index is None else self.number(self.text(index))
        if number is None:
            return (self.unknown(f"the index {index} is not known"),)
        return (value[number],) if -len(value) <= number < len(value) else None

    def changed(self, values: Value, operation: str, rest: str, source: str) -> Sequence[str]:
        """${NAME/text/text}, ${NAME#pattern} and ${NAME%pattern}."""
        parts = pieces(rest)
        border = parts.index("/") if operation[0] == "/" and "/" in parts else len(parts)
        old, new = (self.text("".join(part)) for part in (parts[:border], parts[border + 1 :]))
        pattern = self.pattern("".join(parts[:border]))
        if pattern is None or any(len(value) > LONGEST or not is_known(value) for value in values):
            return [self.unknown(f"{plain(source)} is not known")]
        if operation[0] != "/":
            return [_trimmed(value, pattern, operation) for value in values]
        if not re.fullmatch(r"[^#%*?[][^*?[]*", old) or len(new) > LONGEST // 100:
            return [self.unknown(f"the expansion {plain(source)} is not supported")]
        return [value.replace(old, new, -1 if operation == "//" else 1) for value in values]

    def default(self, name: str, values: Value | None, operation: str, rest: str) -> Sequence[str]:
        """${NAME:-default} and its kin."""
        is_set = values is not None and (operation[0] != ":" or bool("".join(values)))
        if operation[-1] == "+":
            return self.fields(rest) if is_set else []
        if is_set and values is not None:
            return values
        if operation[-1] == "?":
            return self.state.missing_value(name, self.line)
        default = self.text(rest)
        if operation[-1] == "=":
            self.state.assign(name, default)
        return [default]


def is_quoted(piece: str) -> bool:
    """Whether a piece of a word is '…', "…", $'…' or an escaped character."""
    return piece[0] in "\"'\\" or piece.startswith("$'")


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
        if not is_known(character) or character == "\ufffe":
            raise UserError(f"it has the character U+{ord(character):04X}, which is reserved for internal use")
    return text


ASSIGNMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:(\+\+|--)\s*|([-+*/%]?)=(?!=)(.*))", re.DOTALL)
INNER = re.compile(r"\+\+|--|(?<![=!<>])=(?!=)")
LENGTH, LARGEST = 200, 2**62


def _quotient(left: int, right: int) -> int:
    """Rounded towards zero."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


OPERATORS: Mapping[type, Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda left, right: left - right * _quotient(left, right),
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.And: lambda *values: all(values),
    ast.Or: lambda *values: any(values),
}


def evaluate(text: str, value_of: Callable[[str], str], assign: Callable[[str, Number], None]) -> Number:
    """The value of an expression, and the assignment that it may be; None: not known, or not supported.

    value_of: the text of a variable. assign: sets a variable.

    Raises:
        UserError: an assignment inside of an expression.
    """
    if (match := ASSIGNMENT.fullmatch(text)) is None:
        if INNER.search(text):
            raise UserError(f"an assignment inside of (({text})) is not supported: write it as a command of its own")
        return value(text, value_of)
    name, step, symbol, right = match.groups()
    before = value(name, value_of) if step or symbol else None
    after = value(f"{name} {step[0]} 1" if step else f"{name} {symbol} ({right})" if symbol else right, value_of)
    assign(name, after)
    return before if step else after


def value(text: str, value_of: Callable[[str], str]) -> Number:
    """The value of an expression without assignments."""

    def number(node: Any) -> int:
        match node:
            case ast.Constant(value=int(constant)) if not isinstance(constant, bool):
                return constant
            case ast.Name(id=name):
                if not re.fullmatch(r"\s*[-+]?(0|[1-9]\d{0,17})?\s*", constant := value_of(name)):
                    raise ValueError("not a decimal number")
                return int(constant.strip() or 0)
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
                operands = [left, right]
            case ast.BoolOp(op=op, values=operands):
                pass
            case ast.UnaryOp(op=op, operand=operand):
                operands = [operand]
            case _:
                raise ValueError("not a number")
        result = int(OPERATORS[type(op)](*map(number, operands)))
        if abs(result) > LARGEST:
            raise ValueError("too large")
        return result

    source = " ".join(text.replace("&&", " and ").replace("||", " or ").split()) or "0"
    try:
        return number(ast.parse(source, mode="eval").body) if len(text) <= LENGTH else None
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
        return None


type Truth = bool | None
"""None: not known."""

FILE_TESTS: dict[str, Callable[[str], bool]] = {
    "-e": os.path.exists,
    "-f": os.path.isfile,
    "-d": os.path.isdir,
    **dict.fromkeys(("-r", "-s", "-w", "-x"), os.path.exists),
}
NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-lt": int.__lt__,
    "-le": int.__le__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
}
TEXTS = ("=", "==", "!=", "<", ">", "=~")


def conjunction(left: Truth, right: Truth) -> Truth:
    """left and right."""
    if left is False or right is False:
        return False
    return None if None in (left, right) else True


def inverse(value: Truth) -> Truth:
    """not value."""
    return None if value is None else not value


@dataclass
class Test:
    """The tokens of a condition that are not evaluated so far. In [[ ]] they are words before expansion."""

    tokens: list[str]
    words: Words
    extended: bool
    """Whether it is [[ ]]."""

    def value(self) -> Truth:
        """The value of all tokens."""
        value = self.any() if self.tokens else False
        return None if self.tokens else value

    def text(self, token: str) -> str:
        """The value of an operand."""
        return self.words.text(token) if self.extended else token

    def takes(self, *tokens: str) -> bool:
        """Step behind the next token if it is one of these."""
        return bool(self.tokens) and self.tokens[0] in tokens and bool(self.tokens.pop(0))

    def any(self) -> Truth:
        """Conditions joined by || or -o."""
        value = self.all()
        while self.takes("||" if self.extended else "-o"):
            value = inverse(conjunction(inverse(value), inverse(self.all())))
        return value

    def all(self) -> Truth:
        """Conditions joined by && or -a."""
        value = self.condition()
        while self.takes("&&" if self.extended else "-a"):
            value = conjunction(value, self.condition())
        return value

    def condition(self) -> Truth:
        """One condition, or several in brackets."""
        if len(self.tokens) > 2 and (self.tokens[1] in TEXTS or self.tokens[1] in NUMBERS):
            left, operator, right = self.tokens[:3]
            del self.tokens[:3]
            return self.compare(self.text(left), operator, right)
        if not self.tokens:
            return None
        token = self.tokens.pop(0)
        if token == "!":
            return inverse(self.condition())
        if token == "(" and self.tokens:
            value = self.any()
            return value if self.takes(")") else None
        if re.fullmatch(r"-[a-zA-Z]", token) and self.tokens and self.tokens[0] not in ("&&", "||", ")"):
            return self.single(token, self.text(self.tokens.pop(0)))
        return self.is_filled(self.text(token))

    def is_filled(self, text: str) -> Truth:
        """Whether a text is not empty."""
        return None if text and all(not is_known(character) for character in text) else bool(text)

    def single(self, operator: str, operand: str) -> Truth:
        """An operator with one operand."""
        state = self.words.state
        if operator == "-n":
            return self.is_filled(operand)
        if operator == "-z":
            return inverse(self.is_filled(operand))
        if operator in FILE_TESTS and is_known(operand) and operand:
            path = state.path(operand)
            if FILE_TESTS[operator](path):
                place = state.place(self.words.line)
                state.report.note(f"{place}: {operator} {plain(operand)} is true: {plain(path)} exists")
                return True
        return None

    def compare(self, left: str, operator: str, right: str) -> Truth:
        """An operator with two operands; `left` is a value. < > and =~ are not evaluated."""
        if operator in NUMBERS:
            numbers = [self.words.number(text) if text.strip() else None for text in (left, self.text(right))]
            first, second = numbers
            return None if first is None or second is None else NUMBERS[operator](first, second)
        if operator in ("<", ">", "=~") or not is_known(left):
            return None
        if self.extended:
            pattern = self.words.pattern(right)
            is_equal = None if pattern is None else pattern.match(left) is not None
        else:
            is_equal = left == right if is_known(right) else None
        return is_equal if operator != "!=" else inverse(is_equal)
