"""Find all wrong constructor calls in a config file.

Python ends a file at the first call with an unknown or a missing argument. While `collecting` is entered, the config
classes accept such calls: unknown settings are recorded, and missing ones become placeholders.
"""

import dataclasses
import sys
import textwrap
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple, get_args

import megajax.config.schema as schema
from megajax.config.errors import Problem
from megajax.config.nearest import did_you_mean, either
from megajax.config.placeholder import Placeholder


class Fault(NamedTuple):
    """A call with unknown or missing settings, or with settings that are not named."""

    cls: type
    unknown: tuple[str, ...]
    missing: tuple[str, ...]
    unnamed: int
    place: str
    """The file and line of the call, as people read it."""


def config_classes(root: type) -> tuple[type, ...]:
    """Every config class that a tree may hold, `root` first, each before the classes of its own fields."""
    classes: dict[type, None] = {}
    _collect(root, classes)
    return tuple(classes)


def _collect(cls: type, classes: dict[type, None]) -> None:
    if cls in classes:
        return
    classes[cls] = None
    for annotation in schema.hints(cls).values():
        inner = [annotation]
        inner += [part for kind in schema.lists(annotation) for part in get_args(kind) if part is not Ellipsis]
        inner += [args[1] for kind in schema.mappings(annotation) if (args := get_args(kind))]
        for part in inner:
            for member in schema.configs(part):
                _collect(member, classes)


@contextmanager
def collecting(classes: Iterable[type], place: Callable[[str, int], str | None]) -> Generator[list[Fault]]:
    """While this is entered, constructors of `classes` record wrong calls and continue.

    place: (file, line) -> how it is shown to people, None for a file that is not the user's.
    """
    faults: list[Fault] = []
    originals = {cls: cls.__init__ for cls in classes}
    try:
        for cls, original in originals.items():
            setattr(cls, "__init__", _tolerant(cls, original, faults, place))  # noqa: B010, a type checker refuses `cls.__init__ =`
        yield faults
    finally:
        for cls, original in originals.items():
            setattr(cls, "__init__", original)  # noqa: B010


def _tolerant(cls: type, original: Callable, faults: list[Fault], place: Callable[[str, int], str | None]) -> Callable:
    fields = {field.name: field for field in schema.fields(cls) if field.init}

    def init(self: Any, *values: Any, **settings: Any) -> None:
        given = dict(zip(fields, values, strict=False)) | settings
        unknown = tuple(name for name in given if name not in fields)
        needed = [name for name, field in fields.items() if schema.default(field) is dataclasses.MISSING]
        missing = tuple(name for name in needed if name not in given)
        where = _caller(place) if unknown or missing or values else ""
        known = {name: value for name, value in given.items() if name in fields}
        original(self, **known, **{name: Placeholder(f"{cls.__name__}, {where}") for name in missing})
        if where:
            faults.append(Fault(cls, unknown, missing, len(values), where))

    return init


def _caller(place: Callable[[str, int], str | None]) -> str:
    frame = sys._getframe(2)
    while frame is not None:
        if shown := place(frame.f_code.co_filename, frame.f_lineno):
            return shown
        frame = frame.f_back
    return "this file"


def problems_of(faults: list[Fault], root: type, *, whole: bool) -> list[Problem]:
    """The problems of the calls, by file and line.

    whole: the file made a config. Whoever checks it finds the placeholders of missing settings, by dotted name.
    """
    problems = []
    for fault in faults:
        cls, own = fault.cls, list(schema.hints(fault.cls))
        for key in fault.unknown:
            problems.append(Problem(fault.place, f"{cls.__name__} has no setting {key}", _instead(key, cls, root)))
        if fault.unnamed:
            what = f"{cls.__name__} takes its settings by name, {fault.unnamed} given without"
            names_of = ", ".join(f"{name}=..." for name in own[: fault.unnamed])
            problems.append(Problem(fault.place, what, f"write {cls.__name__}({names_of})"))
        for key in () if whole else fault.missing:
            hint = schema.example(key, schema.hints(cls)[key])
            problems.append(Problem(fault.place, f"{cls.__name__} needs {key}", hint))
    return list(dict.fromkeys(problems))


def _instead(key: str, cls: type, root: type) -> str:
    """The setting that was meant, in the same class or elsewhere in the tree; otherwise all settings of the class."""
    own = list(schema.hints(cls))
    if near := did_you_mean(key, own):
        return near
    elsewhere = sorted((name for name in schema.names(root) if name.endswith(f".{key}")), key=lambda n: n.count("."))
    if elsewhere:
        return f"there is {either(elsewhere[:3])}"
    return "\n".join(textwrap.wrap(f"{cls.__name__} has {', '.join(own)}", 100))
