"""Limits on what a reader of files of unknown origin may use: bytes, entries and depth."""

import json
import os
import stat
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from megajax.config.errors import UserError

VARIABLE = "MEGAJAX_READ_LIMITS"
"""Environment variable with a factor of at least 1 for all limits, for files that the user trusts."""


class OverBudget(UserError, ValueError):
    """A file exceeds a limit of its reader.

    Also a ValueError, so readers that report malformed files report it in the same way.
    """


@dataclass(frozen=True, slots=True)
class Limits:
    """What one reader may use for one file; None: not limited."""

    bytes: int | None = None
    """Size of the file, or of what is built from it."""
    entries: int | None = None
    """Values, members of an archive, instructions of a program."""
    depth: int | None = None
    """Containers inside of each other."""


SETTINGS = Limits(bytes=2**23, entries=100_000, depth=100)
"""Of a file of settings: YAML, config.json. A few lines of YAML with nested aliases can expand to billions of values.
"""
DOCUMENT = Limits(bytes=2**30)
"""Of a JSON file that grows with a model or a vocabulary. JSON has no aliases: memory is proportional to its size."""

type Json = bool | int | float | str | list[Json] | dict[str, Json] | None
"""A value of a JSON document."""


def inner_values(tree: object) -> Collection[Any] | None:
    """The values in a container, with keys that are containers; None for another value."""
    if isinstance(tree, Mapping):
        return [*(key for key in tree if isinstance(key, tuple)), *tree.values()]
    return tree if isinstance(tree, list | tuple | set) else None


class Budget:
    """What is left for reading one file. Each method raises OverBudget beyond a limit.

    Args:
        where: the file, for messages.
        inner: the values in a value, for `demand_tree`; None: it is not a container.
    """

    def __init__(
        self, where: str | Path, limits: Limits, *, inner: Callable[[Any], Collection[Any] | None] = inner_values
    ):
        self.where, self._inner, factor = where, inner, _factor()
        self._bytes, self._entries, self._depth = (
            None if limit is None else limit * factor for limit in (limits.bytes, limits.entries, limits.depth)
        )
        self._used_bytes = self._used_entries = 0

    def spend(self, entries: int = 0, *, bytes: int = 0) -> None:
        """Counts entries and bytes."""
        self._used_entries += entries
        self._used_bytes += bytes
        if self._entries is not None and self._used_entries > self._entries:
            self._refuse(self._used_entries, self._entries, "entries")
        if self._bytes is not None and self._used_bytes > self._bytes:
            self._refuse(self._used_bytes, self._bytes, "bytes")

    def demand_tree(self, tree: object) -> None:
        """Counts the values of nested containers, each as often as it is reached.

        The time is that of the distinct values: a list that holds another twice, and so on, has 2**n values but n
        lists.
        """
        self.spend(self._values(tree, {}, 1))

    def _values(self, tree: object, counts: dict[int, int], depth: int) -> int:
        """counts: values of the containers so far, by id; 0 while they are counted."""
        if (items := self._inner(tree)) is None:
            return 1
        if (count := counts.get(id(tree))) is not None:
            if not count:
                raise OverBudget(f"{self.where}: refused: a {type(tree).__name__} contains itself")
            return count
        if self._depth is not None and depth > self._depth:
            self._refuse(depth, self._depth, "levels")
        counts[id(tree)] = 0
        total = 1 + sum([self._values(item, counts, depth + 1) for item in items])
        counts[id(tree)] = total
        return total

    def _refuse(self, count: int, limit: int, unit: str) -> None:
        raise OverBudget(
            f"{self.where}: refused: {count:,} {unit}, at most {limit:,} are read. If you trust the file, set "
            f"{VARIABLE}=10 in the environment, which multiplies the limits of all readers by 10."
        )


def _factor() -> int:
    text = os.environ.get(VARIABLE, "1")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:10]) <= 10**6):
        raise UserError(f"{VARIABLE}={text}: expected a whole number from 1 to 1000000")
    return int(text)


def read_file(path: Path | str, limits: Limits = SETTINGS, *, pipes: bool = False) -> bytes:
    """The bytes of a regular file. Raises OSError, and OverBudget for a larger file, a pipe or a device.

    pipes: read those too, for a file that the user names on the command line, as in `tool <(command)`.
    """
    # Opening a pipe would wait for its writer.
    with open(os.open(path, os.O_RDONLY | (0 if pipes else os.O_NONBLOCK)), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            if not pipes:
                raise OverBudget(f"{path}: refused: not a regular file")
            return read_stream(file, path, limits)
        Budget(path, limits).spend(bytes=status.st_size)
        return file.read(status.st_size)


def read_stream(stream: BufferedIOBase, where: Path | str, limits: Limits) -> bytes:
    """All bytes of a stream of unknown length, such as an unpacked file. Raises OverBudget."""
    budget, pieces = Budget(where, limits), list[bytes]()
    while piece := stream.read(2**20):
        budget.spend(bytes=len(piece))
        pieces.append(piece)
    return b"".join(pieces)


def read_json(path: Path | str, limits: Limits = SETTINGS, *, unique: bool = True) -> Any:
    """The content of a JSON file. Raises OSError, ValueError, and OverBudget, which is a ValueError.

    unique: whether a repeated name is an error; otherwise its last value counts, as in other programs.
    """
    return parse_json(read_file(path, limits), unique=unique)


def settings_of(path: Path) -> dict[str, Any]:
    """The object of a JSON file of optional settings; {} for a file that is missing, or has none that can be read."""
    try:
        return settings_in(read_file(path, SETTINGS))
    except (OSError, ValueError):
        return {}


def settings_in(content: bytes) -> dict[str, Any]:
    """The object of a JSON file's content; {} without one. Raises ValueError for no JSON."""
    settings = parse_json(content, unique=False)
    return settings if isinstance(settings, dict) else {}


def demanded_settings(path: Path, folder: str) -> dict[str, Any]:
    """The object of the JSON file that makes its folder one of this kind. Raises UserError without one."""
    try:
        settings = read_json(path, unique=False)
    except OSError as error:
        raise UserError(f"{path.parent} is not {folder}: {path.name} can't be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path} is not a JSON file ({error})") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path} is a {type(settings).__name__}, not a mapping of settings")
    return settings


def without_mark(data: bytes, where: Path | str) -> bytes:
    """The first bytes of a text file, without the byte order mark of UTF-8. Raises UserError for UTF-16 and UTF-32."""
    zeros = "".join("a0"[not byte] for byte in data[:4])  # of ASCII in the wide encodings, with or without a mark
    if zeros in ("a0a0", "0a0a", "a000", "000a") or data.startswith((BOM_UTF16_LE, BOM_UTF16_BE, BOM_UTF32_BE)):
        raise UserError(f"{where}: is not UTF-8 text but UTF-16 or UTF-32: convert it (iconv -f UTF-16 -t UTF-8).")
    return data.removeprefix(BOM_UTF8)


def utf8_text(data: bytes, where: Path | str) -> str:
    """The text of a UTF-8 file without byte order mark, with its newlines. Raises UserError for another encoding."""
    try:
        return without_mark(data, where).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: byte {error.start} is not UTF-8 text: {error.reason}. Convert the file.") from error


def parse_json(text: str | bytes, *, unique: bool = True) -> Any:
    """The value of JSON; see `read_json`. Raises ValueError, also for thousands of digits or levels."""
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError("lists and mappings are nested too deeply") from None


VALUES = 2**21
"""Values of a line of JSON, beside a comma for each 16 bytes, as texts have."""


def too_many_values(line: bytes) -> str:
    """The problem with a line of JSON whose values take far more memory than its bytes; "" if there is none."""
    count = sum(map(line.count, (b",", b"[", b"{"))) if len(line) > VALUES else 0
    return f"holds more than {VALUES:,} values" if count > VALUES + len(line) // 16 else ""


def json_fault(error: Exception) -> str:
    """What is wrong with a line of JSON, without the line number 1 that the parser gives it."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
    return str(error)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = set[str]()
        for name, _ in pairs:
            if name in names:
                raise ValueError(f"{name} is given twice")
            names.add(name)
    return mapping
