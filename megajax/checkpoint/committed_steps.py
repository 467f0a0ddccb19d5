"""Where the steps of a run are: in a folder that all machines share, or in an object store.

`open_place` builds the one that a checkpoints folder says. A reader needs no more than a `Place`.
"""

import contextlib
import re
from pathlib import Path
from typing import Protocol

from megajax.checkpoint import step_folders
from megajax.checkpoint.manifest import Damaged, read_meta
from megajax.checkpoint.object_store_steps import CHECKPOINTS, StoredSteps
from megajax.checkpoint.step_folders import STEP, StoreRecord
from megajax.config.errors import UserError
from megajax.config.hints import download_hint
from megajax.config.paths_and_store_urls import store_url
from megajax.storage import disk
from megajax.storage.folders import Folder
from megajax.storage.stores import fetched, open_store

STORED_STEP = re.compile(rf"(?P<run>.*?)/{CHECKPOINTS}(?:/(?P<step>\d+))?")
"""URL of the checkpoints of a run in a store, or of one step."""
NEEDED = ("config.yaml", "tokenizer/")
"""Files of a run folder that its readers need, beside its steps."""


class Place(Protocol):
    """The committed steps of a run."""

    def steps(self) -> list[int]:
        """Numbers of the committed steps, ascending. Raises StoreError."""
        ...

    def damaged(self) -> list[str]:
        """Names of the steps set aside as damaged."""
        ...

    def files(self, step: int) -> Folder:
        """The files of a committed step. Raises FileNotFoundError if there is no such step."""
        ...

    def set_aside(self, step: int, suffix: str) -> str:
        """Sets a committed step aside as STEP.suffix, so that it no longer counts -> its new name, for messages."""
        ...

    def delete(self, step: int) -> None:
        """Deletes a step. A half-deleted step never looks committed. Raises OSError."""
        ...


class FolderSteps:
    """Steps in a folder of a file system."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    def steps(self) -> list[int]:
        return step_folders.steps_in(self.folder)

    def damaged(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.damaged*")) if self.folder.is_dir() else []

    def files(self, step: int) -> Path:
        path = self.folder / step_folders.step_name(step)
        if not path.is_dir():
            raise FileNotFoundError(str(path))
        return path

    def set_aside(self, step: int, suffix: str) -> str:
        target = self.folder / step_folders.name_aside(step, suffix, {path.name for path in self.folder.iterdir()})
        (self.folder / step_folders.step_name(step)).rename(target)
        disk.flush_to_disk(self.folder)
        return str(target)

    def delete(self, step: int) -> None:
        """Renames the step first, so that a half-deleted one never looks committed."""
        disk.remove(Path(self.set_aside(step, "deleting")))


def open_place(folder: Path) -> Place:
    """The steps of a checkpoints folder. Raises UserError for a damaged store.json, StoreError."""
    record = step_folders.recorded_store(folder)
    return FolderSteps(folder) if record is None else StoredSteps(open_store(record.url))


def locate(path: Path | str) -> tuple[Path, int | None]:
    """The checkpoints folder and the step that a path refers to: a run folder, a checkpoints folder or one step in it.

    Of a run in an object store, a local folder that says where the steps are. Raises UserError if the path does not
    exist, StoreError.
    """
    if (url := store_url(path)) is not None:
        return _located(url)
    hint, path = download_hint(str(path), "give hf:{} instead"), Path(path).absolute()
    if STEP.fullmatch(path.name) and (path.is_dir() or path.parent.is_dir()):
        return path.parent, int(path.name)
    if not path.is_dir():
        why = "it is a file, not a folder" if path.exists() else "it does not exist"
        raise UserError(f"there are no checkpoints in {path}: {why}." + f"\n    {hint}" * bool(hint))
    inner = path / CHECKPOINTS
    return inner if inner.is_dir() else path, None


def recorded_config(path: Path | str) -> tuple[str, str] | None:
    """(name, config.yaml at the time of the save) of a step, or of the newest one with intact metadata; None without.

    path: as in `locate`.
    """
    folder, step = locate(path)
    place = open_place(folder)
    for number in reversed(place.steps()) if step is None else [step]:
        with contextlib.suppress(Damaged, OSError):
            text = read_meta(place.files(number)).get("config")
            return (f"step {number} in {place}", text) if text else None
    return None


def _located(url: str) -> tuple[Path, int | None]:
    match = STORED_STEP.fullmatch(url)
    run, step = (url, None) if match is None else (match["run"], match["step"])
    store = open_store(run)
    steps = StoredSteps(store.below(CHECKPOINTS))
    record = StoreRecord(steps.store.url, tuple(steps.steps()))
    if not record.steps and not steps.damaged():
        raise UserError(f"there are no checkpoints in {run}: no object's name begins with {CHECKPOINTS}/committed/.")
    folder = fetched(store, NEEDED) / CHECKPOINTS
    record.write(folder)
    return folder, None if step is None else int(step)
