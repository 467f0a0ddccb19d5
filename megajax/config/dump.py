"""Config trees as plain values, as YAML that loads back to an equal tree, and as dotted names; differences of trees."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeGuard, get_args

from megajax.config import field_types
from megajax.config.errors import ConfigError, Problem
from megajax.config.read_limits import Json
from megajax.config.settings_tree import join, leaves


def plain(value: object, annotation: object = None, where: str = "") -> Any:
    """The tree as dict, list, str, int, float, bool and None; a member of a union has its class as `type`.

    `annotation` is that of the field (default: the value's class). Raises ConfigError for a value without a text form,
    such as a function.
    """
    if field_types.is_config(value):
        tag = field_types.tag(type(value), annotation) if annotation is not None else ""
        hints = field_types.hints(type(value))
        fields = {name: plain(getattr(value, name), hint, join(where, name)) for name, hint in hints.items()}
        return ({"type": tag} if tag else {}) | fields
    match value:
        case tuple() | list():
            return [plain(x, field_types.entry(annotation, i), join(where, str(i))) for i, x in enumerate(value)]
        case Mapping():
            kinds = [get_args(kind)[1] for kind in field_types.mappings(annotation) if get_args(kind)]
            inner = kinds[0] if kinds else Any
            return {plain(key): plain(x, inner, join(where, str(key))) for key, x in value.items()}
        case Path():
            return str(value)
        case None | str() | int() | float():
            return value
    raise ConfigError([Problem(where or "config", f"a {type(value).__name__} cannot be written to a file")])


def to_yaml(config: object, notes: Mapping[str, str] | None = None) -> str:
    """The text of config.yaml; `notes` (dotted name -> text) become comments at the ends of lines."""
    return "\n".join(_lines(plain(config), "", notes or {})) + "\n"


def flatten(config: object) -> dict[str, Any]:
    """Dotted name -> plain value, in the order of the fields; union members appear as `optimizer.type`."""
    return dict(_leaves(plain(config), ""))


def diff(old: object, new: object) -> list[str]:
    """Differences between two trees, one per line: "parallel.tensor: 1 -> 2"."""
    return _differences(flatten(old), flatten(new), "absent")


def diff_from_defaults(config: object) -> list[str]:
    """Settings that differ from the defaults of their classes, one per line: the text of config.diff."""
    defaults = default_leaves(config)
    leaves = flatten(config)
    return _differences({name: value for name, value in defaults.items() if name in leaves}, leaves, "required")


def default_leaves(config: object) -> dict[str, Any]:
    """Dotted name -> plain default, for the settings of this tree that have one."""
    return dict(_defaults(config, None, ""))


def sources_of(config: object, layers: Iterable[tuple[str, object]]) -> dict[str, str]:
    """Non-default setting -> the source that set it last. layers: sources with their settings (None: all of them)."""
    defaults = default_leaves(config)
    layer_names = [(label, None if patch is None else set(leaves(patch))) for label, patch in layers]
    sources = {}
    for name, value in flatten(config).items():
        if name in defaults and defaults[name] == value:
            continue
        parts = name.split(".")
        prefixes = {".".join(parts[: end + 1]) for end in range(len(parts))}
        for label, names in layer_names:
            if names is None or names & prefixes:
                sources[name] = label
    return sources


def _defaults(value: object, default: object, where: str) -> Iterator[tuple[str, Any]]:
    for field in field_types.fields(type(value)):
        if not field.init:
            continue
        path, current = join(where, field.name), getattr(value, field.name)
        # If the class of a node differs from the default's, compare with the defaults of its class.
        default_value = getattr(default, field.name) if type(default) is type(value) else field_types.default(field)
        hint = field_types.hints(type(value))[field.name]
        nodes = [(path, hint, current, default_value)]
        items, default_items = field_types.items(current), field_types.items(default_value)
        if any(map(field_types.is_config, items)):
            default_items = default_items if len(default_items) == len(items) else (MISSING,) * len(items)
            pairs = enumerate(zip(items, default_items, strict=True))
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


def _is_branch(value: Json) -> TypeGuard[list[Json] | dict[str, Json]]:
    match value:
        case list():
            return any(_is_branch(item) or item == {} for item in value)
        case dict():
            return bool(value)
    return False


def _leaves(value: Json, where: str) -> Iterator[tuple[str, Any]]:
    if not _is_branch(value):
        yield where, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(item, join(where, str(key)))


def _lines(value: Json, where: str, notes: Mapping[str, str]) -> Iterator[str]:
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


def scalar_text(value: object) -> str:
    """One value on one line, in YAML that any reader parses to the same type."""
    match value:
        case list():
            return f"[{', '.join(scalar_text(item) for item in value)}]"
        case dict():
            return "{" + ", ".join(f"{scalar_text(key)}: {scalar_text(item)}" for key, item in value.items()) + "}"
        case None:
            return "null"
        case bool():
            return str(value).lower()
    import yaml  # here, so that the front doors start without it and can report a missing package

    if isinstance(value, str):
        # Quote words such as yes and null, which YAML reads as other types.
        if re.fullmatch(r"[A-Za-z/][\w./-]*", value, re.ASCII) and isinstance(yaml.safe_load(value), str):
            return value
        return yaml.safe_dump(value, default_style='"', width=10**9, allow_unicode=True).removesuffix("\n")
    return yaml.safe_dump(value, width=10**9).removesuffix("\n").removesuffix("\n...")
