"""The folder of a run's local checkpoints on one machine.

FOLDER/RUN/                 checkpoint.local.folder, and the name in the run's local.json
  run.json                  the shared checkpoints folder that it belongs to
  machine                   a random name written by the first process; processes that read the same name share a folder
  process_K/STEP/           a set of process K; see sets.py
"""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from megajax.checkpoint import disk
from megajax.checkpoint.folder import STEP
from megajax.checkpoint.integrity import Damaged
from megajax.checkpoint.local.history import RunHistory
from megajax.checkpoint.local.sets import LocalSet
from megajax.checkpoint.reader import say
from megajax.config.errors import UserError
from megajax.text import byte_size


class LocalFolder:
    """Finds, names and deletes sets. `prepare` creates the folders."""

    def __init__(self, path: Path, history: RunHistory, shared: Path, process: int):
        self.base = path.expanduser().absolute()
        self.path, self.process_folder = self.base / history.run, self.base / history.run / f"process_{process}"
        self._history, self._shared = history, shared
        self.machine = ""

    def prepare(self) -> None:
        """Creates the folders. Raises UserError if they can't be written."""
        try:
            self.base.mkdir(parents=True, exist_ok=True)
            # Other users must not read the weights: the folder may be in /tmp or /dev/shm.
            self.path.mkdir(mode=0o700, exist_ok=True)
            self.process_folder.mkdir(exist_ok=True)
            disk.probe(self.process_folder / "probe")
            with contextlib.suppress(FileExistsError), open(self.path / "run.json", "x", encoding="utf-8") as file:
                json.dump({"checkpoints": str(self._shared)}, file)
            self.machine = _machine_name(self.path / "machine")
            self._remove_stale_runs()
        except OSError as error:
            raise UserError(
                f"checkpoint.local.folder {self.base} can't be written: {error.strerror}.\n"
                "Name a writable folder with free space on a disk of this machine, or below /dev/shm."
            ) from error

    def _remove_stale_runs(self) -> None:
        """Removes local checkpoints of former runs in the same run folder, whose local.json names another run now."""
        for path in self.base.glob("*/run.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                same_run = json.loads(path.read_text(encoding="utf-8"))["checkpoints"] == str(self._shared)
                if same_run and path.parent != self.path:
                    shutil.rmtree(path.parent)
                    say(f"removed {path.parent}: local checkpoints of a former run in {self._shared.parent}")

    def adopt(self, has_other_owner: Callable[[int], bool]) -> list[LocalSet]:
        """The sets that this process owns; removes unfinished and unreadable ones.

        has_other_owner: process number in a folder's name -> whether another process owns the sets in it.
        """
        sets = []
        for folder in sorted(self.path.glob("process_*")):
            number = folder.name.removeprefix("process_")
            if not number.isdigit() or has_other_owner(int(number)):
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
                if self._history.includes(local_set.index.info.attempt, local_set.index.info.step):
                    sets.append(local_set)
                else:
                    self.delete(path)
        return sets

    def delete(self, path: Path) -> None:
        """Renames a set, then deletes it. If that fails, the next start deletes it."""
        with contextlib.suppress(OSError):
            aside = path.with_name(f"{path.name}.deleting")
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)

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


def _machine_name(path: Path) -> str:
    """The name in the file. The first process that calls this writes a random one."""
    temporary = path.with_name(f"machine.{secrets.token_hex(4)}")
    temporary.write_text(secrets.token_hex(8), encoding="utf-8")
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()
    return path.read_text(encoding="utf-8")
