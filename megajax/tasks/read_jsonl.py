"""Read the files of tasks. Errors name the file and line."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megajax.config.errors import UserError
from megajax.config.hints import did_you_mean
from megajax.config.read_limits import json_fault
from megajax.storage.local_copies import read_text


def read_lines(path: str, fields: Mapping[str, type]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) for each line of a .jsonl file except empty ones.

    fields: name -> type of the fields that every line must have. Raises UserError for a line that is not an object or
    lacks a field, and for a file without lines.
    """
    empty = True
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        empty = False
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number}: is not JSON: {json_fault(error)}. Give one object in each line."
            ) from error
        if not isinstance(value, dict):
            text = json.dumps(value)[:60]
            raise UserError(f"{path}, line {number}: is {text}, not an object with {_field_list(fields)}.")
        for name, kind in fields.items():
            if name not in value:
                hint = did_you_mean(name, value)
                names = ", ".join(map(str, value)) or "nothing"
                raise UserError(f"{path}, line {number}: lacks {name}; it has {names}.{' ' * bool(hint)}{hint}")
            if not isinstance(value[name], kind) or (kind is int and isinstance(value[name], bool)):
                value_text = json.dumps(value[name])[:60]
                raise UserError(f"{path}, line {number}: {name} is {value_text}, not {_NAMES[kind]}.")
        yield number, value
    if empty:
        raise UserError(f"{path}: has no lines. Give one object with {_field_list(fields)} in each line.")


_NAMES: Mapping[type, str] = {str: "text", list: "a list", int: "a whole number"}


def _field_list(fields: Mapping[str, type]) -> str:
    return ", ".join(f"{name} ({_NAMES[kind]})" for name, kind in fields.items())
