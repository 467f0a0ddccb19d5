"""A config written as a config file: Python that builds it again."""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from megajax.config import schema
from megajax.config.patch import join
from megajax.layers.config.residual import ResidualBlock
from megajax.training.run_config import RunConfig

WIDTH = 120
STEP = "    "


def python_source(config: RunConfig, title: str, written: Collection[str] = ()) -> str:
    """A config file whose config() returns an equal config.

    title: the text at its top; written: dotted settings that are written even where they are the defaults.
    """
    writer = _Writer(written)
    body = writer.expression(config, "", len(STEP + "return "), STEP)
    head = title.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    blocks = "".join(f"{STEP}{name} = {text}\n" for name, text in writer.blocks.values())
    return f'"""{head}"""\n\n{writer.imports()}\n\ndef config() -> RunConfig:\n{blocks}{STEP}return {body}\n'


class _Writer:
    def __init__(self, written: Collection[str]):
        self.written = written
        self.names: set[tuple[str, str]] = set()
        """(module, name) of what is used."""
        self.blocks: dict[ResidualBlock, tuple[str, str]] = {}
        """Blocks are named before the config, each once: (name, expression)."""

    def imports(self) -> str:
        """The import statements, that of Path first."""
        text = ""
        names = sorted(self.names, key=lambda name: (name[0].startswith("megajax"), name))
        for module, group in groupby(names, key=lambda name: name[0]):
            used = [name for _, name in group]
            line = f"from {module} import {', '.join(used)}"
            text += line if len(line) <= WIDTH else _over_lines(f"from {module} import (", used, ")", "")
            text += "\n" if module.startswith("megajax") else "\n\n"
        return text

    def expression(self, value: Any, where: str, taken: int, indent: str) -> str:
        """The value as Python; `taken` characters of its first line are in use, further lines begin with `indent`."""
        if isinstance(value, ResidualBlock):
            if value not in self.blocks:
                name = f"block_{len(self.blocks) + 1}" if self.blocks else "block"
                self.blocks[value] = name, ""
                self.blocks[value] = name, self._config(value, where, len(f"{STEP}{name} = "), STEP)
            return self.blocks[value][0]
        if schema.is_config(value):
            return self._config(value, where, taken, indent)
        if isinstance(value, tuple):
            parts = {str(place): ("", item) for place, item in enumerate(value)}
            return self._wrapped("(", parts, ")", where, taken, indent)
        if isinstance(value, Mapping):
            parts = {key: (f"{_text(key)}: ", item) for key, item in value.items()}
            return self._wrapped("{", parts, "}", where, taken, indent)
        if isinstance(value, Path):
            self.names.add(("pathlib", "Path"))
            return f"Path({_text(str(value))})"
        if isinstance(value, str):
            return _text(value)
        return f"{value:_}" if type(value) is int and abs(value) >= 10_000 else repr(value)

    def _config(self, value: Any, where: str, taken: int, indent: str) -> str:
        cls, parts = type(value), {}
        self.names.add((cls.__module__, cls.__name__))
        for field in fields(value):
            here, default, place = getattr(value, field.name), schema.default(field), join(where, field.name)
            is_written = any(f"{name}.".startswith(f"{place}.") for name in self.written)
            if default is MISSING or here != default or is_written:
                parts[field.name] = (f"{field.name}=", here)
        return self._wrapped(f"{cls.__name__}(", parts, ")", where, taken, indent)

    def _wrapped(
        self, start: str, parts: Mapping[str, tuple[str, Any]], end: str, where: str, taken: int, indent: str
    ) -> str:
        """parts: name of a setting -> what stands before its value, and the value."""
        inner = indent + STEP
        items = [
            label + self.expression(value, join(where, name), len(inner + label), inner)
            for name, (label, value) in parts.items()
        ]
        alone = "," if start == "(" and len(items) == 1 else ""
        line = f"{start}{', '.join(items)}{alone}{end}"
        return line if "\n" not in line and taken + len(line) < WIDTH else _over_lines(start, items, end, indent)


def _over_lines(start: str, items: Collection[str], end: str, indent: str) -> str:
    return f"{start}\n" + "".join(f"{indent}{STEP}{item},\n" for item in items) + indent + end


def _text(value: str) -> str:
    """A text in double quotes, as the formatter has it."""
    text = repr(value)
    return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in value else text
