"""Regular expressions to a grammar: literals, classes, groups, alternatives and repetitions of Unicode characters.

Look-around, references and word boundaries are no part of a regular language, or not cheaply, and are refused by name.
"""

from collections.abc import Callable, Iterator

from megajax.config.errors import UserError
from megajax.inference.sampling.grammar import Grammar, Repeat, choice, joined, one_of

LAST = 0x10FFFF
COUNT = 1000
"""Largest count of a repetition."""
DEEPEST = 50
"""Most groups within each other."""

type Ranges = tuple[tuple[int, int], ...]
"""Code points, first and last of each range, ascending."""

DIGITS: Ranges = ((48, 57),)
WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACES: Ranges = ((9, 13), (32, 32))
NAMED = {"d": DIGITS, "w": WORD, "s": SPACES}
"""Of ASCII only; the upper-case letter is what is left."""
CONTROL = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}


def text(ranges: Ranges) -> Grammar:
    """A character of these, in UTF-8."""
    options = [
        joined(*(one_of(range(first, last + 1)) for first, last in sequence))
        for lower, upper in ranges
        for sequence in byte_ranges(lower, upper)
    ]
    return choice(*options)


def byte_ranges(lower: int, upper: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Code points lower to upper in UTF-8, as sequences of byte ranges; half surrogates are left out."""
    for last in (0x7F, 0x7FF, 0xD7FF, 0xDFFF, 0xFFFF):
        if lower <= last < upper:
            yield from byte_ranges(lower, last)
            yield from byte_ranges(last + 1, upper)
            return
    if 0xD800 <= lower <= 0xDFFF:
        return
    for low in (0x3F, 0xFFF, 0x3FFFF):
        if upper > 0x7F and lower & ~low != upper & ~low:
            if lower & low:
                yield from byte_ranges(lower, lower | low)
                yield from byte_ranges((lower | low) + 1, upper)
                return
            if upper & low != low:
                yield from byte_ranges(lower, (upper & ~low) - 1)
                yield from byte_ranges(upper & ~low, upper)
                return
    yield tuple(zip(chr(lower).encode(), chr(upper).encode(), strict=True))


def complement(ranges: Ranges) -> Ranges:
    """All other code points."""
    out, first = [], 0
    for lower, upper in sorted(ranges):
        if lower > first:
            out.append((first, lower - 1))
        first = max(first, upper + 1)
    return (*out, (first, LAST)) if first <= LAST else tuple(out)


ANY = complement(((10, 10),))
"""What a dot stands for."""


def regular_expression(pattern: str, *, search: bool = False, character: Callable[[Ranges], Grammar] = text) -> Grammar:
    """The texts that match as a whole; ^ at the beginning and $ at the end change nothing.

    search: the texts that have a match somewhere, where these two bind it to an end of the text. character: code points
    -> grammar of one of them. Raises UserError for what is malformed or not supported.
    """
    starts, ends = pattern.startswith("^"), pattern.endswith("$") and not _escaped(pattern, len(pattern) - 1)
    reader = _Reader(pattern, 1 if starts else 0, len(pattern) - ends, character)
    inner, options = reader.alternatives(0)
    if options > 1 and (starts or ends):
        raise reader.refused("^ and $ beside alternatives: put the alternatives into a group", 0)
    if reader.at < reader.end:
        raise reader.refused("a ) without its (", reader.at)
    around = Repeat(character(((0, LAST),))) if search else joined()
    return joined(*[around] * (not starts), inner, *[around] * (not ends))


def _escaped(pattern: str, place: int) -> bool:
    before = pattern[:place]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


class _Reader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str, at: int, end: int, character: Callable[[Ranges], Grammar]):
        self.pattern, self.at, self.end, self.character = pattern, at, end, character

    def refused(self, what: str, place: int) -> UserError:
        return UserError(f"regular expression {self.pattern[:200]!r}: {what}, at {place}")

    def alternatives(self, depth: int) -> tuple[Grammar, int]:
        """Up to a ) or the end, and their number."""
        if depth > DEEPEST:
            raise self.refused(f"more than {DEEPEST} groups within each other", self.at)
        options = [self._joined(depth)]
        while self._next_is("|"):
            options.append(self._joined(depth))
        return choice(*options), len(options)

    def _joined(self, depth: int) -> Grammar:
        parts = []
        while self.at < self.end and self.pattern[self.at] not in "|)":
            parts.append(self._repeated(self._atom(depth)))
        return joined(*parts)

    def _repeated(self, part: Grammar) -> Grammar:
        place = self.at
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        mark = self.pattern[self.at : self.at + 1] if self.at < self.end else ""
        if mark in simple:
            self.at += 1
            least, most = simple[mark]
        elif mark == "{":
            least, most = self._counts()
        else:
            return part
        # A lazy repetition matches the same texts.
        if not self._next_is("?") and self.at < self.end and self.pattern[self.at] in "*+{":
            raise self.refused("a repetition of a repetition", self.at)
        if max(least, most or 0) > COUNT or (most is not None and most < least):
            raise self.refused(f"a count that is not ascending, or above {COUNT}", place)
        return Repeat(part, least, most)

    def _counts(self) -> tuple[int, int | None]:
        place, close = self.at, self.pattern.find("}", self.at, self.end)
        lower, comma, upper = self.pattern[place + 1 : close].partition(",")
        if close < 0 or not all(each.isascii() and (each.isdigit() or not each) for each in (lower, upper)):
            raise self.refused("a { that begins no count; write \\{ for the character", place)
        if not comma and not lower:
            raise self.refused("a count without a number", place)
        self.at = close + 1
        least = int(lower or 0)
        return least, least if not comma else int(upper) if upper else None

    def _atom(self, depth: int) -> Grammar:
        place, mark = self.at, self._take()
        match mark:
            case "(":
                return self._group(place, depth)
            case "[":
                return self.character(self._class(place))
            case ".":
                return self.character(ANY)
            case "\\":
                return self.character(self._escape())
            case "^" | "$":
                raise self.refused(f"{mark} inside of the pattern is not supported", place)
            case "*" | "+" | "?" | "{":
                raise self.refused(f"nothing before {mark}", place)
        return self.character(((ord(mark), ord(mark)),))

    def _group(self, place: int, depth: int) -> Grammar:
        if self._next_is("?") and not self._next_is(":"):
            raise self.refused("groups that begin with (? are not supported but for (?:", place)
        inner, _ = self.alternatives(depth + 1)
        if not self._next_is(")"):
            raise self.refused("a ( without its )", place)
        return inner

    def _class(self, place: int) -> Ranges:
        negated, ranges = self._next_is("^"), list[tuple[int, int]]()
        while not self._next_is("]"):
            if self.at >= self.end:
                raise self.refused("a [ without its ]", place)
            first = self._member()
            if len(first) == 1 and first[0][0] == first[0][1] and self._is_range():
                self.at += 1
                last = self._member()
                if len(last) != 1 or last[0][0] != last[0][1] or last[0][0] < first[0][0]:
                    raise self.refused("a range of characters that is not ascending", self.at)
                first = ((first[0][0], last[0][0]),)
            ranges += first
        if not ranges:
            raise self.refused("an empty class; write \\] for the character", place)
        return complement(tuple(ranges)) if negated else tuple(ranges)

    def _is_range(self) -> bool:
        return self.pattern[self.at : self.at + 1] == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("]", "")

    def _member(self) -> Ranges:
        mark = self._take()
        return self._escape() if mark == "\\" else ((ord(mark), ord(mark)),)

    def _escape(self) -> Ranges:
        place, mark = self.at - 1, self._take()
        if mark.lower() in NAMED:
            return NAMED[mark] if mark in NAMED else complement(NAMED[mark.lower()])
        if mark in CONTROL:
            return ((CONTROL[mark], CONTROL[mark]),)
        if mark in "xu":
            digits = self.pattern[self.at : min(self.end, self.at + (2 if mark == "x" else 4))]
            if len(digits) != (2 if mark == "x" else 4) or not all(each in "0123456789abcdefABCDEF" for each in digits):
                raise self.refused(f"\\{mark} without its hexadecimal digits", place)
            self.at += len(digits)
            return ((int(digits, 16), int(digits, 16)),)
        if mark.isalnum():
            raise self.refused(f"\\{mark} is not supported", place)
        return ((ord(mark), ord(mark)),)

    def _take(self) -> str:
        if self.at >= self.end:
            raise self.refused("the pattern ends too early", self.at)
        self.at += 1
        return self.pattern[self.at - 1]

    def _next_is(self, mark: str) -> bool:
        there = self.at < self.end and self.pattern[self.at] == mark
        self.at += there
        return there
