"""Settings from YAML and JSON files. Imported only when needed, because yaml is not in the standard library."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from megajax.config.errors import UserError

MOST_VALUES = 100_000
"""Maximum number of values in a file. A few lines of YAML with nested aliases can expand to billions."""

MOST_BYTES = 1 << 23
"""Maximum size of a file of settings."""
TOO_DEEP = "lists and mappings are nested too deeply to be settings"


def parse(path: Path, label: str) -> Mapping:
    """The settings in a .yaml, .yml or .json file; `label` names it in errors. Raises UserError."""
    if (size := path.stat().st_size) > MOST_BYTES:
        raise UserError(f"{label}: has {size:,} bytes, but a file of settings may have at most {MOST_BYTES:,}")
    try:
        text = path.read_text(encoding="utf-8")
        settings = read_json(text) if path.suffix == ".json" else _bounded(yaml.load(text, _Strict))
    except RecursionError:
        raise UserError(f"{label}: {TOO_DEEP}") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else getattr(error, "lineno", None)
        place = label if line is None else f"{label}, line {line}"
        message = getattr(error, "problem", None) or getattr(error, "msg", None) or str(error).partition(";")[0]
        raise UserError(f"{place}: {message}") from error
    settings = {} if settings is None else settings
    if not isinstance(settings, Mapping):
        raise UserError(f"{label}: expected settings, name: value; got {type(settings).__name__}")
    return settings


def read_yaml(text: str) -> Any:
    """The value of a text from the command line. Raises ValueError with the reason."""
    try:
        return _bounded(yaml.load(text, _Strict))
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except yaml.MarkedYAMLError as error:
        repeated = isinstance(error, ConstructorError)
        raise ValueError(str(error.problem) if repeated else "the brackets do not match up") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _bounded(tree: Any) -> Any:
    """The tree. Raises ValueError if its aliases expand to too many values."""
    if (size := _values(tree, {})) > MOST_VALUES:
        raise ValueError(f"has {size} values with its aliases expanded, more than the {MOST_VALUES} allowed")
    return tree


def _values(tree: Any, counts: dict[int, int]) -> int:
    """Number of values of a tree with aliases expanded. counts: of lists and mappings so far, by id."""
    inner = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else ()
    if id(tree) not in counts:
        counts[id(tree)] = 1
        counts[id(tree)] = 1 + sum(_values(item, counts) for item in inner)
    return counts[id(tree)]


def read_json(text: str) -> Any:
    """JSON without repeated keys. Raises ValueError, also for numbers with thousands of digits."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key, value in pairs:
            if key in mapping:
                raise ValueError(f"{key} is given twice")
            mapping[key] = value
        return mapping

    return json.loads(text, object_pairs_hook=unique)


class _Strict(yaml.SafeLoader):
    """YAML in which a repeated key is an error; the base class would silently drop one of the values."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise ConstructorError(None, None, f"{key} is given twice", node.value[index][0].start_mark)
        return super().construct_mapping(node, deep)
