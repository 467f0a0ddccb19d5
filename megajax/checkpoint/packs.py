"""Arrays in an object store: packs of the chunks of one process, and an index that says where each chunk is.

arrays/process_3/00000.bin   chunks, one after another: a request for each 128 MiB, not for each chunk
arrays/process_3/index.json  [[key, value]]: NAME/zarr.json -> an array's description; NAME/c/0/1 -> its place

Keys and descriptions are those of Zarr 3, as in a folder, where Orbax writes them into a database. Orbax has no s3://,
and merges what the processes wrote, which would be written, read and written again.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple, Self

from megajax.checkpoint.step_folders import ARRAYS
from megajax.config.read_limits import parse_json

INDEX = re.compile(rf"{ARRAYS}/process_(\d+)/index\.json")


class ValueLocation(NamedTuple):
    """A value in a file of a step."""

    name: str
    """Path in the folder of the step."""
    start: int
    bytes: int

    def below(self, folder: str) -> Self:
        """The place, if its name is relative to a folder, which ends with "/"."""
        return self._replace(name=folder + self.name)


type Index = dict[str, bytes | ValueLocation]
"""Key -> value, or its place."""


def index_names(names: Iterable[str]) -> list[str]:
    """The files of a step that are indices of packs; none if Orbax wrote it."""
    return sorted(filter(INDEX.fullmatch, names))


def read_index(texts: Iterable[bytes]) -> Index:
    """The index of a step from those of its processes. Raises ValueError or TypeError for another content."""
    index: Index = {}
    for text in texts:
        for key, value in parse_json(text):
            index[key] = value.encode() if isinstance(value, str) else ValueLocation(*value)
    return index
