"""Finding, verifying and restoring checkpoints: read-only operations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megajax.checkpoint import array_serialization, manifest, step_folders
from megajax.checkpoint.committed_steps import Place, locate, open_place
from megajax.checkpoint.manifest import Damaged
from megajax.checkpoint.zarr_reader import StoredArrays
from megajax.config.errors import UserError
from megajax.display.text import say
from megajax.processes.peers import Peers
from megajax.storage.folders import Folder
from megajax.storage.stores import StoreError

type Tree = Any
type Meta = dict[str, Any]
type EventLog = Callable[..., None]
"""Called with the name of an event and its fields, for events.jsonl."""


def no_event(name: str, /, **fields: object) -> None:
    """Ignores an event."""


class DamagedStep(UserError):
    """A step that `newest_intact` chose is damaged, as its restore found. It is refused: choose and restore again."""


class CheckpointReader:
    """Finds, verifies and restores the steps of a checkpoints folder without changing anything in it.

    With several processes, each creates a reader, and all call the same methods in the same order.
    """

    def __init__(
        self, path: Path | str, *, peers: Peers | None = None, event: EventLog = no_event, place: Place | None = None
    ):
        """path: the checkpoints folder. place: of its steps; None: where it says that they are."""
        self.folder = Path(path).absolute()
        self.place = open_place(self.folder) if place is None else place
        self._peers = peers or Peers()
        self._event = event
        self._verified: set[int] = set()
        self._refused: set[int] = set()
        self._chosen: int | None = None
        """The step that `newest_intact` returned."""
        self._opened: tuple[int, StoredArrays] | None = None

    @property
    def run(self) -> str:
        """The run's folder, or URL, for messages."""
        return str(self.place).removesuffix("/checkpoints")

    def steps(self) -> list[int]:
        """Numbers of the committed steps, ascending, without those that failed verification."""
        return [step for step in self.place.steps() if step not in self._refused]

    def newest(self) -> int | None:
        """The committed step with the highest number, unverified; see `newest_intact`."""
        return max(self.steps(), default=None)

    def newest_intact(self, *, blocks: bool = False) -> int | None:
        """The newest step that passes verification; newer ones are reported on stderr with their faults.

        Large files are verified when they are read: if `restore` of the step raises DamagedStep, call this again.
        blocks: verify them now.
        None if there never was a checkpoint here. Raises UserError if there were some and all are damaged.
        """
        steps, damaged = self._peers.of_first(lambda: (self.steps(), self.place.damaged()))
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
                f"none of the checkpoints in {self.place} is intact ({', '.join(names)}).\n"
                "Restore one from a copy, start from another run's checkpoint with checkpoint.load, "
                "or move the folder away to start from scratch."
            )
        return None

    def meta(self, step: int) -> Meta:
        """The metadata given to `save`; verified, without reading arrays.

        Raises UserError if the step does not exist or its meta.json is damaged.
        """
        files = self._existing(step)
        try:
            return manifest.read_meta(files)
        except Damaged as error:
            raise UserError(f"checkpoint step {step} in {self.place} is damaged: {error}") from error

    def restore(self, step: int, like: Tree) -> tuple[Tree, Meta]:
        """The arrays of a step with the layout of `like`, and its metadata.

        like: tree of jax.ShapeDtypeStruct with shardings, on any mesh and any number of processes.
        Raises UserError if the step is missing or damaged, or if names, shapes or dtypes differ; DamagedStep if
        `newest_intact` chose the step. All files are compared with the manifest: those of the arrays as they are read.
        """
        self.demand(step)

        def read(stored: StoredArrays) -> Tree:
            tree = array_serialization.read(stored, like)
            stored.verify_rest(slice(self._peers.index, None, self._peers.count))
            return tree

        return self._from_arrays(step, read), self.meta(step)

    def use_arrays[T](self, step: int, work: Callable[[StoredArrays], T]) -> T:
        """The result of `work`, which may read any boxes of the arrays of a step. Only the bytes that it reads are
        compared with the manifest. Raises UserError and DamagedStep as `restore` does.
        """
        self.demand(step)
        return self._from_arrays(step, work)

    def _from_arrays[T](self, step: int, work: Callable[[StoredArrays], T]) -> T:
        """The result of `work`, if no process finds the step damaged."""
        result = list[T]()

        def read() -> None:
            opened = self._opened
            if opened is None or opened[0] != step:
                opened = self._opened = step, StoredArrays(self.place.files(step))
            result.append(work(opened[1]))

        if (reason := self._damage(read)) is None:
            return result[0]
        self._verified.discard(step)
        self._opened = None
        if step != self._chosen:
            raise self._damaged(step, reason)
        self._refuse(step, reason)
        raise DamagedStep(f"checkpoint step {step} in {self.place} is damaged: {reason}")

    def _damaged(self, step: int, reason: str) -> UserError:
        return UserError(
            f"checkpoint step {step} in {self.place} is damaged: {reason}\n"
            "Choose another step, or set checkpoint.step to none for the newest intact one."
        )

    def _damage(self, work: Callable[[], object]) -> str | None:
        """Why a process found a step damaged in its work, or None. Raises UserError on all if a store fails on any."""
        reason = outage = None
        try:
            work()
        except (Damaged, FileNotFoundError) as error:
            reason = str(error)
        except StoreError as error:
            outage = str(error)
        if (outage := self._peers.agree(outage)) is not None:
            raise StoreError(outage)
        return self._peers.agree(reason)

    def demand(self, step: int) -> Folder:
        """Files of a step. Raises UserError if it is missing or damaged, even if there are other steps.

        A step that some process does not see is missing for all of them.
        """
        self._peers.check(lambda: self._existing(step))
        if (reason := self._fault(step)) is not None:
            raise self._damaged(step, reason)
        return self.place.files(step)

    def _existing(self, step: int) -> Folder:
        """Files of a step that this process sees. Raises UserError."""
        try:
            return self.place.files(step)
        except FileNotFoundError:
            committed = ", ".join(map(str, self.steps())) or "none"
            raise UserError(
                f"there is no checkpoint of step {step} in {self.place}.\nCommitted steps: {committed}."
            ) from None

    def _fault(self, step: int, *, blocks: bool = False) -> str | None:
        """Why a step is damaged, or None. The processes divide the hashing, and all return the same result.

        blocks: whether to read files of several blocks.
        """
        if step in self._verified:
            return None

        def verify() -> None:
            files = self.place.files(step)
            manifest.read_meta(files)
            entries = manifest.read_manifest(files)
            manifest.verify(files, entries, sorted(entries)[self._peers.index :: self._peers.count], blocks=blocks)

        if (reason := self._damage(verify)) is None:
            self._verified.add(step)
        return reason

    def _refuse(self, step: int, reason: str) -> None:
        self._refused.add(step)
        if self._peers.first:
            say(f"checkpoint step {step} in {self.place} is damaged and was skipped: {reason}")
        target = self._set_aside(step)
        if self._peers.first:
            self._event("checkpoint_damaged", step=step, why=reason, kept_as=target)

    def _set_aside(self, step: int) -> str | None:
        """Sets a damaged step aside for inspection -> its new name. A reader leaves the folder unchanged."""


def open_checkpoints(path: Path | str, *, peers: Peers | None = None) -> tuple[CheckpointReader, int | None]:
    """A reader for a run folder, a checkpoints folder or one step in it; and the step, if the path names one.

    Raises UserError if the path does not exist.
    """
    checkpoints, step = locate(path)
    return CheckpointReader(checkpoints, peers=peers), step
