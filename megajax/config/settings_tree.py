"""Settings before conversion to their types: trees of dotted names, and one set of settings over another."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megajax.config.parse_scalar import Text


class Mark(Enum):
    """Markers in place of a value."""

    BARE = "a name without a value: true for a switch, an error otherwise"
    INVALID = "could not be built; the problem is noted"


class Patch(dict):
    """Settings by dotted name, as a tree. It changes only the settings it names; a plain dict may be a new value."""


class Additions(Patch):
    """A patch of a mapping that may also add entries."""


@dataclass(frozen=True, slots=True)
class Over:
    """Two values for one setting. Whether the upper replaces the lower or is merged into it depends on the field."""

    lower: Any
    upper: Any

    def merged(self) -> Mapping | None:
        """Both merged, one level deep; None if one of them is a whole value.

        If the upper names a different `type`, the lower's settings are dropped.
        """
        lower, upper = (side.merged() if isinstance(side, Over) else side for side in (self.lower, self.upper))
        if not isinstance(lower, Mapping) or not isinstance(upper, Mapping):
            return None
        if "type" in lower and "type" in upper and short_type(lower["type"]) != short_type(upper["type"]):
            return upper
        result = {plain_name(key): value for key, value in lower.items()}
        for key, value in upper.items():
            name = plain_name(key)
            result[name] = Over(result[name], value) if name in result and name != "type" else value
        return result


def setting(text: str) -> tuple[str, Any]:
    """ "parallel.tensor=2" -> ("parallel.tensor", Text("2")); a name alone is a switch."""
    name, equals, value = text.removeprefix("--").partition("=")
    return plain_name(name), Text(value) if equals else Mark.BARE


def patch_of(settings: Iterable[tuple[str, Any]]) -> Patch:
    """[("parallel.tensor", Text("2"))] -> {"parallel": {"tensor": "2"}}. Later settings replace earlier ones."""
    root = Patch()
    for name, value in settings:
        _insert(root, name.split("."), value)
    return root


def _insert(node: Patch, parts: list[str], value: object) -> None:
    name, *rest = parts
    if not rest:
        node[name] = value
        return
    child = node.setdefault(name, Patch())
    if not isinstance(child, Patch | Over):
        child = node[name] = Over(child, Patch())
    _insert(child.upper if isinstance(child, Over) else child, rest, value)


def leaves(settings: object, prefix: str = "") -> Iterator[str]:
    """The dotted names of settings that a patch gives."""
    match settings:
        case Over(lower, upper):
            yield from leaves(lower, prefix)
            yield from leaves(upper, prefix)
        case Mapping() if settings:
            for key, value in settings.items():
                yield from leaves(value, join(prefix, plain_name(key)))
        case _:
            yield prefix


def join(parent: str, name: str) -> str:
    """Two parts of a dotted name; either may be empty."""
    return f"{parent}.{name}" if parent and name else parent or name


def plain_name(name: object) -> str:
    """The name with underscores for dashes."""
    return str(name).replace("-", "_")


def short_type(name: object) -> str:
    """MuonConfig, muon -> muon."""
    return str(name).lower().removesuffix("config")
