"""The index of the OCDBT database in a step: the file, offset and length of each value, or the value if it is small."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import tensorstore as ts

MANIFEST = "manifest.ocdbt"


class Place(NamedTuple):
    """A value in a file of the database."""

    name: str
    """Path in the folder of the database."""
    start: int
    bytes: int


type Index = dict[str, bytes | Place]
"""Key -> value, or its place."""


def read_index(folder: Path, verify: Callable[[Place], object]) -> Index:
    """The newest version of a database. TensorStore compares all nodes of the index with their CRC-32C.

    verify: called with the place of each node before it is read. Raises ValueError, KeyError or OSError if the index
    can't be read.
    """
    # JSON rather than a URL, in which some characters of a path would need escaping.
    base = ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    versions = ts.ocdbt.dump(base).result()["versions"]
    newest = max(versions, key=lambda version: version["generation_number"])["root"]
    index: Index = {}
    locations = set[str]()
    nodes: list[tuple[str, bytes]] = [(newest["location"], b"")] if "location" in newest else []
    while nodes:
        location, prefix = nodes.pop()
        if location in locations:  # no writer does this, and a circle of nodes would be read without end
            raise ValueError(f"two nodes of its index refer to {location}")
        locations.add(location)
        verify(_place(location))
        for entry in ts.ocdbt.dump(base, location).result()["entries"]:
            if "location" in entry:
                nodes.append((entry["location"], prefix + entry["subtree_common_prefix"]))
            else:
                index[(prefix + entry["key"]).decode()] = _value(entry)
    return index


def _value(entry: dict[str, Any]) -> bytes | Place:
    if "inline_value" in entry:
        return entry["inline_value"]
    return _place(entry["indirect_value"])


def _place(location: str) -> Place:
    _, base, name, start, size = location.split(":")
    return Place(unquote(base) + unquote(name), int(start), int(size))
