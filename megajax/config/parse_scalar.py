"""Parse one value by the annotation of its field.

The command line, YAML, JSON and values set in Python follow the same rules: `1e3` means the same everywhere.
"""

import math
import re
import types
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from megajax.config.hints import did_you_mean

NUMBER = re.compile(r"(?P<digits>[+-]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][+-]?\d{1,3})?)(?P<suffix>[A-Za-z]*)")
SUFFIXES = types.MappingProxyType(
    {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    | {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
)


class Text(str):
    """A value from the command line, where everything is text: `none` means None."""

    __slots__ = ()


class Mismatch(Exception):
    """The value does not fit the annotation. The message is a hint, possibly empty."""


def scalar(raw: Any, kind: Any) -> Any:
    """The value of `raw` as `kind` (None, bool, int, float, str, Path or a Literal). Raises Mismatch."""
    if get_origin(kind) is Literal:
        return _literal(raw, get_args(kind))
    readers = {types.NoneType: _none, bool: _boolean, int: _integer, float: _number, str: _text, Path: _path}
    if kind not in readers:
        raise Mismatch("")
    return readers[kind](raw)


def precedence(kind: Any) -> int:
    """Sort key of the members of a union: the most specific is tried first."""
    order = (types.NoneType, bool, int, float, Path, str)
    return order.index(kind) if kind in order else -1


def _none(raw: Any) -> None:
    if raw is None or (isinstance(raw, str) and raw.lower() in ("none", "null")):
        return
    raise Mismatch("")


def _boolean(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    word = str(raw).lower() if isinstance(raw, str | int) else ""
    if word in ("true", "yes", "1"):
        return True
    if word in ("false", "no", "0"):
        return False
    raise Mismatch("")


def _decimal(raw: str) -> Decimal:
    match = NUMBER.fullmatch(raw.strip())
    if not match:
        raise Mismatch("")
    if match["suffix"] not in SUFFIXES:
        raise Mismatch(f"suffixes are {', '.join(name for name in SUFFIXES if name)}")
    return Decimal(match["digits"].replace("_", "")) * SUFFIXES[match["suffix"]]


def _integer(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise Mismatch("")
    if isinstance(raw, int):
        return raw
    if isinstance(raw, str):
        number = _decimal(raw)
    elif math.isfinite(raw):
        number = Decimal(raw)
    else:
        raise Mismatch("")
    if number != number.to_integral_value() or number.adjusted() > 30:
        raise Mismatch("")
    return int(number)


def _number(raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise Mismatch("")
    if isinstance(raw, str) and raw.strip().lower().lstrip("+-") not in ("inf", "nan"):
        # float() of the text rounds only once; a suffix needs Decimal first.
        raw = raw if raw.strip()[-1:].isdigit() and NUMBER.fullmatch(raw.strip()) else _decimal(raw)
    try:
        number = float(raw)
    except OverflowError:
        raise Mismatch("too large for a float") from None
    if math.isnan(number):
        raise Mismatch("nan compares unequal to itself; leave the setting out, or use none if it is allowed")
    return number


def _text(raw: Any) -> str:
    if isinstance(raw, str):
        return str(raw)
    if isinstance(raw, Path):
        raise Mismatch("")
    if isinstance(raw, tuple | list) and all(isinstance(item, str | int | float) for item in raw):
        raise Mismatch(f'write "{",".join(map(str, raw))}"')
    raise Mismatch("put it in quotes to make it text")


def _path(raw: Any) -> Path:
    if isinstance(raw, Text):
        return Path(raw).expanduser()  # shells do not expand the ~ of --name=~/x
    if isinstance(raw, str | Path):
        return Path(raw)
    raise Mismatch("")


def _literal(raw: Any, values: tuple[Any, ...]) -> Any:
    for value in values:
        if type(value) is type(raw) and value == raw:
            return value
    if isinstance(raw, str):
        for value in values:
            if str(value).lower() == raw.lower():
                return value
        raise Mismatch(did_you_mean(raw, map(str, values)))
    if isinstance(raw, bool) and any(isinstance(value, str) for value in values):
        raise Mismatch("YAML reads unquoted yes, no, on and off as true and false; put it in quotes")
    raise Mismatch("")
