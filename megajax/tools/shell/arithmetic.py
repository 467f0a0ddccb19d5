"""Whole-number arithmetic of a shell: $((…)), ((…)) and let."""

import operator
import re
from collections.abc import Callable, Mapping

TOKEN = re.compile(
    r"\s*(?:(?P<number>0[xX][\da-fA-F]+|\d+#\w+|\d+)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<operator>\*\*|<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%]=|[-+*/%<>!~?:()=,&|^]))"
)
LENGTH, LARGEST, BRACKETS = 1000, 2**62, 50

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


def _shift(left: int, right: int) -> int:
    return left * _power(2, right)


LEVELS: tuple[Mapping[str, Callable[[int, int], int]], ...] = (
    {"||": lambda left, right: int(bool(left or right))},
    {"&&": lambda left, right: int(bool(left and right))},
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    {"<<": _shift, ">>": lambda left, right: left >> min(max(right, 0), 63)},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": _quotient, "%": lambda left, right: left - right * _quotient(left, right)},
    {"**": _power},
)
"""Operators, the loosest first."""


def evaluate(text: str, value_of: Callable[[str], str | None], assign: Callable[[str, Number], None]) -> Number:
    """The value of an expression; None: not known, or not a valid expression.

    value_of: the value of a variable, None: not known. assign: sets a variable.
    """
    tokens, place = [], 0
    text = text.strip()
    while place < len(text):
        match = TOKEN.match(text, place)
        if match is None or len(text) > LENGTH:
            return None
        tokens.append((match.lastgroup or "", match[match.lastgroup or 0]))
        place = match.end()
    if not tokens:
        return 0
    try:
        expression = _Expression(tokens, value_of, assign)
        value = expression.list()
        return value if not expression.tokens else None
    except (ValueError, ZeroDivisionError, IndexError):
        return None


class _Expression:
    """The tokens that are not evaluated so far."""

    def __init__(
        self,
        tokens: list[tuple[str, str]],
        value_of: Callable[[str], str | None],
        assign: Callable[[str, Number], None],
    ):
        self.tokens, self.value_of, self.assign, self.brackets = tokens, value_of, assign, 0

    def take(self, *texts: str) -> str:
        """The next operator if it is one of these, or ''."""
        if self.tokens and self.tokens[0][1] in texts:
            return self.tokens.pop(0)[1]
        return ""

    def list(self) -> Number:
        """Expressions separated by commas: the last value."""
        value = self.choice()
        while self.take(","):
            value = self.choice()
        return value

    def choice(self) -> Number:
        """condition ? value : value, or an assignment."""
        symbol = self.tokens[1][1] if len(self.tokens) > 1 and self.tokens[0][0] == "name" else ""
        if symbol in ("=", "+=", "-=", "*=", "/=", "%="):
            return self.assignment()
        condition = self.level(0)
        if not self.take("?"):
            return condition
        first = self.choice()
        if not self.take(":"):
            raise ValueError("? without :")
        second = self.choice()
        return None if condition is None else first if condition else second

    def assignment(self) -> Number:
        """NAME = value, NAME += value, …"""
        (_, name), (_, symbol) = self.tokens[:2]
        del self.tokens[:2]
        value = self.choice()
        if symbol != "=":
            value = self.combine(symbol[:-1], self.number(name), value)
        self.assign(name, value)
        return value

    def level(self, number: int) -> Number:
        """Operators of one level, from the left."""
        if number == len(LEVELS):
            return self.single()
        value = self.level(number + 1)
        while symbol := self.take(*LEVELS[number]):
            value = self.combine(symbol, value, self.level(number if symbol == "**" else number + 1))
        return value

    def combine(self, symbol: str, left: Number, right: Number) -> Number:
        """The value of an operator."""
        if left is None or right is None:
            return None
        value = int(next(level[symbol] for level in LEVELS if symbol in level)(left, right))
        return value if abs(value) <= LARGEST else None

    def single(self) -> Number:
        """A number, a variable, brackets, or a sign before one of them."""
        if symbol := self.take("-", "+", "!", "~", "++", "--"):
            if symbol in ("++", "--"):
                return self.step(self.tokens.pop(0)[1], symbol, before=True)
            value = self.single()
            signs: Mapping[str, Callable[[int], int]] = {"-": operator.neg, "!": operator.not_, "~": operator.inv}
            return value if value is None or symbol == "+" else int(signs[symbol](value))
        if self.take("("):
            self.brackets += 1
            value = self.list()
            if not self.take(")") or self.brackets > BRACKETS:
                raise ValueError("unclosed (")
            return value
        kind, text = self.tokens.pop(0)
        if kind == "name" and (symbol := self.take("++", "--")):
            return self.step(text, symbol, before=False)
        if kind == "operator":
            raise ValueError(f"{text} is not a value")
        return self.number(text)

    def step(self, name: str, symbol: str, *, before: bool) -> Number:
        """NAME++ and its kin."""
        value = self.number(name)
        new = None if value is None else value + (1 if symbol == "++" else -1)
        self.assign(name, new)
        return new if before else value

    def number(self, text: str) -> Number:
        """The value of a number or of a variable that holds one."""
        if text[0].isdigit():
            base, mark, digits = text.partition("#")
            if not mark and re.fullmatch(r"0\d+", text):
                return int(text, 8)
            value = int(digits, int(base)) if mark else int(text[:20], 0)
            return value if value <= LARGEST and len(text) <= 20 else None
        value_text = self.value_of(text)
        if value_text is None or not re.fullmatch(r"\s*[-+]?\d{1,18}\s*", value_text):
            return 0 if value_text is not None and not value_text.strip() else None
        return int(value_text)
