"""The grammar of JSON (RFC 8259) in UTF-8 (RFC 3629), narrowed so that every text ends and every number is finite."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from megajax.inference.sampling.grammar import Byte, Grammar, Repeat, choice, joined, literal, one_of, optional
from megajax.inference.sampling.regular_expression import LAST, Ranges, regular_expression, text

DEPTH = 16
"""Most arrays and objects within each other where a schema leaves the value open."""
SPACES = 24
"""Most blanks and line ends in one place."""
DIGITS, FRACTION, EXPONENT = 19, 17, 2
"""Most digits of an integer part, a fraction and an exponent."""
KEY = 64
"""Most characters of a key that a schema does not name."""

DIGIT, NONZERO, HEXADECIMAL = one_of(b"0123456789"), one_of(b"123456789"), one_of(b"0123456789abcdefABCDEF")
SPACE = Repeat(one_of(b" \n\t\r"), 0, SPACES)
COMMA, COLON = joined(SPACE, literal(b","), SPACE), joined(SPACE, literal(b":"), SPACE)
UNESCAPED: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, LAST))
"""Code points that a string holds without an escape."""
PLAIN = frozenset(range(0x20, 0x80)) - frozenset(b'"\\')
"""Those of ASCII."""


BEYOND_ASCII = text(((0x80, LAST),))
NO_SURROGATE = choice(
    joined(one_of(b"0123456789abcefABCEF"), HEXADECIMAL),
    joined(one_of(b"dD"), one_of(b"01234567")),
)
ESCAPE = joined(
    literal(b"\\"), choice(one_of(b'"\\/bfnrt'), joined(literal(b"u"), NO_SURROGATE, HEXADECIMAL, HEXADECIMAL))
)
CHARACTER = choice(Byte(PLAIN), BEYOND_ASCII, ESCAPE)
"""A Unicode character within a string, which counts as one for minLength and maxLength."""

INTEGER = joined(optional(literal(b"-")), choice(literal(b"0"), joined(NONZERO, Repeat(DIGIT, 0, DIGITS - 1))))
NUMBER = joined(
    INTEGER,
    optional(joined(literal(b"."), Repeat(DIGIT, 1, FRACTION))),
    optional(joined(one_of(b"eE"), optional(one_of(b"+-")), Repeat(DIGIT, 1, EXPONENT))),
)
LARGEST = 10**DIGITS - 1
"""Of the integers."""
BOOLEAN, NULL = choice(literal(b"true"), literal(b"false")), literal(b"null")


def string(least: int = 0, most: int | None = None) -> Grammar:
    """A string of so many characters."""
    return joined(literal(b'"'), Repeat(CHARACTER, least, most), literal(b'"'))


STRING = string()


def integers(least: int, most: int) -> Grammar:
    """The integers from least to most, both included; least must not be above most."""
    negative = [joined(literal(b"-"), _digits(max(-most, 1), -least))] if least < 0 else []
    return choice(*negative, *([_digits(max(least, 0), most)] if most >= 0 else []))


def _digits(least: int, most: int) -> Grammar:
    """The same, none of them negative."""
    lengths = range(len(str(least)), len(str(most)) + 1)
    limits = [(max(least, 10 ** (length - 1) if length > 1 else 0), min(most, 10**length - 1)) for length in lengths]
    return choice(*(_between(str(lower), str(upper)) for lower, upper in limits))


def _between(lower: str, upper: str) -> Grammar:
    """Numbers of as many digits as these two."""
    first, last, rest = int(lower[0]), int(upper[0]), len(lower) - 1
    if (lower[1:], upper[1:]) == ("0" * rest, "9" * rest):  # else a range of n digits would become 2 ** n parts
        return joined(one_of(range(48 + first, 49 + last)), Repeat(DIGIT, rest, rest))
    if first == last:
        return joined(literal(lower[:1].encode()), _between(lower[1:], upper[1:]))
    options = [joined(literal(lower[:1].encode()), _between(lower[1:], "9" * rest))]
    if last - first > 1:
        options.append(joined(one_of(range(49 + first, 48 + last)), Repeat(DIGIT, rest, rest)))
    return choice(*options, joined(literal(upper[:1].encode()), _between("0" * rest, upper[1:])))


def matching(pattern: str) -> Grammar:
    """A string in which a regular expression matches somewhere. Raises UserError for what it does not support."""
    return joined(literal(b'"'), regular_expression(pattern, search=True, character=_within_string), literal(b'"'))


@cache
def _within_string(ranges: Ranges) -> Grammar:
    """A character of these, as a string has it: what needs an escape is escaped in one way."""
    plain, options = [], []
    for lower, upper in ranges:
        plain += [
            (max(lower, first), min(upper, last)) for first, last in UNESCAPED if lower <= last and first <= upper
        ]
        escaped = [point for point in (*range(0x20), *b'"\\') if lower <= point <= upper]
        options += [literal(json.dumps(chr(point))[1:-1].encode()) for point in escaped]
    return choice(*options, *([text(tuple(plain))] if plain else []))


def array(item: Grammar, least: int = 0, most: int | None = None) -> Grammar:
    """An array of so many items."""
    more = Repeat(joined(COMMA, item), max(least - 1, 0), None if most is None else most - 1)
    items = joined(item, more, SPACE)
    inner = [] if most == 0 else [items if least else optional(items)]
    return joined(literal(b"["), SPACE, *inner, literal(b"]"))


def member(key: Grammar, value: Grammar) -> Grammar:
    """A key and its value."""
    return joined(key, COLON, value)


@cache
def value(depth: int = DEPTH) -> Grammar:
    """Any value with at most so many arrays and objects within each other."""
    scalars = STRING, NUMBER, BOOLEAN, NULL
    return choice(*scalars, any_object(depth), array(value(depth - 1))) if depth else choice(*scalars)


@cache
def any_object(depth: int = DEPTH) -> Grammar:
    """Any object."""
    entry = member(STRING, value(depth - 1))
    return joined(literal(b"{"), SPACE, optional(joined(entry, Repeat(joined(COMMA, entry)), SPACE)), literal(b"}"))


def constant(data: Any) -> Grammar:
    """This value; an object with its keys in this order."""
    if isinstance(data, Mapping):
        return members([(name, constant(each), True) for name, each in data.items()])
    if isinstance(data, list):
        parts = [part for item in data for part in (COMMA, constant(item))][1:]
        return joined(literal(b"["), SPACE, *parts, *[SPACE] * bool(parts), literal(b"]"))
    return literal(json.dumps(data, ensure_ascii=False, allow_nan=False).encode())


def members(named: Sequence[tuple[str, Grammar, bool]], other: Grammar | None = None) -> Grammar:
    """An object with these members in this order, (name, value, required), then any number of others if `other`.

    other: grammar of the values of further members. Their keys are printable ASCII without escapes, and none of the
    names.
    """
    extra = None if other is None else member(_other_key([name for name, _, _ in named]), other)
    # Of the members from one on: where one came before, and where none did, so that no comma leads.
    after = SPACE if extra is None else joined(Repeat(joined(COMMA, extra)), SPACE)
    start = SPACE if extra is None else optional(joined(extra, after))
    start = joined() if extra is None else start
    for name, grammar, required in reversed(named):
        entry = member(constant(name), grammar)
        with_comma, without = joined(COMMA, entry, after), joined(entry, after)
        after = with_comma if required else choice(with_comma, after)
        start = without if required else choice(without, start)
    return joined(literal(b"{"), SPACE, start, literal(b"}"))


def _other_key(names: Sequence[str]) -> Grammar:
    """A key of 1 to KEY characters that is none of the names."""
    plain = sorted(PLAIN - {0x7F})
    free = [Repeat(one_of(plain), 0, KEY - used) for used in range(KEY + 1)]

    def behind(prefix: bytes, tails: Sequence[bytes]) -> Grammar:
        """What may follow a prefix that only the names with these tails have."""
        nexts = sorted({tail[0] for tail in tails if tail})
        left = max(KEY - len(prefix), 1)
        options: list[Grammar] = [joined(one_of(sorted({*plain} - {*nexts})), free[KEY - left + 1])]
        for value in nexts:
            further = [tail[1:] for tail in tails if tail[:1] == bytes((value,))]
            options.append(joined(one_of((value,)), behind(prefix + bytes((value,)), further)))
        return choice(*options, *[joined()] * (bool(prefix) and b"" not in tails))

    ascii_names = [name.encode() for name in names if {*name.encode()} <= {*plain} and len(name) < KEY]
    return joined(literal(b'"'), behind(b"", ascii_names), literal(b'"'))
