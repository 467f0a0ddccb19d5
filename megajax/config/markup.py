"""Settings from YAML and JSON files. Imported only when such text is read, since yaml is an extra package."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from megajax.config.errors import UserError

MOST_VALUES = 100_000
"""Values of a file. A few lines of YAML with aliases of aliases can stand for billions."""

MOST_BYTES = 1 << 23
"""Size of a file of settings."""
TOO_DEEP = "lists and mappings are nested too deeply to be settings"


def parse(path: Path, label: str) -> Mapping:
    """The settings in a .yaml, .yml or .json file; `label` names it in errors. Raises UserError."""
    if (size := path.stat().st_size) > MOST_BYTES:
        raise UserError(f"{label}: has {size:,} bytes, and a file of settings has at most {MOST_BYTES:,}")
    try:
        text = path.read_text(encoding="utf-8")
        settings = read_json(text) if path.suffix == ".json" else _bounded(yaml.load(text, _Strict))
    except RecursionError:
        raise UserError(f"{label}: {TOO_DEEP}") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else getattr(error, "lineno", None)
        where = label if line is None else f"{label}, line {line}"
        what = getattr(error, "problem", None) or getattr(error, "msg", None) or str(error).partition(";")[0]
        raise UserError(f"{where}: {what}") from error
    settings = {} if settings is None else settings
    if not isinstance(settings, Mapping):
        raise UserError(f"{label}: expected settings, name: value; got {type(settings).__name__}")
    return settings


def read_yaml(text: str) -> Any:
    """The value of a text typed on the command line. Raises ValueError, which says what is wrong."""
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
    """The tree. Raises ValueError for one that stands for too many values."""
    if (size := _values(tree, {})) > MOST_VALUES:
        raise ValueError(f"has {size} values where its aliases stand, more than the {MOST_VALUES} allowed")
    return tree


def _values(tree: Any, known: dict[int, int]) -> int:
    """Values of a tree, those of an alias each time it is used. known: of the lists and mappings seen, by id."""
    inner = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else ()
    if id(tree) not in known:
        known[id(tree)] = 1
        known[id(tree)] = 1 + sum(_values(each, known) for each in inner)
    return known[id(tree)]


def read_json(text: str) -> Any:
    """JSON without repeated keys. Raises ValueError, for numbers with thousands of digits too."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in pairs:
            if key in made:
                raise ValueError(f"{key} is given twice")
            made[key] = value
        return made

    return json.loads(text, object_pairs_hook=unique)


class _Strict(yaml.SafeLoader):
    """YAML in which a repeated key is an error: the loader would drop one of the two silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise ConstructorError(None, None, f"{key} is given twice", node.value[index][0].start_mark)
        return super().construct_mapping(node, deep)
