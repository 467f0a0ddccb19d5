"""The text of --help: every setting with its dotted name, type, value and docstring."""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from megajax.config import field_types
from megajax.config.class_references import public_class
from megajax.config.dump import plain, scalar_text
from megajax.config.errors import ConfigError, Problem
from megajax.config.hints import did_you_mean, either
from megajax.config.settings_tree import join, plain_name, short_type

WIDTH = 110


@dataclass(frozen=True, slots=True)
class Node:
    """A setting or an entry of a list."""

    name: str
    annotation: Any
    value: object = None
    """What it holds; None for a config of defaults, MISSING for a setting that must be given."""
    text: str = ""
    """Its docstring."""

    def classes(self) -> tuple[type, ...]:
        """The config classes that it may hold, the present one first."""
        present = (type(self.value),) if field_types.is_config(self.value) else ()
        return tuple(dict.fromkeys((*present, *field_types.configs(self.annotation))))

    def chosen(self) -> type | None:
        """The class that it holds, or must hold; None without one, and if there is a choice."""
        classes = self.classes()
        if field_types.is_config(self.value) or (self.value is MISSING and len(classes) == 1):
            return classes[0]
        return None

    def has_choice(self) -> bool:
        """Whether it may hold something else than one class."""
        return len(field_types.kinds(self.annotation)) > 1

    def entry(self, number: int) -> "Node | None":
        """An entry of a list; None for other settings."""
        if not field_types.lists(self.annotation):
            return None
        items = field_types.items(self.value)
        annotation = field_types.entry(self.annotation, number)
        return Node(f"{self.name}.{number}", annotation, items[number] if number < len(items) else MISSING)


def settings_help(cls: type, config: object = None, only: str = "") -> str:
    """The settings below a config class, with the values of `config` (None: the defaults), of the classes it holds.

    only: a setting, whose other classes are listed too; one of these, as in data.ChatConfig; or a part of names.

    Raises ConfigError for an unknown part.
    """
    walk, topic = _Walk(), plain_name(only)
    if only and (match := walk.find(Node("", cls, config), topic.removesuffix(".type").split("."))) is not None:
        return "\n".join(walk.topic(*match))
    entries = [entry for entry in walk.config(cls, config) if topic in entry.name]
    if not entries:
        above, _, last = topic.rpartition(".")
        parent = walk.find(Node("", cls, config), above.split(".")) if last[0:1].isupper() else None
        place = None if parent is None else parent[0] if parent[0].classes() else parent[0].entry(0)
        classes = () if place is None else place.classes()
        hint = f"the classes are {either(candidate.__name__ for candidate in classes)}" if classes else ""
        hint = hint or did_you_mean(topic, [*field_types.hints(cls), *field_types.names(cls)])
        raise ConfigError([Problem(f"--help={only}", "no such class" if classes else "no such setting", hint)])
    parts: dict[str, list[str]] = {}
    for entry in entries:
        parts.setdefault(entry.name.partition(".")[0], []).append(_block(entry))
    return "\n\n".join("\n".join(blocks) for blocks in parts.values())


def common_help(cls: type, config: object, names: Sequence[str]) -> str:
    """The settings in `names` that exist, in this order. If union members share a name, the current member's."""
    walk = _Walk()
    matches = [walk.find(Node("", cls, config), name.removesuffix(".type").split(".")) for name in names]
    return "\n".join(_block(next(walk.node(match[0]))) for match in matches if match is not None)


def field_texts(cls: type) -> dict[str, str]:
    """Field -> its docstring, the string below it in the source."""
    return _Walk().texts(cls)


def entry_text(name: str, kind: str, text: str) -> str:
    """The entry of one flag in --help."""
    body = textwrap.fill(" ".join(text.split()), WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  --{name}  {kind}".rstrip() + (f"\n{body}" if text else "")


def _block(node: Node, kind: str = "") -> str:
    """The lines of a setting: its type and value, and its docstring. kind: its type in words."""
    text = _value_text(node.value, node.annotation, node.name)
    value = f"= {text}" if text else "(must be given)"
    # A long list of values wraps under its name.
    head = textwrap.wrap(f"{kind or field_types.help_text(node.annotation)} {value}", WIDTH - 6)
    several = len(node.classes()) > 1 or (node.classes() and field_types.protocols(node.annotation))
    name = f"{node.name}.type" if several else node.name
    if len(f"  --{name}  ") + len(head[0]) <= WIDTH and len(head) == 1:
        return entry_text(name, head[0], node.text)
    return "\n".join(
        [f"  --{name}", *(" " * 6 + line for line in head), *entry_text("", "", node.text).splitlines()[1:]]
    )


def _summary(cls: type) -> str:
    """The first sentence of a class's docstring, in one line."""
    text = " ".join(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0].split())
    return textwrap.shorten(re.split(r"(?<! al)[.:] ", text)[0].rstrip("."), WIDTH - 34, placeholder=" …")


class _Walk:
    """Settings of a tree. The docstring of a field is the string literal below it; each source file is parsed once."""

    def __init__(self) -> None:
        self.modules: dict[str, dict[str, dict[str, str]]] = {}
        self.above: list[type] = []

    def children(self, cls: type, value: object, prefix: str) -> Iterator[Node]:
        """The settings of a class. value: None for its defaults."""
        texts, annotations = self.texts(cls), field_types.hints(cls)
        for field in field_types.fields(cls):
            if field.init:
                current = field_types.default(field) if value is None else getattr(value, field.name)
                yield Node(join(prefix, field.name), annotations[field.name], current, texts.get(field.name, ""))

    def config(self, cls: type, value: object, prefix: str = "") -> Iterator[Node]:
        """The settings that are shown of a class, with those of the configs that it holds."""
        if cls not in self.above:
            self.above.append(cls)
            for child in self.children(cls, value, prefix):
                yield from self.node(child)
            self.above.pop()

    def node(self, node: Node) -> Iterator[Node]:
        """A setting, and the settings of the configs that it holds."""
        if not node.classes() or node.has_choice():
            yield node
        if (chosen := node.chosen()) is not None:
            yield from self.config(chosen, node.value if field_types.is_config(node.value) else None, node.name)
        for number, item in enumerate(field_types.items(node.value)):
            if field_types.is_config(item):
                yield from self.config(type(item), item, f"{node.name}.{number}")

    def find(self, node: Node, parts: Sequence[str], named: type | None = None) -> tuple[Node, type | None] | None:
        """The setting of a dotted name below a node, and the class that the name ends with; None if there is none."""
        if not parts:
            return node, named
        part, rest = parts[0], parts[1:]
        if part.isdigit() and (entry := node.entry(int(part))) is not None:
            return self.find(entry, rest)
        classes = (node.annotation,) if not node.name else node.classes() if named is None else (named,)
        for cls in classes:
            value = node.value if isinstance(node.value, cls) else None
            for child in self.children(cls, value, node.name):
                if child.name.rpartition(".")[2] == part and (match := self.find(child, rest)) is not None:
                    return match
        for cls in classes:
            if node.name and short_type(part) == short_type(cls.__name__):
                return self.find(node, rest, cls)
        above = public_class(part) if part[0:1].isupper() and field_types.protocols(node.annotation) else None
        if above is not None and not field_types.misfit(above, node.annotation):
            return self.find(node, rest, above)
        return None if (entry := node.entry(0)) is None else self.find(entry, parts)

    def topic(self, node: Node, named: type | None) -> Iterator[str]:
        """The lines about one setting, or about one of its classes: that class's settings, and a list of the others."""
        cls, item = named or node.chosen(), node.entry(0)
        if cls is None and len(node.classes()) == 1:
            cls = node.classes()[0]
        if named is not None:
            yield textwrap.indent(inspect.cleandoc(named.__doc__ or ""), "  ") + "\n"
        elif not node.classes() or node.has_choice():
            rest = [kind for kind in field_types.kinds(node.annotation) if kind not in node.classes()]
            kinds = ["a class below", *map(field_types.help_text, rest)]
            yield _block(node, " or ".join(kinds) if len(node.classes()) > 1 else "")
        settings = list(self.config(cls, node.value if type(node.value) is cls else None, node.name)) if cls else []
        settings += [] if node.classes() else list(self.node(node))[1:]
        yield from map(_block, settings)
        place = node if item is None or node.classes() else item
        others = [other for other in place.classes() if other is not cls and not (place is item and settings)]
        if others:
            head = "other classes" if cls else "classes"
            yield f"\n{head}; --help={place.name}.{others[0].__name__} shows the settings of one\n"
            yield from (f"  {other.__name__:<30}  {_summary(other)}" for other in others)

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


def _value_text(value: object, annotation: object, name: str) -> str:
    """A short text of a value: configs by class name."""
    if value is MISSING:
        return ""
    if field_types.is_config(value):
        return type(value).__name__
    if any(map(field_types.is_config, items := field_types.items(value))):
        return ", ".join(type(item).__name__ for item in items)
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
