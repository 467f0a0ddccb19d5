"""Finding and restoring local checkpoints: from this machine's folder, and missing shards from other processes."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from megajax.checkpoint import arrays
from megajax.checkpoint.boxes import Box, overlap, relative, shape_of
from megajax.checkpoint.integrity import Damaged
from megajax.checkpoint.local.exchange import RemoteSet
from megajax.checkpoint.local.manager import LocalCheckpoints
from megajax.checkpoint.local.sets import LocalSet, bounds_of
from megajax.checkpoint.reader import Meta, Tree, say
from megajax.checkpoint.weights.placement import array_of
from megajax.config.errors import UserError


class UnreadableError(UserError):
    """A local checkpoint that was complete can no longer be read. The next start skips it."""

    code = 1


class SkippedStep(NamedTuple):
    """A local checkpoint that is damaged or incomplete."""

    step: int
    reason: str


class Holder(NamedTuple):
    """A set of a complete checkpoint, and the process that holds it."""

    process: int
    """The process that owns it now."""
    set_id: str
    parts: tuple[int, ...]
    """Processes of the run that saved it, whose shards are in the set."""


class LocalReader:
    """Restores the newest intact local checkpoint of a run. It has the methods of a `CheckpointReader`.

    All processes call them in the same order.
    """

    def __init__(self, local: LocalCheckpoints):
        self._local, self._members, self._peers = local, local.members, local.peers
        self.folder = local.folder.process_folder
        self.skipped: list[SkippedStep] = []
        """The steps that `newest_intact` skipped."""
        self._step: int | None = None
        self._holders: list[Holder] = []
        self._meta: Meta | None = None

    def newest_intact(self) -> int | None:
        """The newest step with all shards on the processes, matching their saved SHA-256; None if there is none."""
        infos = [local_set.index.info for local_set in self._local.served.values()]
        gathered = self._peers.gather([(info.step, info.save, info.processes) for info in infos])
        for step, save, processes in sorted({tuple(save) for saves in gathered for save in saves}, reverse=True):
            faults = self._damaged(save)
            own_holders = [
                Holder(self._members.process, local_set.index.info.id, local_set.index.info.parts)
                for local_set in self._local.served.values()
                if local_set.index.info.save == save
            ]
            answers = self._peers.gather((own_holders, faults))
            holders = [
                Holder(process, name, tuple(parts))
                for process_holders, _ in answers
                for process, name, parts in process_holders
            ]
            missing = set(range(processes)).difference(*(holder.parts for holder in holders))
            if not missing:
                self._step, self._holders, self._meta = step, holders, None
                return step
            lost_processes = ", ".join(f"process {process}" for process in sorted(missing))
            faults = [fault for _, process_faults in answers for fault in process_faults]
            reason = "; ".join([f"the shards of {lost_processes} are lost", *faults])
            self.skipped.append(SkippedStep(step, reason))
        return None

    def _damaged(self, save: str) -> list[str]:
        """Verifies this process's sets of a save; removes the damaged ones -> their faults."""
        faults = []
        for local_set in list(self._local.served.values()):
            if local_set.index.info.save != save:
                continue
            try:
                local_set.verify()
            except Damaged as error:
                faults.append(f"{local_set.path} is damaged: {error}")
                say(f"removed the local checkpoint {faults[-1]}")
                self._local.drop(local_set)
        return faults

    def meta(self, step: int) -> Meta:
        """The metadata given to `save`."""
        self._demand(step)
        if self._meta is None:
            with self._sources() as sources:
                self._meta = dict(sources.first.index.info.meta)
        return self._meta

    def restore(self, step: int, like: Tree) -> tuple[Tree, Meta]:
        """The arrays of the step with the layout of `like`, bit for bit, and its metadata.

        like: tree of jax.ShapeDtypeStruct with shardings. Raises UserError if names, shapes or dtypes differ,
        UnreadableError if a set is damaged or its process does not answer.
        """
        self._demand(step)
        expected = arrays.named_leaves(like)
        result: dict[str, jax.Array] = {}
        reason = None
        try:
            with self._sources() as sources:
                stored = {
                    piece.name: (piece.shape, jnp.dtype(piece.dtype)) for piece in sources.first.index.pieces.values()
                }
                to_load = {name: leaf for name, leaf in expected.items() if prod(leaf.shape)}
                arrays.demand_fit(f"local checkpoint of step {step}", stored, to_load)
                for name, leaf in expected.items():
                    result[name] = array_of(leaf, partial(sources.read, name, leaf.dtype))
        except (Damaged, OSError) as error:
            reason = str(error)
        if (reason := self._peers.agree(reason)) is not None:
            raise UnreadableError(
                f"local checkpoint step {step} can't be read: {reason}.\n"
                "A restart uses the next newest one; with checkpoint.local=none, the run folder's checkpoints."
            )
        return jax.tree.unflatten(jax.tree.structure(like), [result[name] for name in expected]), self.meta(step)

    def _sources(self) -> "_Sources":
        return _Sources(self._local, self._holders)

    def _demand(self, step: int) -> None:
        if step != self._step:
            raise ValueError(f"newest_intact returned step {self._step}, not {step}")


class _Sources:
    """The sets of a complete checkpoint. Connections to other processes are opened when they are needed."""

    def __init__(self, local: LocalCheckpoints, holders: list[Holder]):
        self._local, self._members = local, local.members
        local_process = self._members.process
        # First the sets of this process, then those with the shards of its own devices.
        self._holders = sorted(
            holders, key=lambda holder: (holder.process != local_process, local_process not in holder.parts)
        )
        self._opened: dict[str, LocalSet | RemoteSet] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "_Sources":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[LocalSet | RemoteSet]:
        for process, set_id, _ in self._holders:
            if set_id not in self._opened:
                self._opened[set_id] = (
                    self._local.served[set_id]
                    if process == self._members.process
                    else self._stack.enter_context(self._members.read_from(process, set_id))
                )
            yield self._opened[set_id]

    @property
    def first(self) -> LocalSet | RemoteSet:
        return next(iter(self))

    def read(self, name: str, dtype: Any, box: Box) -> np.ndarray:
        """A box of an array, as saved or assembled from other boxes. Raises Damaged or OSError."""
        if not prod(shape_of(box)):
            return np.zeros(shape_of(box), dtype)
        for source in self:
            if (piece := source.index.pieces.get((name, box))) is not None:
                return source.read(piece)
        result, read_boxes, filled = np.empty(shape_of(box), dtype), set[Box](), 0
        for source in self:
            for piece in source.index.pieces.values():
                if piece.name != name or piece.box in read_boxes or (common := overlap(box, piece.box)) is None:
                    continue
                read_boxes.add(piece.box)
                result[relative(common, box)] = source.read(piece)[relative(common, piece.box)]
                filled += prod(shape_of(common))
        if filled != result.size:
            part = f"{name} {bounds_of(box)}"
            raise Damaged(f"{filled} of {result.size} elements of {part} are in the sets of this checkpoint")
        return result
