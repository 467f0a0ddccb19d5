"""What a search has found so far, in a file, so that one that was stopped goes on: a line of JSON for each group."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from megajax.config.dump import plain
from megajax.config.errors import UserError
from megajax.planning.search.candidates import Choice
from megajax.planning.search.search import HEADROOM, Entry, Group, Tally, Task
from megajax.planning.search.verified import Compiled

FORMAT = 1
"""Counts up when formulas or the way of searching change so that what was found before is no longer true."""


def fingerprint(task: Task) -> str:
    """Of all that a search depends on: the config, what is fixed, the devices and their constants."""
    space = task.space
    what = {
        "format": FORMAT,
        "headroom": HEADROOM,
        "config": plain(space.cfg),
        "fixed": {name: space.fixed[name] for name in sorted(space.fixed)},
        "devices": space.devices,
        "per_node": space.per_node,
        "device": asdict(task.device),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


class Remembered:
    """A search's file; without a path nothing is read or written."""

    def __init__(self, path: Path | None, task: Task, *, insist: bool = False):
        """insist: a file of another search is an error; otherwise it is begun anew. Raises UserError."""
        self.path = path
        self.groups: dict[tuple[int, int, int], Group] = {}
        self.compiled: dict[Choice, Compiled] = {}
        self._file: TextIO | None = None
        if path is None:
            return
        key = fingerprint(task)
        lines = _lines(path)
        known = bool(lines) and lines[0].get("search") == key
        if lines and not known and insist:
            raise UserError(
                f"{path} is not of this search: config, overrides, devices or their constants are others.\n"
                "Give another file to --resume, or delete this one."
            )
        for line in lines[1:] if known else ():
            self._take(line)
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path} can't be written: {error.strerror}") from error
        # Written anew: the last line may be half of one.
        for line in lines if known else [{"search": key}]:
            self._write(line)

    def add_group(self, group: Group) -> None:
        """Remember a group that is done."""
        self.groups[group.place] = group
        self._write({"group": asdict(group)})

    def add_compiled(self, choice: Choice, found: Compiled) -> None:
        """Remember what the compiler said."""
        self.compiled[choice] = found
        self._write({"compiled": choice.plain(), "found": asdict(found)})

    def close(self) -> None:
        """Nothing more is added."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def _take(self, line: dict[str, Any]) -> None:
        if "group" in line:
            written = line["group"]
            group = Group(
                place=tuple(written["place"]),
                best=[_entry(one) for one in written["best"]],
                fastest={name: _entry(one) for name, one in written["fastest"].items()},
                smallest={name: _entry(one) for name, one in written["smallest"].items()},
                refusals=written["refusals"],
                tally=Tally(**written["tally"]),
            )
            self.groups[group.place] = group
        elif "compiled" in line:
            self.compiled[Choice.read(line["compiled"])] = Compiled(**line["found"])


def _entry(written: dict[str, Any]) -> Entry:
    return Entry(Choice.read(written["choice"]), written["step_seconds"], written["peak"])


def _lines(path: Path) -> list[dict[str, Any]]:
    """Of a file that may not be there, or whose last line was being written when the search stopped."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read: {error}") from error
    found = []
    for line in text.splitlines():
        try:
            read = json.loads(line)
        except json.JSONDecodeError:
            break
        found.append(read if isinstance(read, dict) else {})
    return found or [{}] * bool(text.strip())
