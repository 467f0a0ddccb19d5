"""Settings from YAML and JSON files. Imported only when needed, because yaml is not in the standard library."""

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from megajax.config.errors import UserError
from megajax.config.read_limits import SETTINGS, Budget, OverBudget, parse_json, read_file

LONGEST_NUMBER = 100
"""Characters."""
TOO_DEEP = "lists and mappings are nested too deeply to be settings"


def parse(path: Path, label: str) -> Mapping:
    """The settings in a .yaml, .yml or .json file; `label` names it in errors. Raises UserError."""
    text = read_file(path)
    try:
        settings = parse_json(text) if path.suffix == ".json" else _loaded(text.decode("utf-8"), label)
    except RecursionError:
        raise UserError(f"{label}: {TOO_DEEP}") from None
    except OverBudget:
        raise
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
        return _loaded(text, "the text")
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except yaml.MarkedYAMLError as error:
        repeated = isinstance(error, ConstructorError)
        raise ValueError(str(error.problem) if repeated else "the brackets do not match up") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _loaded(text: str, where: str) -> Any:
    """The value of YAML. Raises yaml.YAMLError, and OverBudget, also if aliases expand to too many values."""
    loader = _Strict(text)
    loader.budget = Budget(where, SETTINGS)
    tree = loader.get_single_data()
    Budget(where, SETTINGS).demand_tree(tree)
    return tree


class _Strict(yaml.SafeLoader):
    """YAML in which a repeated key is an error; the base class would silently drop one of the values."""

    budget: Budget

    def construct_number(self, node: yaml.ScalarNode) -> float:
        """In YAML, 1:30:00 is a number of base 60; PyYAML's time for it is the square of its length."""
        if len(node.value) > LONGEST_NUMBER:
            message = f"a number of {len(node.value)} characters, at most {LONGEST_NUMBER} are read"
            raise ConstructorError(None, None, message, node.start_mark)
        is_whole = node.tag == "tag:yaml.org,2002:int"
        return self.construct_yaml_int(node) if is_whole else self.construct_yaml_float(node)

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        self.budget.spend(1)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = set[Any]()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):  # the base class refuses the others
                if key in keys:
                    raise ConstructorError(None, None, f"{key} is given twice", key_node.start_mark)
                keys.add(key)
        return super().construct_mapping(node, deep)


for _kind in ("int", "float"):
    _Strict.add_constructor(f"tag:yaml.org,2002:{_kind}", _Strict.construct_number)
