"""Finding and restoring local checkpoints: from this machine's folder, and missing shards from other processes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from math import prod
from threading import Lock
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint import arrays
from megajax.checkpoint.boxes import Box, overlap, relative, shape_of
from megajax.checkpoint.integrity import Damaged, in_threads
from megajax.checkpoint.local.exchange import RemoteSet
from megajax.checkpoint.local.manager import LocalCheckpoints
from megajax.checkpoint.local.sets import LocalSet, Shard, StoredShard, bounds_of
from megajax.checkpoint.reader import DamagedStep, Meta, Tree, say


class SkippedStep(NamedTuple):
    """A local checkpoint that is damaged or incomplete."""

    step: int
    reason: str


class Holder(NamedTuple):
    """A set of a complete checkpoint, and the process that holds it."""

    process: int
    """The process that owns it now."""
    set_id: str
    parts: Sequence[int]
    """Processes of the run that saved it, whose shards are in the set."""


class LocalReader:
    """Restores the newest intact local checkpoint of a run. It has the methods of a `CheckpointReader`.

    All processes call them in the same order.
    """

    def __init__(self, local: LocalCheckpoints):
        self._local, self._members, self._peers = local, local.members, local.peers
        self.folder = local.folder.process_folder
        self.skipped: list[SkippedStep] = []
        """The steps that the last call of `newest_intact` skipped, and those that restores found damaged before it."""
        self._damaged: list[SkippedStep] = []
        """The steps that restores found damaged since then."""
        self._refused: set[str] = set()
        """Names of the saves of skipped steps."""
        self._step: int | None = None
        self._save = ""
        self._holders: list[Holder] = []
        self._meta: Meta = {}

    def newest_intact(self) -> int | None:
        """The newest step with all shards on the processes; None if there is none.

        Shards are verified when they are read: if `restore` of the step raises DamagedStep, call this again.
        """
        self.skipped, self._damaged = self._damaged, []
        infos = [local_set.index.info for local_set in self._local.served.values()]
        summaries = [
            (info.step, info.save, info.processes, self._members.process, info.id, info.parts) for info in infos
        ]
        saves: dict[tuple[int, str, int], list[Holder]] = {}
        for step, save, processes, process, set_id, parts in chain.from_iterable(self._peers.gather(summaries)):
            saves.setdefault((step, save, processes), []).append(Holder(process, set_id, parts))
        for (step, save, processes), holders in sorted(saves.items(), reverse=True):
            if save in self._refused:
                continue
            self._step, self._save, self._holders = step, save, holders
            missing = set(range(processes)).difference(*(holder.parts for holder in holders))
            lost_processes = ", ".join(f"process {process}" for process in sorted(missing))
            reason = f"the shards of {lost_processes} are lost" if missing else self._peers.agree(self._read_meta())
            if reason is None:
                return step
            self._refused.add(save)
            self.skipped.append(SkippedStep(step, reason))
        return None

    def _read_meta(self) -> str | None:
        """Reads the metadata of the chosen step -> why it can't be read, or None."""
        try:
            with self._sources() as sources:
                self._meta = dict(sources.first.index.info.meta)
        except Damaged as error:
            return str(error)
        return None

    def meta(self, step: int) -> Meta:
        """The metadata given to `save`."""
        self._demand(step)
        return self._meta

    def restore(self, step: int, like: Tree) -> tuple[Tree, Meta]:
        """The arrays of the step with the layout of `like`, bit for bit, and its metadata.

        like: tree of jax.ShapeDtypeStruct with shardings. Every byte of this process's sets is read once, and again
        for each process that lacks it; what is returned is what was hashed. Another copy replaces a damaged shard.
        Raises UserError if names, shapes or dtypes differ; DamagedStep if a process finds no intact copy of a shard.
        """
        self._demand(step)
        tree, reason = list[Tree](), None
        with self._sources() as sources:
            try:
                tree.append(arrays.read(sources, like))
                sources.verify_rest()
            except Damaged as error:
                reason = f"process {self._members.process}: {error}"
        answers = self._peers.gather((reason, sources.faults))
        faults = {set_id: fault for _, process_faults in answers for set_id, fault in process_faults.items()}
        self._remove_damaged(faults)
        self._holders = [holder for holder in self._holders if holder.set_id not in faults]
        if reasons := [reason for reason, _ in answers if reason is not None]:
            self._refused.add(self._save)
            self._damaged.append(SkippedStep(step, "; ".join(reasons[:3])))
            raise DamagedStep(f"local checkpoint step {step} can't be read: {self._damaged[-1].reason}")
        return tree[0], self._meta

    def _remove_damaged(self, faults: Mapping[str, str]) -> None:
        """Deletes the damaged sets of this process, which are verified again: a transfer may have damaged a copy.

        faults: id of a set -> its fault as some process read it.
        """
        for local_set in list(self._local.served.values()):
            if (fault := faults.get(local_set.index.info.id)) is None:
                continue
            try:
                local_set.verify()
                say(f"the local checkpoint {local_set.path} is intact, but was damaged when it was read: {fault}")
            except Damaged as error:
                say(f"removed the local checkpoint {local_set.path}, which is damaged: {error}")
                self._local.drop(local_set)

    def _sources(self) -> "_Sources":
        return _Sources(f"local checkpoint of step {self._step}", self._local, self._holders)

    def _demand(self, step: int) -> None:
        if step != self._step:
            raise ValueError(f"newest_intact returned step {self._step}, not {step}")


class _Sources:
    """The sets of a complete checkpoint, for `arrays.read`. Connections to other processes are opened when needed."""

    def __init__(self, step: str, local: LocalCheckpoints, holders: Sequence[Holder]):
        self.step = step
        self._local, self._members = local, local.members
        local_process = self._members.process
        # First the sets of this process, then those with the shards of its own devices.
        self._holders = sorted(
            holders, key=lambda holder: (holder.process != local_process, local_process not in holder.parts)
        )
        self._owners = {holder.set_id: holder.process for holder in holders}
        self.faults: dict[str, str] = {}
        """Id of a set -> why a copy in it is damaged."""
        self._lost: list[str] = []
        """Why processes do not answer."""
        self._read: set[tuple[str, Shard]] = set()
        self._opened: dict[str, LocalSet | RemoteSet | None] = {}
        self._opening, self._stack = Lock(), ExitStack()

    def __enter__(self) -> "_Sources":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[LocalSet | RemoteSet]:
        for holder in self._holders:
            with self._opening:
                if holder.set_id not in self._opened:
                    self._opened[holder.set_id] = self._open(holder)
            if (source := self._opened[holder.set_id]) is not None:
                yield source

    def _open(self, holder: Holder) -> LocalSet | RemoteSet | None:
        if holder.process == self._members.process:
            return self._local.served[holder.set_id]
        try:
            return self._stack.enter_context(self._members.read_from(holder.process, holder.set_id))
        except (Damaged, OSError) as error:
            self._lost.append(str(error))
            return None

    @property
    def first(self) -> LocalSet | RemoteSet:
        """Raises Damaged if no process with a set answers."""
        for source in self:
            return source
        raise self._missing("no set can be read")

    @property
    def arrays(self) -> dict[str, StoredShard]:
        """Name -> a piece, which has the shape and dtype of the array."""
        return {piece.name: piece for piece in self.first.index.pieces.values()}

    def read_all(self, wanted: Sequence[tuple[str, Box]]) -> list[np.ndarray]:
        """Boxes of arrays, as saved or assembled from other boxes; each of those is read once. Raises Damaged."""
        stored, boxes = self.arrays, dict[Shard, list[int]]()
        results: list[np.ndarray] = [np.empty(0)] * len(wanted)
        for number, (name, box) in enumerate(wanted):
            shards = self._shards(name, box)
            for shard in shards:
                boxes.setdefault(shard, []).append(number)
            if shards != {(name, box)}:
                results[number] = np.empty(shape_of(box), jnp.dtype(stored[name].dtype))

        def read(shard: Shard) -> None:
            values = self._intact(shard)
            for number in boxes[shard]:
                box = wanted[number][1]
                if box == shard[1]:
                    results[number] = values
                elif (common := overlap(box, shard[1])) is not None:
                    results[number][relative(common, box)] = values[relative(common, shard[1])]

        in_threads(read, boxes)
        return results

    def _shards(self, name: str, box: Box) -> set[Shard]:
        """The saved shards that together have the elements of a box."""
        if any((name, box) in source.index.pieces for source in self):
            return {(name, box)}
        pieces = (piece for source in self for piece in source.index.pieces.values() if piece.name == name)
        parts = {piece.shard: prod(shape_of(common)) for piece in pieces if (common := overlap(box, piece.box))}
        if sum(parts.values()) != prod(shape_of(box)):
            raise self._missing(f"the sets have {sum(parts.values())} elements of {name} {bounds_of(box)}")
        return set(parts)

    def _intact(self, shard: Shard) -> np.ndarray:
        """The values of the first intact copy of a shard. Raises Damaged if there is none."""
        for source in self:
            piece = source.index.pieces.get(shard)
            if piece is not None and (values := self._values(source, piece)) is not None:
                return values
        raise self._missing(f"{shard[0]} {bounds_of(shard[1])} has no intact copy")

    def _values(self, source: LocalSet | RemoteSet, piece: StoredShard) -> np.ndarray | None:
        """The values of a copy of a shard; None if it is damaged or its process does not answer."""
        set_id = source.index.info.id
        self._read.add((set_id, piece.shard))
        try:
            return source.read(piece)
        except Damaged as error:
            self.faults[set_id] = f"on process {self._owners[set_id]}: {error}"
        except OSError as error:
            self._lost.append(str(error))
            self._opened[set_id] = None
        return None

    def _missing(self, part: str) -> Damaged:
        return Damaged("; ".join([part, *self.faults.values(), *self._lost]))

    def verify_rest(self) -> None:
        """Verifies what was not read of the sets of this process, which are copies for others. Adds to `faults`."""
        own_ids = [holder.set_id for holder in self._holders if holder.process == self._members.process]
        own_sets = [self._local.served[set_id] for set_id in own_ids]
        pieces = [(source, piece) for source in own_sets for piece in source.index.pieces.values()]
        rest = [(source, piece) for source, piece in pieces if (source.index.info.id, piece.shard) not in self._read]
        in_threads(lambda item: self._values(*item) is None, rest)
