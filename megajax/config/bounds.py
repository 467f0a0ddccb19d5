"""What a value may be beyond its type: rules that fields declare, as in `every: Annotated[int, Bounds(at_least=1)]`.

`compose` asks `errors` wherever it reads a value: of a field, of an entry of a list or mapping, and of a verb's flag.
"""

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite
from typing import Annotated, Any, Protocol, get_args, get_origin, runtime_checkable

LARGEST = 2**31 - 1
"""The largest integer that fits the int32 indices of arrays on a device."""


@runtime_checkable
class Rule(Protocol):
    """What the values of a field must satisfy: metadata of the field's Annotated type.

    It may have a text `hint`: what to write instead of a refused value.
    """

    def words(self) -> str:
        """The rule for --help, as in "at least 1"; "" if it goes without saying."""
        ...

    def error(self, value: object) -> str:
        """Why it refuses this value, as in "must be at least 1, got 0"; "" if it does not, or does not apply."""
        ...


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of a number, which must be finite. They do not apply to none, text, true and false."""

    at_least: float = -inf
    above: float = -inf
    at_most: float = inf
    below: float = inf
    hint: str = ""

    def words(self) -> str:
        """The bounds in words; LARGEST goes without saying."""
        if isfinite(self.at_least) and isfinite(self.at_most) and self.at_most != LARGEST:
            return f"between {_text(self.at_least)} and {_text(self.at_most)}"
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        parts = (f"{name} {_text(bound)}" for name, bound in bounds.items() if isfinite(bound) and bound != LARGEST)
        return " and ".join(parts)

    def error(self, value: object) -> str:
        """Why they refuse the value, or ""."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            return ""
        if isinstance(value, float) and not isfinite(value):
            return f"must be finite and {self.words()}, got {value}"
        if value > self.at_most == LARGEST:
            return f"must be at most {LARGEST}, got {_text(value)}"
        is_legal = self.at_least <= value <= self.at_most and self.above < value < self.below
        return "" if is_legal else f"must be {self.words()}, got {_text(value)}"


@dataclass(frozen=True)
class NotEmpty:
    """Text with more than blanks in it, or a list with something in it."""

    hint: str = ""
    problem: str = "is empty"

    def words(self) -> str:
        """Nothing: a name or path that must be given is not empty."""
        return ""

    def error(self, value: object) -> str:
        """The problem of an empty value."""
        return self.problem if value in ((), []) or (isinstance(value, str) and not value.strip()) else ""


type Count = Annotated[int, Bounds(at_least=1)]
"""A number of things, or an interval in steps."""
type Index = Annotated[int, Bounds(at_least=0)]
"""A number of things that may be none, or a place counted from 0."""
type Size = Annotated[int, Bounds(at_least=1, at_most=LARGEST)]
"""The length of an axis of an array."""
type Positive = Annotated[float, Bounds(above=0)]
type NotNegative = Annotated[float, Bounds(at_least=0)]
type Share = Annotated[float, Bounds(at_least=0, at_most=1)]
"""A part of a whole, or a probability."""
type BelowOne = Annotated[float, Bounds(at_least=0, below=1)]
"""A rate of dropout or smoothing, of which 1 would leave nothing."""


def errors(value: object, annotation: Any) -> Iterator[tuple[str, str]]:
    """(message, hint) of the `rules` of an annotation that refuse a value.

    Of a union's members, those that have the value's type are asked, and one of them has to accept it.
    """
    if isinstance(annotation, typing.TypeAliasType):
        yield from errors(value, annotation.__value__)
    elif get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        yield from errors(value, inner)
        for rule in metadata:
            if isinstance(rule, Rule) and (message := rule.error(value)):
                yield message, getattr(rule, "hint", "")
    elif get_origin(annotation) in (typing.Union, types.UnionType):
        refusals = [list(errors(value, part)) for part in get_args(annotation) if _has_type(value, part)]
        yield from refusals[0] if refusals and all(refusals) else ()


def _has_type(value: object, annotation: Any) -> bool:
    """Whether a value has the type of a member of a union; numbers, text and none are told from everything else."""
    kinds = {get_origin(member) or member for member in _members(annotation)}
    if typing.Literal in kinds and any(value in get_args(member) for member in _members(annotation)):
        return True
    if isinstance(value, bool | str | None):
        return type(value) in kinds
    if isinstance(value, int | float):
        return float in kinds or (isinstance(value, int) and int in kinds)
    return not kinds <= {bool, int, float, str, types.NoneType, typing.Literal}


def words(annotation: Any) -> str:
    """The rules of an annotation, to write after its type: ", at least 1". Also those for entries of lists."""
    return "".join(f", {text}" for text in dict.fromkeys(_words(annotation)))


def _words(annotation: Any) -> Iterator[str]:
    yield from filter(None, (rule.words() for rule in rules(annotation)))
    for member in _members(annotation):
        if get_origin(member) not in (None, typing.Literal):
            for entry in get_args(member):
                yield from (f"each {text}" for text in _words(entry))


def rules(annotation: Any) -> Iterator[Rule]:
    """The rules of an annotation; not those for entries of lists."""
    if isinstance(annotation, typing.TypeAliasType):
        yield from rules(annotation.__value__)
    elif get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        yield from rules(inner)
        yield from (rule for rule in metadata if isinstance(rule, Rule))
    elif get_origin(annotation) in (typing.Union, types.UnionType):
        for part in get_args(annotation):
            yield from rules(part)


def _members(annotation: Any) -> Iterator[Any]:
    """The members of a union, without their rules."""
    if isinstance(annotation, typing.TypeAliasType):
        yield from _members(annotation.__value__)
    elif get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (typing.Union, types.UnionType):
        for part in get_args(annotation):
            yield from _members(part)
    else:
        yield annotation


def _text(number: float) -> str:
    if isinstance(number, int) and number.bit_length() > 10_000:  # str() refuses such ones
        return f"an integer of {number.bit_length()} bits"
    text = str(number) if isinstance(number, int) else f"{number:g}"
    return text if len(text) <= 60 else f"{text[:57]}..."
