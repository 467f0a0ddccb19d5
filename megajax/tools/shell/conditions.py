"""Conditions of a shell: [ … ], [[ … ]] and test. Their value is true, false or not known."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megajax.tools.shell.state import is_known, plain
from megajax.tools.shell.words import Words

type Truth = bool | None
"""None: not known."""

FILE_TESTS: dict[str, Callable[[str], bool]] = {
    **{"-e": os.path.exists, "-f": os.path.isfile, "-d": os.path.isdir, "-L": os.path.islink, "-h": os.path.islink},
    **{f"-{letter}": os.path.exists for letter in "rwxsa"},
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
UNREAD = re.compile(r"\)[*+?{]|\[\[|\[:|--|&&|~~|\|\|")
"""Parts of patterns that take long, or that mean something else to Python."""
REPETITION = re.compile(r"(?<!\\)[*+?{]")


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

    def text(self, token: str) -> str:
        """The value of an operand."""
        return self.words.text(token) if self.extended else token

    def value(self) -> Truth:
        """The value of all tokens."""
        if not self.extended and len(self.tokens) <= 4:
            return self.short()
        value = self.any()
        return value if not self.tokens else None

    def short(self) -> Truth:
        """[ ] with up to four operands: their number decides what they mean."""
        tokens = self.tokens
        if tokens and tokens[0] == "!":
            return inverse(Test(tokens[1:], self.words, extended=False).short())
        match tokens:
            case []:
                return False
            case [operand]:
                return self.is_filled(operand)
            case [operator, operand]:
                return self.single(operator, operand)
            case [left, operator, right] if operator in TEXTS or operator in NUMBERS:
                return self.compare(left, operator, right)
        return self.any()

    def any(self) -> Truth:
        """Conditions joined by || or -o."""
        value = self.all()
        while self.tokens and self.tokens[0] == ("||" if self.extended else "-o"):
            self.tokens.pop(0)
            value = inverse(conjunction(inverse(value), inverse(self.all())))
        return value

    def all(self) -> Truth:
        """Conditions joined by && or -a."""
        value = self.one_condition()
        while self.tokens and self.tokens[0] == ("&&" if self.extended else "-a"):
            self.tokens.pop(0)
            value = conjunction(value, self.one_condition())
        return value

    def one_condition(self) -> Truth:
        """One condition, or several in brackets."""
        if not self.tokens:
            return None
        token = self.tokens.pop(0)
        if token == "!":
            return inverse(self.one_condition())
        if token == "(" and self.extended:
            value = self.any()
            if self.tokens:
                self.tokens.pop(0)
            return value
        if len(self.tokens) > 1 and (self.tokens[0] in TEXTS or self.tokens[0] in NUMBERS):
            operator, right = self.tokens.pop(0), self.tokens.pop(0)
            return self.compare(self.text(token), operator, right)
        if re.fullmatch(r"-[a-zA-Z]", token) and self.tokens and self.tokens[0] not in ("&&", "||", ")"):
            return self.single(token, self.text(self.tokens.pop(0)))
        return self.is_filled(self.text(token))

    def is_filled(self, text: str) -> Truth:
        """Whether a text is not empty."""
        return None if text and all(not is_known(character) for character in text) else bool(text)

    def single(self, operator: str, operand: str) -> Truth:
        """An operator with one operand."""
        if operator == "!":
            return inverse(self.is_filled(operand))
        if operator in ("-n", "-z"):
            is_filled = self.is_filled(operand)
            return is_filled if operator == "-n" else inverse(is_filled)
        if operator == "-v":
            is_set = self.words.state.value(operand) is not None
            if not is_set and self.words.state.missing is not None:
                self.words.state.missing.append(f"${operand}")
            return is_set
        if operator in FILE_TESTS and is_known(operand) and operand:
            path = self.words.state.path(operand)
            if FILE_TESTS[operator](path):
                place = self.words.state.place(self.words.line)
                self.words.state.report.note(f"{place}: {operator} {plain(operand)} is true: {plain(path)} exists")
                return True
        return None

    def compare(self, left: str, operator: str, right: str) -> Truth:
        """An operator with two operands; `left` is a value."""
        if operator in NUMBERS:
            numbers = [self.words.number(text) if text.strip() else None for text in (left, self.text(right))]
            first, second = numbers
            return None if first is None or second is None else NUMBERS[operator](first, second)
        if operator in ("<", ">") or not is_known(left):
            return None
        if operator == "=~":
            return self.matches(left, right)
        if self.extended:
            pattern = self.words.pattern(right)
            is_equal = None if pattern is None else re.match(pattern, left) is not None
        else:
            is_equal = left == right if is_known(right) else None
        return is_equal if operator != "!=" else inverse(is_equal)

    def matches(self, left: str, right: str) -> Truth:
        """left =~ right, for patterns that take little time."""
        pattern = self.words.text(right)
        is_short = len(left) <= 200 and len(pattern) <= 200 and is_known(pattern)
        if not is_short or len(REPETITION.findall(pattern)) > 3 or UNREAD.search(pattern):
            return None
        try:
            return re.search(pattern, left) is not None
        except re.error:
            return None


def evaluate_test(tokens: Sequence[str], words: Words, *, extended: bool) -> Truth:
    """The value of [ tokens ] after expansion, or of [[ tokens ]] before it."""
    return Test([*tokens], words, extended).value()
