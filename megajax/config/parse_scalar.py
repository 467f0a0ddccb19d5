"""Parse one value by the annotation of its field.

The command line, YAML, JSON and values set in Python follow the same rules: `1e3` means the same everywhere.
"""

import math
import re
import types
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from megajax.config.hints import did_you_mean

NUMBER = re.compile(r"(?P<digits>[+-]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][+-]?\d{1,3})?)(?P<suffix>[A-Za-z]*)")
SUFFIXES = types.MappingProxyType(
    {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    | {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
)

WORDS_OF_SWITCHES = types.MappingProxyType(
    dict.fromkeys(("true", "yes", "1"), True) | dict.fromkeys(("false", "no", "0"), False)
)


class Text(str):
    """A value from the command line, where everything is text: `none` means None."""

    __slots__ = ()


class Mismatch(Exception):
    """The value does not fit the annotation. The message is a hint, possibly empty."""


def scalar(raw: object, kind: object) -> Any:
    """The value of `raw` as `kind` (None, bool, int, float, str, Path or a Literal). Raises Mismatch."""
    if get_origin(kind) is Literal:
        return _literal(raw, get_args(kind))
    readers: dict[object, Callable[[object], Any]] = {
        **{types.NoneType: _none, bool: _boolean, int: _integer},
        **{float: _number, str: _text, Path: _path},
    }
    if kind not in readers:
        raise Mismatch("")
    return readers[kind](raw)


def precedence(kind: object) -> int:
    """Sort key of the members of a union: the most specific is tried first."""
    order = (types.NoneType, bool, int, float, Path, str)
    return order.index(kind) if kind in order else -1


def _none(raw: object) -> None:
    match raw:
        case None:
            return
        case str() if raw.lower() in ("none", "null"):
            return
    raise Mismatch("")


def _boolean(raw: object) -> bool:
    match raw:
        case bool():
            return raw
        case str() | int() if (word := str(raw).lower()) in WORDS_OF_SWITCHES:
            return WORDS_OF_SWITCHES[word]
    raise Mismatch("")


def _decimal(raw: str) -> Decimal:
    match = NUMBER.fullmatch(raw.strip())
    if not match:
        raise Mismatch("")
    if match["suffix"] not in SUFFIXES:
        raise Mismatch(f"suffixes are {', '.join(name for name in SUFFIXES if name)}")
    return Decimal(match["digits"].replace("_", "")) * SUFFIXES[match["suffix"]]


def _integer(raw: object) -> int:
    match raw:
        case bool():
            raise Mismatch("")
        case int():
            return raw
        case str():
            number = _decimal(raw)
        case float() if math.isfinite(raw):
            number = Decimal(raw)
        case _:
            raise Mismatch("")
    if number != number.to_integral_value() or number.adjusted() > 30:
        raise Mismatch("")
    return int(number)


def _number(raw: object) -> float:
    match raw:
        case bool():
            raise Mismatch("")
        case str() if (text := raw.strip()).lower().lstrip("+-") not in ("inf", "nan"):
            # float() of the text rounds only once; a suffix needs Decimal first.
            value = raw if text[-1:].isdigit() and NUMBER.fullmatch(text) else _decimal(raw)
        case int() | float() | str():
            value = raw
        case _:
            raise Mismatch("")
    try:
        number = float(value)
    except OverflowError:
        raise Mismatch("too large for a float") from None
    if math.isnan(number):
        raise Mismatch("nan compares unequal to itself; leave the setting out, or use none if it is allowed")
    return number


def _text(raw: object) -> str:
    match raw:
        case str():
            return str(raw)
        case Path():
            raise Mismatch("")
        case tuple() | list() if all(isinstance(item, str | int | float) for item in raw):
            raise Mismatch(f'write "{",".join(map(str, raw))}"')
    raise Mismatch("put it in quotes to make it text")


def _path(raw: object) -> Path:
    match raw:
        case Text():
            return Path(raw).expanduser()  # shells do not expand the ~ of --name=~/x
        case str() | Path():
            return Path(raw)
    raise Mismatch("")


def _literal(raw: object, values: tuple[Any, ...]) -> Any:
    for value in values:
        if type(value) is type(raw) and value == raw:
            return value
    match raw:
        case str():
            for value in values:
                if str(value).lower() == raw.lower():
                    return value
            raise Mismatch(did_you_mean(raw, map(str, values)))
        case bool() if any(isinstance(value, str) for value in values):
            raise Mismatch("YAML reads unquoted yes, no, on and off as true and false; put it in quotes")
    raise Mismatch("")
