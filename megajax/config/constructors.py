"""Find the wrong constructor calls in a config file.

Python stops at the first call with an unknown or missing argument. The others are found in the source.
"""

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import get_args

import megajax.config.schema as schema
from megajax.config.errors import Problem
from megajax.config.nearest import did_you_mean, either


def config_classes(root: type) -> tuple[type, ...]:
    """Every config class that a tree may hold, `root` first, each before the classes of its fields."""
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


def wrong_calls(path: Path, place: str, root: type) -> Iterator[Problem]:
    """Calls of config classes with unknown, missing or positional settings.

    place: the file's name in messages.
    """
    classes = {cls.__name__: cls for cls in config_classes(root)}
    for call in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(call, ast.Call):
            continue
        cls = classes.get(ast.unparse(call.func).rpartition(".")[2])
        if cls is None:
            continue
        line, settings = f"{place}, line {call.lineno}", schema.hints(cls)
        arguments = [keyword.arg for keyword in call.keywords]
        for key in arguments:
            if key is not None and key not in settings:
                yield Problem(line, f"{cls.__name__} has no setting {key}", _instead(key, cls, root))
        if call.args:
            message = f"{cls.__name__} takes its settings by name, {len(call.args)} given without"
            names = ", ".join(f"{name}=..." for name in [*settings][: len(call.args)])
            yield Problem(line, message, f"write {schema.python_name(cls)}({names})")
        needed = [field.name for field in schema.fields(cls) if field.init and schema.default(field) is MISSING]
        for key in needed:
            if key not in arguments and None not in arguments:  # None: **settings
                yield Problem(line, f"{cls.__name__} needs {key}", schema.example(key, settings[key]))


def _instead(key: str, cls: type, root: type) -> str:
    """The probably intended setting, of this class or elsewhere in the tree; otherwise all settings of the class."""
    settings = list(schema.hints(cls))
    if similar := did_you_mean(key, settings):
        return similar
    elsewhere = sorted((name for name in schema.names(root) if name.endswith(f".{key}")), key=lambda n: n.count("."))
    if elsewhere:
        return f"there is {either(elsewhere[:3])}"
    return "\n".join(textwrap.wrap(f"{cls.__name__} has {', '.join(settings)}", 100))
