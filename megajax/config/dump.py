"""Config trees as plain values, as YAML that loads back to an equal tree, and as dotted names; differences of trees."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, get_args

from megajax.config import field_types
from megajax.config.errors import ConfigError, Problem
from megajax.config.overrides import join


def plain(value: Any, annotation: Any = None, where: str = "") -> Any:
    """The tree as dict, list, str, int, float, bool and None; a member of a union has its class as `type`.

    `annotation` is that of the field (default: the value's class). Raises ConfigError for a value without a text form,
    such as a function.
    """
    if field_types.is_config(value):
        tag = field_types.tag(type(value), annotation) if annotation is not None else ""
        hints = field_types.hints(type(value))
        fields = {name: plain(getattr(value, name), hint, join(where, name)) for name, hint in hints.items()}
        return ({"type": tag} if tag else {}) | fields
    if isinstance(value, tuple | list):
        return [plain(x, field_types.entry(annotation, i), join(where, str(i))) for i, x in enumerate(value)]
    if isinstance(value, Mapping):
        kinds = [get_args(kind)[1] for kind in field_types.mappings(annotation) if get_args(kind)]
        inner = kinds[0] if kinds else Any
        return {plain(key): plain(x, inner, join(where, str(key))) for key, x in value.items()}
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise ConfigError([Problem(where or "config", f"a {type(value).__name__} cannot be written to a file")])


def to_yaml(config: Any, notes: Mapping[str, str] | None = None) -> str:
    """The text of config.yaml; `notes` (dotted name -> text) become comments at the ends of lines."""
    return "\n".join(_lines(plain(config), "", notes or {})) + "\n"


def flatten(config: Any) -> dict[str, Any]:
    """Dotted name -> plain value, in the order of the fields; union members appear as `optimizer.type`."""
    return dict(_leaves(plain(config), ""))


def diff(old: Any, new: Any) -> list[str]:
    """Differences between two trees, one per line: "parallel.tensor: 1 -> 2"."""
    return _differences(flatten(old), flatten(new), "absent")


def diff_from_defaults(config: Any) -> list[str]:
    """Settings that differ from the defaults of their classes, one per line: the text of config.diff."""
    defaults = default_leaves(config)
    leaves = flatten(config)
    return _differences({name: value for name, value in defaults.items() if name in leaves}, leaves, "required")


def default_leaves(config: Any) -> dict[str, Any]:
    """Dotted name -> plain default, for the settings of this tree that have one."""
    return dict(_defaults(config, None, ""))


def _defaults(value: Any, default: Any, where: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        if not field.init:
            continue
        path, current = join(where, field.name), getattr(value, field.name)
        # If the class of a node differs from the default's, compare with the defaults of its class.
        default_value = getattr(default, field.name) if type(default) is type(value) else field_types.default(field)
        hint = field_types.hints(type(value))[field.name]
        nodes = [(path, hint, current, default_value)]
        if isinstance(current, tuple | list) and any(field_types.is_config(item) for item in current):
            same_length = isinstance(default_value, tuple | list) and len(default_value) == len(current)
            pairs = enumerate(zip(current, default_value if same_length else [MISSING] * len(current), strict=True))
            nodes = [(join(path, str(i)), field_types.entry(hint, i), *pair) for i, pair in pairs]
        if all(field_types.is_config(node) for _, _, node, _ in nodes):
            for place, annotation, node, default_node in nodes:
                tag = field_types.tag(type(default_node), annotation) if field_types.is_config(default_node) else ""
                yield from [(f"{place}.type", tag)] if tag else []
                yield from _defaults(node, default_node, place)
        elif default_value is not MISSING:
            yield from _leaves(plain(default_value, hint), path)


def _differences(old: dict[str, Any], new: dict[str, Any], missing: str) -> list[str]:
    lines = []
    for name in [*new, *(name for name in old if name not in new)]:
        before, after = (scalar_text(side[name]) if name in side else f"({missing})" for side in (old, new))
        if before != after:
            lines.append(f"{name}: {before} -> {after}")
    return lines


def _is_branch(value: Any) -> bool:
    if isinstance(value, list):
        return any(_is_branch(item) or item == {} for item in value)
    return isinstance(value, dict) and bool(value)


def _leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if not _is_branch(value):
        yield where, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(item, join(where, str(key)))


def _lines(value: Any, where: str, notes: Mapping[str, str]) -> Iterator[str]:
    if not _is_branch(value):
        note = notes.get(where)
        yield scalar_text(value) + (f"  # {note}" if note else "")
    elif isinstance(value, dict):
        for key, item in value.items():
            below = list(_lines(item, join(where, str(key)), notes))
            if _is_branch(item):
                yield f"{scalar_text(key)}:"
                yield from ("  " + line for line in below)
            else:
                yield f"{scalar_text(key)}: {below[0]}"
    else:
        for index, item in enumerate(value):
            first, *rest = _lines(item, join(where, str(index)), notes)
            yield f"- {first}"
            yield from ("  " + line for line in rest)


def scalar_text(value: Any) -> str:
    """One value on one line, in YAML that any reader parses to the same type."""
    if isinstance(value, list):
        return f"[{', '.join(scalar_text(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{scalar_text(key)}: {scalar_text(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    import yaml  # here, so that the front doors start without it and can report a missing package

    if isinstance(value, str):
        # Quote words such as yes and null, which YAML reads as other types.
        if re.fullmatch(r"[A-Za-z/][\w./-]*", value, re.ASCII) and isinstance(yaml.safe_load(value), str):
            return value
        return yaml.safe_dump(value, default_style='"', width=10**9, allow_unicode=True).removesuffix("\n")
    return yaml.safe_dump(value, width=10**9).removesuffix("\n").removesuffix("\n...")
