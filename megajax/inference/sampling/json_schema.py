"""JSON schemas as guides: which keywords hold schemas, what is wrong with a schema, how it moves to another place."""

from collections.abc import Iterator
from typing import Any

from megajax.config.hints import did_you_mean

IN_ONE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
IN_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
IN_MAPPING = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas, lists of schemas, and schemas by name. Values of others are data."""
PLAIN = (
    "$anchor $comment $id $ref $schema const contentEncoding contentMediaType default deprecated dependentRequired "
    "description enum examples exclusiveMaximum exclusiveMinimum format id maxContains maxItems maxLength "
    "maxProperties maximum minContains minItems minLength minProperties minimum multipleOf pattern readOnly required "
    "title type uniqueItems unevaluatedItems unevaluatedProperties writeOnly"
)
KEYWORDS = frozenset((*PLAIN.split(), *IN_ONE, *IN_LIST, *IN_MAPPING))
"""Keywords of JSON Schema. A validator ignores others, so a misspelled keyword would go unnoticed."""
NUMBERS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
"""Keywords with numbers that a text has to match."""
EXACT, LARGEST = 2**53, 2**63 - 1
"""llguidance reads numbers as doubles, which hold all integers up to EXACT, and then takes at most LARGEST."""


def schema_problems(schema: object, place: str = "") -> Iterator[str]:
    """A sentence for each keyword that JSON Schema does not have, and for each number that a guide would round."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        location = f"{place}/{keyword}"
        if keyword not in KEYWORDS:
            suggestion = did_you_mean(keyword, KEYWORDS)
            yield f"{location} is no keyword{f': {suggestion}' if suggestion else ''}"
        elif keyword in NUMBERS and (rounded := next(_rounded(value, keyword), None)) is not None:
            yield f"{location} has {rounded}, which a guide would round: beyond {EXACT}, give a string or a regex"
        for name, part in _parts(keyword, value).items():
            yield from schema_problems(part, f"{location}{name}")


def moved(schema: object, place: str) -> Any:
    """A JSON schema whose references hold when it stands at another place. place: as a reference.

    Anchors (`#name`) and data stay as they are, and so does a schema with its own `$id`, which references start from.
    """
    if not isinstance(schema, dict) or "$id" in schema:
        return schema
    result = dict(schema)
    for keyword, value in schema.items():
        if parts := [moved(part, place) for part in _parts(keyword, value).values()]:
            named = keyword in IN_MAPPING
            one_or_list = parts if isinstance(value, list) else parts[0]
            result[keyword] = dict(zip(value, parts, strict=True)) if named else one_or_list
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        result["$ref"] = f"{place}{reference[1:]}"
    return result


def anchors(schema: object) -> Iterator[str]:
    """The anchors of a schema, to which a document can refer."""
    if isinstance(schema, dict) and "$id" not in schema:
        if isinstance(name := schema.get("$anchor"), str):
            yield name
        for keyword, value in schema.items():
            for part in _parts(keyword, value).values():
                yield from anchors(part)


def _parts(keyword: str, value: object) -> dict[str, Any]:
    """The schemas in the value of a keyword, by their locations in it."""
    if keyword in (*IN_LIST, "items") and isinstance(value, list):
        return {f"/{number}": part for number, part in enumerate(value)}
    if keyword in IN_MAPPING and isinstance(value, dict):
        return {f"/{name}": part for name, part in value.items()}
    return {"": value} if keyword in IN_ONE and isinstance(value, dict) else {}


def _rounded(value: Any, keyword: str) -> Iterator[int]:
    """The integers in the value of a keyword that a guide would change."""
    if value == -LARGEST - 1 or (isinstance(value, int) and abs(value) >= EXACT):
        # A bound that is excluded is one away from the one that counts; the lowest number ends llguidance's process.
        read_value = min(max(int(float(value)) if abs(value) <= LARGEST + 1 else 0, -LARGEST), LARGEST)
        if read_value != value or keyword.startswith("exclusive"):
            yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _rounded(part, keyword)
