"""Conditions of a shell: [ … ], [[ … ]] and test. Their value is true, false or not known."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from megajax.interop.megatron.shell.state import is_known, plain
from megajax.interop.megatron.shell.words import Words

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
