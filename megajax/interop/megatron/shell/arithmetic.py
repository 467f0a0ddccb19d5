"""Whole-number arithmetic of a shell, as far as it is that of Python: $((…)), ((…)) and let."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from megajax.config.errors import UserError

ASSIGNMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:(\+\+|--)\s*|([-+*/%]?)=(?!=)(.*))", re.DOTALL)
INNER = re.compile(r"\+\+|--|(?<![=!<>])=(?!=)")
LENGTH, LARGEST = 200, 2**62

type Number = int | None
"""None: not known."""


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
