"""The folder of a run's local checkpoints on one machine.

FOLDER/RUN/                 checkpoint.local.folder, and the name in the run's local.json
  run.json                  the shared checkpoints folder that it belongs to
  machine                   a random name written by the first process; processes that read the same name share a folder
  process_K/STEP/           a set of process K; see shard_set.py
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megajax.checkpoint.local.shard_set import LocalSet
from megajax.checkpoint.manifest import Damaged
from megajax.checkpoint.step_folders import STEP
from megajax.config.errors import UserError
from megajax.config.read_limits import read_json
from megajax.display.text import byte_size, say
from megajax.storage import disk
from megajax.storage.disk import write_durably
from megajax.storage.write_errors import write_fault

FILE = "local.json"
NAME = re.compile(r"[0-9a-f]{16}")
"""The name of a run's local folders. The file may come from elsewhere: a name must not lead out of a folder."""
MAX_ATTEMPTS = 1000
"""Attempts in the file: far more than the ones that still have local checkpoints."""


class RunHistory(NamedTuple):
    """The name of a run's local folders, and its attempts with the steps they began from."""

    run: str
    attempts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def read(cls, shared: Path) -> "RunHistory":
        """The history in a checkpoints folder; a new one if there is none.

        Raises UserError if it can't be read or is not valid. A new one in its place would hide the newest checkpoints
        of the run and delete them.
        """
        try:
            document = read_json(shared / FILE)
            run, attempts = document["run"], tuple((str(name), int(first)) for name, first in document["attempts"])
            if not isinstance(run, str) or not NAME.fullmatch(run):
                raise ValueError(f"run is {run!r:.80}, not 16 hexadecimal digits")
        except FileNotFoundError:
            return cls(secrets.token_hex(8))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise UserError(
                f"{shared / FILE} can't be used ({reason}). It names the local checkpoints of this run, and none was "
                "touched.\nPut the file right; or move it away, and the run starts from its shared checkpoints and "
                "deletes the local ones."
            ) from error
        return cls(run, attempts)

    def write(self, shared: Path) -> None:
        """Replaces the file."""
        write_durably(shared / FILE, json.dumps({"run": self.run, "attempts": self.attempts[-MAX_ATTEMPTS:]}))

    def begin(self, attempt: str, first: int) -> "RunHistory":
        """Returns the history with another attempt, which begins from step `first`."""
        return self._replace(attempts=(*self.attempts, (attempt, first)))

    @classmethod
    def note_without_local(cls, shared: Path, first: int) -> None:
        """Records an attempt without local checkpoints that begins from step `first`.

        Later local checkpoints of earlier attempts are no longer part of the run.
        """
        if not (shared / FILE).exists():
            return
        try:
            cls.read(shared).begin(secrets.token_hex(8), first).write(shared)
        except UserError as error:  # no start with local checkpoints uses the file before it is put right
            say(f"warning: {error}")

    def includes(self, attempt: str, step: int) -> bool:
        """Whether the step that an attempt saved is part of the run: no later attempt began before that step."""
        names = [name for name, _ in self.attempts]
        if attempt not in names:
            return False
        return all(first >= step for _, first in self.attempts[names.index(attempt) + 1 :])


OWNER = "run.json"
"""Name of the file with the checkpoints folder that the local folder of a run belongs to."""


class LocalFolder:
    """Finds, names and deletes sets. `prepare` creates the folders."""

    def __init__(self, path: Path, history: RunHistory, shared: Path, process: int):
        self.base = path.expanduser().absolute()
        self.path, self.process_folder = self.base / history.run, self.base / history.run / f"process_{process}"
        self._history, self._shared = history, shared
        self.machine = ""

    def prepare(self) -> None:
        """Creates the folders. Raises UserError if they can't be written, or if others could change them."""
        try:
            self.base.mkdir(mode=0o755, parents=True, exist_ok=True)
            # Other users must not read the weights: the folder may be in /tmp or /dev/shm.
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            if fault := base_fault(self.base.stat(), os.geteuid()) or folder_fault(self.path.lstat(), os.geteuid()):
                raise UserError(
                    f"checkpoint.local.folder {self.base} can't hold this run's folder {self.path.name}: {fault}.\n"
                    "Other users could exchange or read checkpoints there: name a folder of your own."
                )
            with contextlib.suppress(FileExistsError):
                self.process_folder.mkdir()
            if self.process_folder.is_symlink():
                raise UserError(f"{self.process_folder} is a link: remove it. Local checkpoints need a folder there.")
            disk.probe(self.process_folder / "probe")
            self._claim()
            self.machine = _machine_name(self.path / "machine")
            self._remove_stale_runs()
        except OSError as error:
            raise UserError(
                f"checkpoint.local.folder {self.base} can't be written: {write_fault(error)}.\n"
                "Name a folder on a disk of this machine, or below /dev/shm."
            ) from error

    def _claim(self) -> None:
        """Writes run.json. Raises UserError if the folder belongs to another run that still exists."""
        owner = _owner(self.path)
        if owner == str(self._shared):
            return
        if owner is not None and _same_history(Path(owner), self._shared, self.path.name):
            raise UserError(
                f"{self.path} has local checkpoints of the run in {Path(owner).parent}, which {self._shared / FILE} "
                f"names too, as in a copy of that run.\nDelete {self._shared / FILE} to give this run local "
                "checkpoints of its own."
            )
        temporary = self.path / f"run.{secrets.token_hex(4)}"
        temporary.write_text(json.dumps({"checkpoints": str(self._shared)}), encoding="utf-8")
        temporary.rename(self.path / OWNER)

    def _remove_stale_runs(self) -> None:
        """Removes local checkpoints of former runs in the same run folder, whose local.json names another run now."""
        for folder in self.base.iterdir():
            with contextlib.suppress(OSError):
                if folder == self.path or not NAME.fullmatch(folder.name) or folder_fault(folder.lstat(), os.geteuid()):
                    continue
                if _owner(folder) == str(self._shared):
                    shutil.rmtree(folder)
                    say(f"removed {folder}: local checkpoints of a former run in {self._shared.parent}")

    def adopt(self, has_other_owner: Callable[[int], bool]) -> list[LocalSet]:
        """The sets that this process owns; removes unfinished and unreadable ones.

        has_other_owner: process number in a folder's name -> whether another process owns the sets in it.
        """
        sets = []
        for folder in sorted(self.path.glob("process_*")):
            number = folder.name.removeprefix("process_")
            if folder.is_symlink() or not number.isdigit() or has_other_owner(int(number)):
                continue
            for path in sorted(folder.iterdir()):
                if not STEP.fullmatch(path.name):
                    self.delete(path)
                    continue
                try:
                    local_set = LocalSet.open(path)
                except Damaged as error:
                    say(f"removed the local checkpoint {path}: {error}")
                    self.delete(path)
                    continue
                if self._history.includes(local_set.info.attempt, local_set.info.step):
                    sets.append(local_set)
                else:
                    self.delete(path)
        return sets

    def delete(self, path: Path) -> None:
        """Renames a set, then deletes it. If that fails, the next start deletes it."""
        with contextlib.suppress(OSError):
            aside = path.with_name(f"{path.name}.deleting")
            path.rename(aside)
            disk.remove(aside)

    def remove(self) -> None:
        """Deletes the sets of this process, and the folder of the run if no other process has sets in it."""
        shutil.rmtree(self.process_folder, ignore_errors=True)
        for adopted in self.path.glob("process_*"):
            with contextlib.suppress(OSError):  # not empty: owned by another process
                adopted.rmdir()
        if not list(self.path.glob("process_*")):
            shutil.rmtree(self.path, ignore_errors=True)

    def demand_space(self, need: int, sets: int) -> None:
        """Raises UserError unless `need` bytes are free, counting those of existing sets.

        sets: number of sets of each process of this machine, for the message.
        """
        free = disk.free_bytes(self.path)
        available = None if free is None else free + sum(file.stat().st_size for file in self.path.rglob("*.bin"))
        if available is not None and available < need:
            raise UserError(
                f"checkpoint.local.folder {self.base}: {sets} local checkpoints of the processes of this machine need "
                f"{byte_size(need)}, but {byte_size(available)} are free.\n"
                "Free space, name a folder on a larger disk, or keep fewer with checkpoint.local.keep."
            )


def base_fault(status: os.stat_result, user: int) -> str:
    """Why others could exchange a folder in a folder with this status; "" if they can't.

    /tmp and mount points of scratch disks are open to all, but of root, and sticky: entries are their owners' alone.
    """
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return "anyone may rename its entries (its mode has no sticky bit)"
    # In a container, root is often given a folder of a user of the machine.
    if user != 0 and status.st_uid not in (0, user):
        return f"it belongs to user {status.st_uid}, and this process to user {user}"
    return ""


def folder_fault(status: os.stat_result, user: int) -> str:
    """Why a folder, by its own status, is not one that this user alone can write; "" if it is."""
    if not stat.S_ISDIR(status.st_mode):
        return "something of this name exists, a link or a file"
    if status.st_uid != user:
        return f"it exists and belongs to user {status.st_uid}, and this process to user {user}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"it exists and others may write to it (mode {status.st_mode & 0o777:o})"
    return ""


def _owner(folder: Path) -> str | None:
    """The checkpoints folder that the local folder of a run belongs to; None if run.json is missing or damaged."""
    try:
        return str(read_json(folder / OWNER)["checkpoints"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _same_history(other: Path, shared: Path, run: str) -> bool:
    """Whether another checkpoints folder has a local.json too that names this run."""
    try:
        return not other.samefile(shared) and RunHistory.read(other).run == run
    except (OSError, UserError):
        return False  # it was moved or deleted, or is this one by another path


def _machine_name(path: Path) -> str:
    """The name in the file. The first process that calls this writes a random one."""
    temporary = path.with_name(f"machine.{secrets.token_hex(4)}")
    temporary.write_text(secrets.token_hex(8), encoding="utf-8")
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()
    return path.read_text(encoding="utf-8")
