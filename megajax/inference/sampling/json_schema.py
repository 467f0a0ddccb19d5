"""JSON Schema (draft 2020-12) to a grammar: every text of the grammar is valid under the schema.

The converse does not hold: members come in the order of `properties`, members that the schema does not name are
generated only if `additionalProperties` asks for them, and numbers and blanks are bounded (see `json_grammar`).
Keywords that are not supported are refused by name.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from megajax.config.errors import UserError
from megajax.inference.sampling import json_grammar as grammar
from megajax.inference.sampling.grammar import Grammar, choice

ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id")
)
"""Keywords without an effect on validity."""
DEFINITIONS = frozenset(("$defs", "definitions"))
KEYWORDS: Mapping[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern")),
    "array": frozenset(("items", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties")),
    "number": frozenset(),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "boolean": frozenset(),
    "null": frozenset(),
}
"""Type -> keywords that bound its values."""
DEEPEST = 64
"""Most schemas within each other."""
COUNT = 2**16
"""Largest number in a schema."""


def schema_grammar(schema: Any) -> Grammar:
    """The grammar of documents under this schema, a mapping or a bool.

    Raises UserError, which names the place in the schema, for what is malformed, unsupported, or allows no value.
    """
    return _Reader(schema).read(schema, "", ())


class _Reader:
    """Reads a schema and what it refers to."""

    def __init__(self, root: Any):
        self.root = root
        self._targets: dict[str, Grammar] = {}
        """Of each reference. Definitions that use the next one twice would be read 2 ** n times without it."""

    def read(self, schema: Any, place: str, references: tuple[str, ...]) -> Grammar:
        """references: those on the way here, to recognise recursion."""
        if schema is True or schema == {}:
            return grammar.value()
        if not isinstance(schema, Mapping):
            what = "allows no value" if schema is False else f"must be an object, got {type(schema).__name__}"
            raise _refused(place, what)
        if place.count("/") > DEEPEST:
            raise _refused(place, f"is nested more than {DEEPEST} deep")
        used = {name for name in schema if name not in ANNOTATIONS and name not in DEFINITIONS}
        for name, reader in self.alone().items():
            if name in used:
                others = sorted(used - {name} - ({"type"} if name in ("enum", "const") else set()))
                if others:
                    raise _refused(f"{place}/{others[0]}", f"is not supported beside {name}")
                return reader(schema, place, references)
        return self._typed(schema, used, place, references)

    def alone(self) -> Mapping[str, Callable[[Mapping[str, Any], str, tuple[str, ...]], Grammar]]:
        """Readers of the keywords that stand alone."""
        return {"$ref": self._reference, "anyOf": self._any, "enum": self._enumerated, "const": self._constant}

    def _reference(self, schema: Mapping[str, Any], place: str, references: tuple[str, ...]) -> Grammar:
        name, target = schema["$ref"], self.root
        if not isinstance(name, str) or not name.startswith("#/"):
            raise _refused(f"{place}/$ref", "must begin with #/: only definitions of the same schema can be used")
        if name in references:
            raise _refused(f"{place}/$ref", f"is recursive: {name}")
        if name in self._targets:
            return self._targets[name]
        for key in name[2:].split("/"):
            key = key.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or key not in target:
                raise _refused(f"{place}/$ref", f"refers to {name}, which is missing")
            target = target[key]
        self._targets[name] = self.read(target, place, (*references, name))
        return self._targets[name]

    def _any(self, schema: Mapping[str, Any], place: str, references: tuple[str, ...]) -> Grammar:
        options = schema["anyOf"]
        if not isinstance(options, list) or not options:
            raise _refused(f"{place}/anyOf", "must be a list of schemas")
        return choice(
            *(self.read(option, f"{place}/anyOf/{number}", references) for number, option in enumerate(options))
        )

    def _enumerated(self, schema: Mapping[str, Any], place: str, references: tuple[str, ...]) -> Grammar:
        del references
        values = schema["enum"]
        if not isinstance(values, list):
            raise _refused(f"{place}/enum", "must be a list of values")
        return self._constants(schema, values, f"{place}/enum")

    def _constant(self, schema: Mapping[str, Any], place: str, references: tuple[str, ...]) -> Grammar:
        del references
        return self._constants(schema, [schema["const"]], f"{place}/const")

    def _constants(self, schema: Mapping[str, Any], values: list[Any], place: str) -> Grammar:
        types = _types(schema, place)
        values = [value for value in values if any(_is_of(value, name) for name in types)]
        if not values:
            raise _refused(place, f"has no value of the type {', '.join(types)}")
        return choice(*map(grammar.constant, values))

    def _typed(self, schema: Mapping[str, Any], used: set[str], place: str, references: tuple[str, ...]) -> Grammar:
        types = _types(schema, place)
        if "type" not in schema:
            # A keyword bounds the values of its type alone. Those of the types that are not bounded are left out.
            types = [name for name, keywords in KEYWORDS.items() if keywords & used] or types
        supported = frozenset(("type",)).union(*KEYWORDS.values())
        if unknown := sorted(used - supported):
            raise _refused(f"{place}/{unknown[0]}", "is not supported")
        if "number" in types and (bounds := sorted(KEYWORDS["integer"] & used)):
            raise _refused(f"{place}/{bounds[0]}", "is supported for integers only: set type to integer")
        readers = {
            "string": self._string,
            "array": self._array,
            "object": self._object,
            "integer": self._integer,
        }
        fixed = {"number": grammar.NUMBER, "boolean": grammar.BOOLEAN, "null": grammar.NULL}
        return choice(*(fixed[name] if name in fixed else readers[name](schema, place, references) for name in types))

    def _string(self, schema: Mapping[str, Any], place: str, references: tuple[str, ...]) -> Grammar:
        del references
        if "pattern" not in schema:
            return grammar.string(*_bounds(schema, "minLength", "maxLength", place))
        if lengths := sorted({"minLength", "maxLength"} & set(schema)):
            raise _refused(f"{place}/{lengths[0]}", "is not supported beside pattern: write it into the pattern")
        if not isinstance(schema["pattern"], str):
            raise _refused(f"{place}/pattern", "must be a regular expression")
        return grammar.matching(schema["pattern"])

    def _integer(self, schema: Mapping[str, Any], place: str, references: tuple[str, ...]) -> Grammar:
        del references
        bounds = {name: schema[name] for name in KEYWORDS["integer"] if name in schema}
        for name, bound in bounds.items():
            if isinstance(bound, bool) or not isinstance(bound, int | float) or not -math.inf < bound < math.inf:
                raise _refused(f"{place}/{name}", f"must be a number, got {bound!r}")
        if not bounds:
            return grammar.INTEGER
        least = max(math.ceil(bounds.get("minimum", -grammar.LARGEST)), -grammar.LARGEST)
        least = max(least, math.floor(bounds.get("exclusiveMinimum", least - 1)) + 1)
        most = min(math.floor(bounds.get("maximum", grammar.LARGEST)), grammar.LARGEST)
        most = min(most, math.ceil(bounds.get("exclusiveMaximum", most + 1)) - 1)
        if most < least:
            raise _refused(f"{place}/{min(bounds)}", "leaves no integer")
        return grammar.integers(least, most)

    def _array(self, schema: Mapping[str, Any], place: str, references: tuple[str, ...]) -> Grammar:
        least, most = _bounds(schema, "minItems", "maxItems", place)
        if most == 0:
            return grammar.array(grammar.NULL, 0, 0)
        return grammar.array(self.read(schema.get("items", True), f"{place}/items", references), least, most)

    def _object(self, schema: Mapping[str, Any], place: str, references: tuple[str, ...]) -> Grammar:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise _refused(f"{place}/properties", "must be an object of schemas")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _refused(f"{place}/required", "must be a list of names")
        if not properties and not required and schema.get("additionalProperties", True) is True:
            return grammar.any_object()
        further = schema.get("additionalProperties", "properties" not in schema)
        named = {name: (each, f"{place}/properties/{name}") for name, each in properties.items()}
        for name in required:
            if name not in named and schema.get("additionalProperties") is False:
                raise _refused(f"{place}/required", f"names {name}, which additionalProperties forbids")
            named.setdefault(name, (schema.get("additionalProperties", True), f"{place}/additionalProperties"))
        members = [
            (name, self.read(each, at, references), name in required)
            for name, (each, at) in named.items()
            if each is not False or name in required
        ]
        other = None if further is False else self.read(further, f"{place}/additionalProperties", references)
        return grammar.members(members, other)


def _types(schema: Mapping[str, Any], place: str) -> list[str]:
    """All without the keyword. An integer is a number."""
    names = schema.get("type", [name for name in KEYWORDS if name != "integer"])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not names or any(name not in tuple(KEYWORDS) for name in names):
        raise _refused(f"{place}/type", f"must be one of {', '.join(KEYWORDS)}, or a list of them")
    return names


def _is_of(value: Any, name: str) -> bool:
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, float) and value.is_integer() and name == "integer":
        return True
    kinds = {"string": str, "array": list, "object": Mapping, "number": int | float, "integer": int}
    return name in kinds and isinstance(value, kinds[name])


def _bounds(schema: Mapping[str, Any], lower: str, upper: str, place: str) -> tuple[int, int | None]:
    least, most = schema.get(lower, 0), schema.get(upper)
    for name, value in ((lower, least), (upper, most)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= COUNT):
            raise _refused(f"{place}/{name}", f"must be an integer between 0 and {COUNT}, got {value!r}")
    if most is not None and most < least:
        raise _refused(f"{place}/{upper}", f"is {most}, below {lower}, {least}")
    return least, most


def _refused(place: str, what: str) -> UserError:
    return UserError(f"JSON schema: {place or 'the schema'} {what}")
