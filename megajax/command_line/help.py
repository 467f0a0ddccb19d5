"""The text of --help: every setting with its dotted name, type, value and docstring."""

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from megajax.config import field_types
from megajax.config.dump import plain, scalar_text
from megajax.config.errors import ConfigError, Problem
from megajax.config.hints import did_you_mean
from megajax.config.overrides import join, plain_name

WIDTH = 110


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting: its dotted name, type in words, value ("": must be given) and docstring."""

    name: str
    kind: str
    value: str
    text: str
    member: str = ""  # its class, if that is another member of a union than the current one


def settings_help(cls: type, config: Any = None, only: str = "") -> str:
    """All settings below a config class, with the values of `config` (None: the defaults); `only`: one part of them.

    Raises ConfigError for an unknown part.
    """
    entries = list(_Walk().config(cls, config))
    if only:
        topic = plain_name(only)
        matches = [entry for entry in entries if f"{entry.name}.".startswith(f"{topic}.")]
        matches = matches or [entry for entry in entries if topic in entry.name]
        if not matches:
            hint = did_you_mean(topic, [*field_types.hints(cls), *(entry.name for entry in entries)])
            raise ConfigError([Problem(f"--help={only}", "no such setting", hint)])
        entries = matches
    parts: dict[str, list[str]] = {}
    for entry in entries:
        parts.setdefault(entry.name.partition(".")[0], []).append(_block(entry))
    return "\n\n".join("\n".join(blocks) for blocks in parts.values())


def common_help(cls: type, config: Any, names: Sequence[str]) -> str:
    """The settings in `names` that exist, in this order. If union members share a name, the current member's."""
    entries: dict[str, Entry] = {}
    for entry in _Walk().config(cls, config):
        if entry.name not in entries or (entries[entry.name].member and not entry.member):
            entries[entry.name] = entry
    return "\n".join(_block(entries[name]) for name in names if name in entries)


def field_texts(cls: type) -> dict[str, str]:
    """Field -> its docstring, the string below it in the source."""
    return _Walk().texts(cls)


def entry_text(name: str, kind: str, text: str) -> str:
    """The entry of one flag in --help."""
    body = textwrap.fill(" ".join(text.split()), WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  --{name}  {kind}".rstrip() + (f"\n{body}" if text else "")


def _block(entry: Entry) -> str:
    value = f"= {entry.value}" if entry.value else "(must be given)"
    only = f"  [{entry.member}]" if entry.member else ""
    # A long list of values wraps under its name.
    head = textwrap.wrap(f"{entry.kind} {value}{only}", WIDTH - 6) if entry.kind else [value + only]
    name = f"  --{entry.name}  "
    if len(name) + len(head[0]) <= WIDTH and len(head) == 1:
        return entry_text(entry.name, head[0], entry.text)
    return "\n".join(
        [name.rstrip(), *(" " * 6 + line for line in head), *entry_text("", "", entry.text).splitlines()[1:]]
    )


class _Walk:
    """Entries of a tree. The docstring of a field is the string literal below it; each source file is parsed once."""

    def __init__(self) -> None:
        self.modules: dict[str, dict[str, dict[str, str]]] = {}
        self.above: list[type] = []

    def config(self, cls: type, value: Any, prefix: str = "", member: str = "") -> Iterator[Entry]:
        """The entries below one config. value: None for its defaults."""
        if cls in self.above:
            return
        self.above.append(cls)
        texts, annotations = self.texts(cls), field_types.hints(cls)
        for field in field_types.fields(cls):
            if field.init:
                current = field_types.default(field) if value is None else getattr(value, field.name)
                top = Entry(
                    join(prefix, field.name),
                    field_types.kind_text(annotations[field.name]),
                    "",
                    texts.get(field.name, ""),
                )
                yield from self._field(dataclasses.replace(top, member=member), annotations[field.name], current)
        self.above.pop()

    def _field(self, top: Entry, annotation: Any, current: Any) -> Iterator[Entry]:
        members = field_types.configs(annotation)
        if field_types.is_config(current) and type(current) not in members:
            members = (type(current), *members)
        items = current if isinstance(current, tuple | list) else ()
        if not members:
            nodes = [(index, item) for index, item in enumerate(items) if field_types.is_config(item)]
            yield dataclasses.replace(top, value=_value_text(current, annotation, top.name))
            for index, item in nodes:
                yield from self.config(type(item), item, f"{top.name}.{index}", top.member)
            return
        choice = len(field_types.kinds(annotation)) > 1
        if choice:
            name = f"{top.name}.type" if len(members) > 1 or field_types.protocols(annotation) else top.name
            yield dataclasses.replace(top, name=name, value=_value_text(current, annotation, top.name))
        for cls in sorted(members, key=lambda cls: cls is not type(current)):
            present = cls is type(current)
            member = cls.__name__ if choice and not present else top.member
            yield from self.config(cls, current if present else None, top.name, member)

    def texts(self, cls: type) -> dict[str, str]:
        """Field -> its docstring, including inherited fields."""
        texts = {}
        for base in reversed(cls.__mro__):
            if dataclasses.is_dataclass(base):
                texts |= self._module(base.__module__).get(base.__qualname__.replace(".<locals>", ""), {})
        return texts

    def _module(self, name: str) -> dict[str, dict[str, str]]:
        if name not in self.modules:
            file = getattr(sys.modules.get(name), "__file__", None)
            tree = ast.parse(Path(file).read_bytes()) if file and Path(file).is_file() else ast.Module([], [])
            self.modules[name] = dict(_class_texts(tree, ""))
        return self.modules[name]


def _value_text(value: Any, annotation: Any, name: str) -> str:
    """A short text of a value: configs by class name."""
    if value is MISSING:
        return ""
    if field_types.is_config(value):
        return type(value).__name__
    if isinstance(value, tuple | list) and any(field_types.is_config(item) for item in value):
        return ", ".join(type(item).__name__ for item in value)
    text = scalar_text(plain(value, annotation, name))
    return "none" if text == "null" else text


def _class_texts(tree: ast.AST, prefix: str) -> Iterator[tuple[str, dict[str, str]]]:
    for node in getattr(tree, "body", []):
        if isinstance(node, ast.ClassDef):
            texts = {}
            for field, below in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    text = _text(below)
                    if text is not None:
                        texts[field.target.id] = inspect.cleandoc(text)
            yield prefix + node.name, texts
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield from _class_texts(node, f"{prefix}{node.name}.")


def _text(node: ast.stmt) -> str | None:
    """The string of a statement that is only a string, otherwise None."""
    value = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
    return value if isinstance(value, str) else None
