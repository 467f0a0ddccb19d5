"""Finding, verifying and restoring checkpoints: read-only operations."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megajax.checkpoint import arrays, integrity, step_folders
from megajax.checkpoint.integrity import Damaged
from megajax.checkpoint.zarr_reader import StoredArrays
from megajax.config.errors import UserError
from megajax.mesh.processes.peers import Peers

type Tree = Any
type Meta = dict[str, Any]
type Event = Callable[..., None]
"""Called with the name of an event and its fields, for events.jsonl."""


def say(line: str) -> None:
    """Prints a line for the user, on stderr."""
    print(f"megajax: {line}", file=sys.stderr, flush=True)


def no_event(name: str, /, **fields: Any) -> None:
    """Ignores an event."""


class DamagedStep(UserError):
    """A step that `newest_intact` chose is damaged, as its restore found. It is refused: choose and restore again."""


class CheckpointReader:
    """Finds, verifies and restores the steps of a checkpoints folder without changing anything in it.

    With several processes, each creates a reader, and all call the same methods in the same order.
    """

    def __init__(self, path: Path | str, *, peers: Peers | None = None, event: Event = no_event):
        self.folder = Path(path).absolute()
        self._peers = peers or Peers()
        self._event = event
        self._verified: set[int] = set()
        self._refused: set[int] = set()
        self._chosen: int | None = None
        """The step that `newest_intact` returned."""
        self._opened: tuple[int, StoredArrays] | None = None

    def steps(self) -> list[int]:
        """Numbers of the committed steps, ascending, without those that failed verification."""
        return [step for step in step_folders.steps_in(self.folder) if step not in self._refused]

    def newest(self) -> int | None:
        """The committed step with the highest number, unverified; see `newest_intact`."""
        return max(self.steps(), default=None)

    def newest_intact(self, *, blocks: bool = False) -> int | None:
        """The newest step that passes verification; newer ones are reported on stderr with their faults.

        Large files are verified when they are read: if `restore` of the step raises DamagedStep, call this again.
        blocks: verify them now.
        None if there never was a checkpoint here. Raises UserError if there were some and all are damaged.
        """
        steps, damaged = self._peers.broadcast((self.steps(), step_folders.damaged_in(self.folder)))
        refused = [step_folders.step_name(step) for step in sorted(self._refused)]
        newest = max([*steps, *self._refused], default=None)
        for step in reversed(steps):
            reason = self._fault(step, blocks=blocks)
            if reason is None:
                if step != newest and self._peers.first:
                    self._event("checkpoint_fallback", from_step=newest, to_step=step)
                self._chosen = step
                return step
            self._refuse(step, reason)
        if steps or damaged or refused:
            names = sorted({*map(step_folders.step_name, steps), *(damaged or refused)})
            raise UserError(
                f"none of the checkpoints in {self.folder} is intact ({', '.join(names)}).\n"
                "Restore one from a copy, start from another run's checkpoint with checkpoint.load, "
                "or move the folder away to start from scratch."
            )
        return None

    def meta(self, step: int) -> Meta:
        """The metadata given to `save`; verified, without reading arrays.

        Raises UserError if the step does not exist or its meta.json is damaged.
        """
        path = self._existing(step)
        try:
            return integrity.read_meta(path)
        except Damaged as error:
            raise UserError(f"checkpoint step {step} in {self.folder} is damaged: {error}") from error

    def restore(self, step: int, like: Tree, *, partial: bool = False) -> tuple[Tree, Meta]:
        """The arrays of a step with the layout of `like`, and its metadata.

        like: tree of jax.ShapeDtypeStruct with shardings, on any mesh and any number of processes.
        partial: see `arrays.read`.
        Raises UserError if the step is missing or damaged, or if names, shapes or dtypes differ; DamagedStep if
        `newest_intact` chose the step. All that is returned was compared with the manifest as it was read; a whole
        restore compares all files.
        """
        self.demand(step)

        def read(stored: StoredArrays) -> Tree:
            tree = arrays.read(stored, like, partial=partial)
            if not partial:
                stored.verify_rest(slice(self._peers.index, None, self._peers.count))
            return tree

        return self._from_arrays(step, read), self.meta(step)

    def shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """Dotted name -> shape of the arrays of a step. Raises UserError if it is missing or damaged."""
        self.demand(step)
        stored = self._from_arrays(step, arrays.stored_shapes)
        return {name: shape for name, (shape, _) in stored.items()}

    def _from_arrays[T](self, step: int, work: Callable[[StoredArrays], T]) -> T:
        """The result of `work`, if no process finds the step damaged."""
        result, reason = list[T](), None
        try:
            opened = self._opened
            if opened is None or opened[0] != step:
                opened = self._opened = step, StoredArrays(self.folder / step_folders.step_name(step))
            result.append(work(opened[1]))
        except Damaged as error:
            reason = str(error)
        if (reason := self._peers.agree(reason)) is None:
            return result[0]
        self._verified.discard(step)
        self._opened = None
        if step != self._chosen:
            raise self._damaged(step, reason)
        self._refuse(step, reason)
        raise DamagedStep(f"checkpoint step {step} in {self.folder} is damaged: {reason}")

    def _damaged(self, step: int, reason: str) -> UserError:
        return UserError(
            f"checkpoint step {step} in {self.folder} is damaged: {reason}\n"
            "Choose another step, or set checkpoint.step to none for the newest intact one."
        )

    def demand(self, step: int) -> Path:
        """Path of a step. Raises UserError if it is missing or damaged, even if there are other steps.

        A step that some process does not see is missing for all of them.
        """
        self._peers.check(lambda: self._existing(step))
        path, reason = self.folder / step_folders.step_name(step), self._fault(step)
        if reason is not None:
            raise self._damaged(step, reason)
        return path

    def _existing(self, step: int) -> Path:
        """Path of a step that this process sees. Raises UserError."""
        path = self.folder / step_folders.step_name(step)
        if not path.is_dir():
            committed = ", ".join(map(str, self.steps())) or "none"
            raise UserError(f"there is no checkpoint of step {step} in {self.folder}.\nCommitted steps: {committed}.")
        return path

    def _fault(self, step: int, *, blocks: bool = False) -> str | None:
        """Why a step is damaged, or None. The processes divide the hashing, and all return the same result.

        blocks: whether to read files of several blocks.
        """
        if step in self._verified:
            return None
        path, reason = self.folder / step_folders.step_name(step), None
        try:
            integrity.read_meta(path)
            entries = integrity.read_manifest(path)
            integrity.verify(path, entries, sorted(entries)[self._peers.index :: self._peers.count], blocks=blocks)
        except Damaged as error:
            reason = str(error)
        reason = self._peers.agree(reason)
        if reason is None:
            self._verified.add(step)
        return reason

    def _refuse(self, step: int, reason: str) -> None:
        self._refused.add(step)
        if self._peers.first:
            say(f"checkpoint step {step} in {self.folder} is damaged and was skipped: {reason}")
        target = self._set_aside(step)
        if self._peers.first:
            self._event("checkpoint_damaged", step=step, why=reason, kept_as=None if target is None else str(target))

    def _set_aside(self, step: int) -> Path | None:
        """Sets a damaged step aside for inspection -> its new path. A reader leaves the folder unchanged."""


def open_checkpoints(path: Path | str, *, peers: Peers | None = None) -> tuple[CheckpointReader, int | None]:
    """A reader for a run folder, a checkpoints folder or one step in it; and the step, if the path names one.

    Raises UserError if the path does not exist.
    """
    checkpoints, step = step_folders.locate(path)
    return CheckpointReader(checkpoints, peers=peers), step
