"""The values of requests' fields: read, checked and limited by tables of fields. null means that a field is not given.

`fields.py` has the tables. Bounds of numbers are those of the fields of `Sampling`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from megajax.config.field_types import kinds
from megajax.config.hints import did_you_mean
from megajax.config.read_limits import Json
from megajax.inference.sampling_settings import NUMBERS, Sampling, abbreviated, number_error
from megajax.server.body import RequestError, invalid

REPORTS = 1000
"""Maximum number of unknown fields that are reported; clients choose their names."""


class Field(NamedTuple):
    """A field that a request may have."""

    kind: str
    """Description of the type, for messages and /openapi.json."""
    read: Callable[[Any], Any] = lambda value: value
    """Value as JSON -> Python value. Raises ValueError for a value of another type."""
    setting: str | None = None
    """Setting of `Sampling`, which checks the limits."""
    fields: "Fields | None" = None
    """Fields of an object, or of each object of a list; `read` gets `RequestValues`."""
    required: bool = False


class Unsupported(NamedTuple):
    """A field of other servers, rejected with a reason."""

    reason: str
    neutral: tuple[Any, ...] = ()
    """Accepted values, which ask for nothing."""


type Fields = Mapping[str, Field | Unsupported]


class UnknownFields:
    """Reports each unknown field once in the life of a server, or refuses it."""

    def __init__(self, *, strict: bool, log: Callable[[str], None]):
        """strict: refuse unknown fields. log: called with a line for each name."""
        self._strict, self._log = strict, log
        self._reported: set[str] = set()

    def report(self, location: str, suggestion: str) -> None:
        """Raises RequestError if unknown fields are refused. location: the field, with those around it."""
        described = f"unknown field {location!r}" + f": {suggestion}" * bool(suggestion)
        if self._strict:
            raise invalid(location, described)
        name = re.sub(r"\[\d+\]", "[]", location)
        if name not in self._reported and len(self._reported) < REPORTS:
            self._reported.add(name)
            ignored = described.replace(repr(location), repr(name), 1)
            self._log(f"warning: {ignored} (ignored, here and in later requests; server.strict=true refuses it)")


class RequestValues(dict[str, Any]):
    """The fields of an object as Python values. Those whose value is null are missing."""

    def __init__(self, body: Mapping[str, Any], fields: Fields, unknown: UnknownFields, where: str = ""):
        """Checks names and types, and that required fields are there.

        where: location of the object, with a dot at its end. Raises RequestError.
        """
        super().__init__()
        self._fields = {name: field for name, field in fields.items() if isinstance(field, Field)}
        self._where, self._unknown = where, unknown
        for name, value in body.items():
            field, location = fields.get(name), f"{where}{name[:60]}"
            if field is None:
                unknown.report(location, did_you_mean(name[:60], list(self._fields)))
            elif isinstance(field, Unsupported):
                if value is not None and value not in field.neutral:
                    raise invalid(location, f"{location}: {field.reason}")
            elif value is not None:
                self[name] = self._read(field, value, location)
        for name, field in self._fields.items():
            if field.required and name not in self:
                raise self.invalid(name, "must be given")

    def _read(self, field: Field, value: Json, location: str) -> Any:
        try:
            return field.read(value if field.fields is None else self._objects(field.fields, value, location))
        except ValueError:
            raise invalid(location, f"{location} must be {field.kind}, got {abbreviated(value)}") from None

    def _objects(self, fields: Fields, value: object, location: str) -> Any:
        """An object, or a list of objects, as RequestValues; other values as they are."""
        if isinstance(value, dict):
            return RequestValues(value, fields, self._unknown, f"{location}.")
        if not isinstance(value, list):
            return value
        for place, part in enumerate(value):
            if not isinstance(part, dict):
                raise invalid(f"{location}[{place}]", f"{location}[{place}] must be an object, got {abbreviated(part)}")
        return [RequestValues(part, fields, self._unknown, f"{location}[{place}].") for place, part in enumerate(value)]

    def invalid(self, name: str, message: str) -> RequestError:
        """The error of a field."""
        return invalid(f"{self._where}{name}", f"{self._where}{name} {message}")

    def sampling(self, base: Sampling) -> Sampling:
        """The settings of `base`, replaced by those of the fields.

        Raises RequestError for values beyond the limits, and for two fields of one setting with different values.
        """
        names_by_setting: dict[str, str] = {}
        for name, field in self._fields.items():
            if field.setting is None or self.get(name) is None:
                continue
            other = names_by_setting.setdefault(field.setting, name)
            if self[name] != self[other]:
                values = f"is {abbreviated(self[name])}, {other} is {abbreviated(self[other])}"
                raise self.invalid(name, f"{values}: both are the same setting, give one of them")
        sampling = replace(base, **{setting: self[name] for setting, name in names_by_setting.items()})
        names = self.names()
        for problem in sampling.problems():
            param = names.get(problem.setting, problem.setting)
            raise invalid(param, f"{param} {problem.message}")
        return sampling

    def names(self) -> dict[str, str]:
        """Setting of `Sampling` -> its field; of two fields, the one in the request."""
        order = sorted(self._fields, key=lambda name: name in self)
        return {setting: name for name in order if (setting := self._fields[name].setting)}


def instance[T](kind: type[T]) -> Callable[[object], T]:
    """A reader of values of a type."""

    def read(value: object) -> T:
        if not isinstance(value, kind):
            raise ValueError
        return value

    return read


def integer(value: Json) -> int:
    """An integer; booleans are none."""
    if type(value) is not int:
        raise ValueError
    return value


def list_of[T](read: Callable[[Any], T]) -> Callable[[Json], tuple[T, ...]]:
    """A reader of lists, from that of their entries."""
    return lambda value: tuple(map(read, instance(list)(value)))


def nonempty_text(value: Json) -> str:
    """A string with something in it."""
    text = instance(str)(value)
    if not text:
        raise ValueError
    return text


def one_of(*choices: Json) -> Callable[[Any], Any]:
    """A reader of some values only."""

    def read(value: Json) -> Any:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise ValueError
        return value

    return read


def choice(*choices: str) -> Field:
    """A string among several."""
    return Field(f"one of {', '.join(choices)}", one_of(*choices))


def number(setting: str) -> Field:
    """A number with the bounds of a setting of `Sampling`."""
    return Field("an integer" if int in kinds(NUMBERS[setting]) else "a number", setting=setting)


def within(annotation: object) -> Callable[[Any], Any]:
    """A reader of numbers within the bounds of an annotation."""

    def read(value: Json) -> Any:
        if number_error(value, annotation):
            raise ValueError
        return value

    return read
