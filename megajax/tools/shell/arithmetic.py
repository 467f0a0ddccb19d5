"""Whole-number arithmetic of a shell: $((…)), ((…)) and let."""

import operator
import re
from collections.abc import Callable, Mapping

TOKEN = re.compile(
    r"\s*(0[xX][\da-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|<<|>>|[<>=!]=|&&|\|\||\+\+|--|[-+*/%]=|[-+*/%<>!~?:()=,&|^])"
)
LENGTH, LARGEST = 1000, 2**62

type Number = int | None
"""None: not known."""


def _quotient(left: int, right: int) -> int:
    """Rounded towards zero."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _power(left: int, right: int) -> int:
    if not 0 <= right <= 62:
        raise ValueError("the exponent is out of range")
    return left**right


LEVELS: tuple[Mapping[str, Callable[[int, int], int]], ...] = (
    {"||": lambda left, right: bool(left or right)},
    {"&&": lambda left, right: bool(left and right)},
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    {"<<": lambda left, right: left * _power(2, right), ">>": lambda left, right: left // _power(2, right)},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": _quotient, "%": lambda left, right: left - right * _quotient(left, right)},
    {"**": _power},
)
"""Operators, the loosest first."""
SIGNS: Mapping[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "!": operator.not_,
    "~": operator.inv,
}


class Expression:
    """Evaluates an expression.

    value_of: the value of a variable, None: not known. assign: sets a variable.
    """

    def __init__(self, text: str, value_of: Callable[[str], str | None], assign: Callable[[str, Number], None]):
        self.value_of, self.assign = value_of, assign
        self.is_read = len(text) <= LENGTH and not TOKEN.sub("", text).strip()
        self.tokens = TOKEN.findall(text) if self.is_read else []

    def value(self) -> Number:
        """The value of the expression; None: not known, or not a valid expression."""
        try:
            value = self.list() if self.tokens else 0
        except (ValueError, ZeroDivisionError, IndexError, RecursionError):
            return None
        return value if self.is_read and not self.tokens else None

    def take(self, *texts: str) -> str:
        """The next token if it is one of these, or ''."""
        return self.tokens.pop(0) if self.tokens and self.tokens[0] in texts else ""

    def list(self) -> Number:
        """Expressions separated by commas: the last value."""
        value = self.choice()
        while self.take(","):
            value = self.choice()
        return value

    def choice(self) -> Number:
        """condition ? value : value, or an assignment."""
        if self.tokens[1:] and re.fullmatch(r"[-+*/%]?=", self.tokens[1]):
            name, symbol = self.tokens.pop(0), self.tokens.pop(0)[:-1]
            value = self.choice()
            return self.set(name, combine(symbol, self.number(name), value) if symbol else value)
        condition = self.level(0)
        if not self.take("?"):
            return condition
        first = self.choice()
        if not self.take(":"):
            raise ValueError("? without :")
        second = self.choice()
        return None if condition is None else first if condition else second

    def set(self, name: str, value: Number) -> Number:
        """Set a variable."""
        if not name.isidentifier():
            raise ValueError(f"{name} is not a variable")
        self.assign(name, value)
        return value

    def level(self, number: int) -> Number:
        """Operators of one level, from the left."""
        if number == len(LEVELS):
            return self.single()
        value = self.level(number + 1)
        while symbol := self.take(*LEVELS[number]):
            value = combine(symbol, value, self.level(number if symbol == "**" else number + 1))
        return value

    def single(self) -> Number:
        """A number, a variable, brackets, or a sign before one of them."""
        if symbol := self.take(*SIGNS):
            value = self.single()
            return None if value is None else int(SIGNS[symbol](value))
        if symbol := self.take("++", "--"):
            name = self.tokens.pop(0)
            return self.set(name, combine(symbol[0], self.number(name), 1))
        if self.take("("):
            value = self.list()
            if not self.take(")"):
                raise ValueError("unclosed (")
            return value
        name = self.tokens.pop(0)
        value = self.number(name)
        if symbol := self.take("++", "--"):
            self.set(name, combine(symbol[0], value, 1))
        return value

    def number(self, text: str) -> Number:
        """The value of a number or of a variable that holds one."""
        if text[0].isdigit():
            value = int(text[:20], 8 if re.fullmatch(r"0\d+", text) else 0)
            return value if value <= LARGEST and len(text) <= 20 else None
        if not text.isidentifier():
            raise ValueError(f"{text} is not a value")
        value_text = self.value_of(text)
        if value_text is None or not re.fullmatch(r"\s*[-+]?\d{1,18}\s*", value_text):
            return 0 if value_text is not None and not value_text.strip() else None
        return int(value_text)


def combine(symbol: str, left: Number, right: Number) -> Number:
    """The value of an operator."""
    if left is None or right is None:
        return None
    value = int(next(level[symbol] for level in LEVELS if symbol in level)(left, right))
    return value if abs(value) <= LARGEST else None
