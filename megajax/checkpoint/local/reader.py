"""Finding and restoring local checkpoints: from this machine's folder, and what is not there from others."""

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
from megajax.checkpoint.local.sets import LocalSet, ends_of
from megajax.checkpoint.reader import Meta, Tree, say
from megajax.checkpoint.weights.placement import array_of
from megajax.config.errors import UserError


class UnreadableError(UserError):
    """A local checkpoint that was whole can't be read any more. At the next start it does not count as whole."""

    code = 1


class NotWhole(NamedTuple):
    """A local checkpoint that was passed over."""

    step: int
    why: str


class Holder(NamedTuple):
    """A set of a whole checkpoint, and where it is."""

    process: int
    """Which process looks after it now."""
    set_id: str
    parts: tuple[int, ...]
    """Processes of the run that saved it, whose shards it has."""


class LocalReader:
    """Restores the newest whole local checkpoint of a run; the same methods as a `CheckpointReader`.

    All processes call them in the same order.
    """

    def __init__(self, local: LocalCheckpoints):
        self._local, self._members, self._peers = local, local.members, local.peers
        self.folder = local.folder.own
        self.passed_over: list[NotWhole] = []
        """What `newest_whole` did not take."""
        self._step: int | None = None
        self._holders: list[Holder] = []
        self._meta: Meta | None = None

    def newest_whole(self) -> int | None:
        """The newest step with every shard on some process and with its saved SHA-256; None if no step has."""
        infos = [local_set.index.info for local_set in self._local.served.values()]
        gathered = self._peers.gather([(info.step, info.save, info.processes) for info in infos])
        for step, save, processes in sorted({tuple(save) for saves in gathered for save in saves}, reverse=True):
            faults = self._damaged(save)
            mine = [
                Holder(self._members.process, local_set.index.info.id, local_set.index.info.parts)
                for local_set in self._local.served.values()
                if local_set.index.info.save == save
            ]
            answers = self._peers.gather((mine, faults))
            holders = [Holder(process, name, tuple(parts)) for some, _ in answers for process, name, parts in some]
            missing = set(range(processes)).difference(*(holder.parts for holder in holders))
            if not missing:
                self._step, self._holders, self._meta = step, holders, None
                return step
            lost = ", ".join(f"process {process}" for process in sorted(missing))
            faults = [fault for _, some in answers for fault in some]
            why = "; ".join([f"no process has the shards of {lost} any more", *faults])
            self.passed_over.append(NotWhole(step, why))
        return None

    def _damaged(self, save: str) -> list[str]:
        """Verifies this process's sets of a save; removes the damaged ones -> why."""
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
        UnreadableError if a process can't be read from.
        """
        self._demand(step)
        wanted = arrays.named_leaves(like)
        result: dict[str, jax.Array] = {}
        reason = None
        try:
            with self._sources() as sources:
                stored = {
                    piece.name: (piece.shape, jnp.dtype(piece.dtype)) for piece in sources.first.index.pieces.values()
                }
                to_load = {name: leaf for name, leaf in wanted.items() if prod(leaf.shape)}
                arrays.demand_fit(f"local checkpoint of step {step}", stored, to_load)
                for name, leaf in wanted.items():
                    result[name] = array_of(leaf, partial(sources.read, name, leaf.dtype))
        except (Damaged, OSError) as error:
            reason = str(error)
        if (reason := self._peers.agree(reason)) is not None:
            raise UnreadableError(
                f"local checkpoint step {step} can't be read: {reason}.\n"
                "A restart takes the next newest; checkpoint.local=none, the run folder's checkpoints."
            )
        return jax.tree.unflatten(jax.tree.structure(like), [result[name] for name in wanted]), self.meta(step)

    def _sources(self) -> "_Sources":
        return _Sources(self._local, self._holders)

    def _demand(self, step: int) -> None:
        if step != self._step:
            raise ValueError(f"newest_whole gave step {self._step}, not {step}")


class _Sources:
    """The sets of a whole checkpoint; those of other processes are connected when they are needed."""

    def __init__(self, local: LocalCheckpoints, holders: list[Holder]):
        self._local, self._members = local, local.members
        me = self._members.process
        # First those here, then those with the shards of this process's own devices.
        self._holders = sorted(holders, key=lambda holder: (holder.process != me, me not in holder.parts))
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
        """A box of an array, as it was saved or put together from others. Raises Damaged or OSError."""
        if not prod(shape_of(box)):
            return np.zeros(shape_of(box), dtype)
        for source in self:
            if (piece := source.index.pieces.get((name, box))) is not None:
                return source.read(piece)
        result, done, filled = np.empty(shape_of(box), dtype), set[Box](), 0
        for source in self:
            for piece in source.index.pieces.values():
                if piece.name != name or piece.box in done or (common := overlap(box, piece.box)) is None:
                    continue
                done.add(piece.box)
                result[relative(common, box)] = source.read(piece)[relative(common, piece.box)]
                filled += prod(shape_of(common))
        if filled != result.size:
            where = f"{name} {ends_of(box)}"
            raise Damaged(f"{filled} of {result.size} elements of {where} are in the sets of this checkpoint")
        return result
