"""Settings from YAML and JSON files. Imported only when such a file is read, since yaml is an extra package."""

import json
from collections.abc import Mapping
from pathlib import Path

import yaml
from yaml.constructor import ConstructorError

from megajax.config.errors import UserError


def parse(path: Path, label: str) -> Mapping:
    """The settings in a .yaml, .yml or .json file; `label` names it in errors. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8")
        settings = json.loads(text) if path.suffix == ".json" else yaml.load(text, _Strict)
    except (yaml.YAMLError, json.JSONDecodeError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else getattr(error, "lineno", "?")
        what = getattr(error, "problem", None) or getattr(error, "msg", None) or str(error)
        raise UserError(f"{label}, line {line}: {what}") from error
    settings = {} if settings is None else settings
    if not isinstance(settings, Mapping):
        raise UserError(f"{label}: expected settings, name: value; got {type(settings).__name__}")
    return settings


class _Strict(yaml.SafeLoader):
    """YAML in which a repeated key is an error: the loader would drop one of the two silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise ConstructorError(None, None, f"{key} is given twice", node.value[index][0].start_mark)
        return super().construct_mapping(node, deep)
