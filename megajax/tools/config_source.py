"""A config written as a config file: Python that builds it again."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from megajax.config import schema
from megajax.config.patch import join
from megajax.layers.config import BlockConfig
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
    blocks = [f"{STEP}{name} = {text}\n" for name, text in writer.blocks.values()]
    imports = "".join(_imports(writer.names))
    return f'"""{head}"""\n\n{imports}\n\ndef config() -> RunConfig:\n{"".join(blocks)}{STEP}return {body}\n'


def _imports(names: Collection[tuple[str, str]]) -> Iterator[str]:
    modules = sorted({module for module, _ in names}, key=lambda module: (module.startswith("megajax"), module))
    for place, module in enumerate(modules):
        if place and module.startswith("megajax") and not modules[place - 1].startswith("megajax"):
            yield "\n"
        taken = sorted(name for there, name in names if there == module)
        line = f"from {module} import {', '.join(taken)}\n"
        yield (
            line if len(line) <= WIDTH + 1 else f"from {module} import (\n{''.join(f'{STEP}{n},\n' for n in taken)})\n"
        )


class _Writer:
    def __init__(self, written: Collection[str]):
        self.written = written
        self.names: set[tuple[str, str]] = set()
        self.blocks: dict[BlockConfig, tuple[str, str]] = {}

    def expression(self, value: Any, where: str, taken: int, indent: str) -> str:
        """The value as Python; `taken` signs of its first line are in use, further lines begin with `indent`."""
        if isinstance(value, BlockConfig):
            return self._block(value, where)
        if schema.is_config(value):
            return self._call(value, where, taken, indent)
        if isinstance(value, tuple):
            items = [self.expression(item, join(where, str(place)), len(indent) + 4, indent + STEP)
                     for place, item in enumerate(value)]  # fmt: skip
            return self._wrapped("(", items, ")", taken, indent)
        if isinstance(value, Mapping):
            items = []
            for key, item in value.items():
                name = f"{_text(key)}: "
                items.append(name + self.expression(item, join(where, key), len(indent) + 4 + len(name), indent + STEP))
            return self._wrapped("{", items, "}", taken, indent)
        if isinstance(value, Path):
            self.names.add(("pathlib", "Path"))
            return f"Path({_text(str(value))})"
        if isinstance(value, str):
            return _text(value)
        if type(value) is int and abs(value) >= 10_000:
            return f"{value:_}"
        return repr(value)

    def _block(self, block: BlockConfig, where: str) -> str:
        """Blocks are named before the config, each once."""
        if block not in self.blocks:
            name = "block" if not self.blocks else f"block_{len(self.blocks) + 1}"
            self.blocks[block] = name, ""
            self.blocks[block] = name, self._call(block, where, len(f"{STEP}{name} = "), STEP)
        return self.blocks[block][0]

    def _call(self, value: Any, where: str, taken: int, indent: str) -> str:
        cls = type(value)
        self.names.add((cls.__module__, cls.__name__))
        items = []
        for field in fields(value):
            here, place = getattr(value, field.name), join(where, field.name)
            default = schema.default(field)
            if default is MISSING or here != default or self._is_written(place):
                name = f"{field.name}="
                items.append(name + self.expression(here, place, len(indent) + 4 + len(name), indent + STEP))
        return self._wrapped(f"{cls.__name__}(", items, ")", taken, indent)

    def _is_written(self, place: str) -> bool:
        return any(name == place or name.startswith(f"{place}.") for name in self.written)

    def _wrapped(self, start: str, items: list[str], end: str, taken: int, indent: str) -> str:
        alone = "," if start == "(" and len(items) == 1 else ""
        line = f"{start}{', '.join(items)}{alone}{end}"
        if "\n" not in line and taken + len(line) + 1 <= WIDTH:
            return line
        return f"{start}\n" + "".join(f"{indent}{STEP}{item},\n" for item in items) + indent + end


def _text(value: str) -> str:
    """A text in double quotes, as the formatter has it."""
    text = repr(value)
    return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in value else text
