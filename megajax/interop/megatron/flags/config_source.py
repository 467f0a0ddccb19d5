"""Write a config as a config file: Python source that builds an equal config."""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from megajax.config import schema
from megajax.config.patch import join
from megajax.layers.block.residual import ResidualBlock
from megajax.training.run_config import RunConfig

WIDTH = 120
STEP = "    "


def python_source(config: RunConfig, title: str, always_written: Collection[str] = ()) -> str:
    """A config file whose config() returns an equal config.

    title: the text at its top; always_written: dotted settings that are written even if they equal their defaults.
    """
    writer = _Writer(always_written)
    body = writer.expression(config, "", len(STEP + "return "), STEP)
    head = title.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    blocks = "".join(f"{STEP}{name} = {text}\n" for name, text in writer.blocks.values())
    imports = "from pathlib import Path\n\n" * writer.names_path + "import megajax as mj"
    return f'"""{head}"""\n\n{imports}\n\n\ndef config() -> mj.RunConfig:\n{blocks}{STEP}return {body}\n'


class _Writer:
    def __init__(self, always_written: Collection[str]):
        self.always_written = always_written
        self.names_path = False
        self.blocks: dict[ResidualBlock, tuple[str, str]] = {}
        """Each distinct block is a variable before the config: (name, expression)."""

    def expression(self, value: Any, setting: str, column: int, indent: str) -> str:
        """The value as Python, from `column` of the current line; further lines begin with `indent`."""
        if isinstance(value, ResidualBlock):
            if value not in self.blocks:
                name = f"block_{len(self.blocks) + 1}" if self.blocks else "block"
                self.blocks[value] = name, ""
                self.blocks[value] = name, self._config(value, setting, len(f"{STEP}{name} = "), STEP)
            return self.blocks[value][0]
        if schema.is_config(value):
            return self._config(value, setting, column, indent)
        if isinstance(value, tuple):
            parts = {str(place): ("", item) for place, item in enumerate(value)}
            return self._wrapped("(", parts, ")", setting, column, indent)
        if isinstance(value, Mapping):
            parts = {key: (f"{_text(key)}: ", item) for key, item in value.items()}
            return self._wrapped("{", parts, "}", setting, column, indent)
        if isinstance(value, Path):
            self.names_path = True
            return f"Path({_text(str(value))})"
        if isinstance(value, str):
            return _text(value)
        return f"{value:_}" if type(value) is int and abs(value) >= 10_000 else repr(value)

    def _config(self, value: Any, setting: str, column: int, indent: str) -> str:
        parts = {}
        for field in fields(value):
            field_value, default, field_setting = (
                getattr(value, field.name),
                schema.default(field),
                join(setting, field.name),
            )
            is_written = any(f"{name}.".startswith(f"{field_setting}.") for name in self.always_written)
            if default is MISSING or field_value != default or is_written:
                parts[field.name] = (f"{field.name}=", field_value)
        return self._wrapped(f"mj.{type(value).__name__}(", parts, ")", setting, column, indent)

    def _wrapped(
        self, start: str, parts: Mapping[str, tuple[str, Any]], end: str, setting: str, column: int, indent: str
    ) -> str:
        """parts: name of a setting -> text before its value, and the value."""
        inner = indent + STEP
        items = [
            label + self.expression(value, join(setting, name), len(inner + label), inner)
            for name, (label, value) in parts.items()
        ]
        trailing_comma = "," if start == "(" and len(items) == 1 else ""
        line = f"{start}{', '.join(items)}{trailing_comma}{end}"
        return line if "\n" not in line and column + len(line) < WIDTH else _over_lines(start, items, end, indent)


def _over_lines(start: str, items: Collection[str], end: str, indent: str) -> str:
    return f"{start}\n" + "".join(f"{indent}{STEP}{item},\n" for item in items) + indent + end


def _text(value: str) -> str:
    """A string literal in double quotes, as the formatter writes it."""
    text = repr(value)
    return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in value else text
