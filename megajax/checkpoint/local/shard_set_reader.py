"""The arrays of a local checkpoint, read from the sets of this machine and of other processes, and verified."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from megajax.checkpoint.boxes import Box, relative, shape_of
from megajax.checkpoint.local.remote_shards import Members, RemoteSet
from megajax.checkpoint.local.shard_set import LocalSet, SetInfo
from megajax.checkpoint.manifest import Damaged
from megajax.checkpoint.zarr_reader import StoredArray


class Holder(NamedTuple):
    """A set of a complete checkpoint, and the process that holds it."""

    process: int
    """The process that owns it now."""
    set_id: str
    parts: Sequence[int]
    """Processes of the run that saved it, whose shards are in the set."""


class SetReader:
    """The sets of a complete checkpoint, for `arrays.read`. Connections to other processes are opened when needed."""

    def __init__(self, step: str, served: Mapping[str, LocalSet], members: Members, holders: Sequence[Holder]):
        """step: its name, for messages. served: the sets of this process, by their ids."""
        self.step = step
        self._served, self._members = served, members
        local_process = self._members.process
        # First the sets of this process, then those with the shards of its own devices.
        self._holders = sorted(
            holders, key=lambda holder: (holder.process != local_process, local_process not in holder.parts)
        )
        self.faults: dict[str, str] = {}
        """Id of a set -> why a copy in it is damaged."""
        self._lost: list[str] = []
        """Why processes do not answer."""
        self._opened: dict[str, LocalSet | RemoteSet | None] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "SetReader":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _sources(self) -> Iterator[tuple[Holder, LocalSet | RemoteSet]]:
        for holder in self._holders:
            if holder.set_id not in self._opened:
                self._opened[holder.set_id] = self._open(holder)
            if (source := self._opened[holder.set_id]) is not None:
                yield holder, source

    def _open(self, holder: Holder) -> LocalSet | RemoteSet | None:
        if holder.process == self._members.process:
            return self._served[holder.set_id]
        try:
            return self._stack.enter_context(self._members.read_from(holder.process, holder.set_id))
        except (Damaged, OSError) as error:
            self._lost.append(str(error))
            return None

    def _first(self) -> LocalSet | RemoteSet:
        """Raises Damaged if no process with a set answers."""
        for _, source in self._sources():
            return source
        raise self._missing("no set can be read")

    def info(self) -> SetInfo:
        """The metadata of a set. Raises Damaged."""
        try:
            return self._first().info
        except OSError as error:
            raise Damaged(str(error)) from None

    @property
    def arrays(self) -> Mapping[str, StoredArray]:
        """Name -> shape and dtype of an array."""
        return self._first().arrays.arrays

    def read_all(self, wanted: Sequence[tuple[str, Box]]) -> list[np.ndarray]:
        """Boxes of arrays. Each chunk is read from the first set with an intact copy. Raises Damaged."""
        first = self._first().arrays
        results = [np.empty(shape_of(box), np.dtype(self.arrays[name].dtype)) for name, box in wanted]
        missing = [
            (name, chunk, target[(*relative(chunk, box), ...)])
            for (name, box), target in zip(wanted, results, strict=True)
            for chunk in first.chunks(name, box)
        ]
        sources = self._sources()
        while missing and (opened := next(sources, None)) is not None:
            holder, source = opened
            stored = [part for part in missing if source.arrays.has(*part[:2])]
            missing = [part for part in missing if not source.arrays.has(*part[:2])]
            try:
                damaged = source.arrays.fill(stored)
            except Damaged as error:
                self._note(holder, str(error))
                missing += stored
                continue
            except OSError as error:
                self._lost.append(str(error))
                self._opened[holder.set_id] = None
                missing += stored
                continue
            for number, fault in sorted(damaged.items()):
                self._note(holder, fault)
                missing.append(stored[number])
        if missing:
            name, box, _ = missing[0]
            bounds = [(side.start, side.stop) for side in box]
            raise self._missing(f"{name} {bounds} has no intact copy")
        return results

    def _note(self, holder: Holder, fault: str) -> None:
        self.faults.setdefault(holder.set_id, f"on process {holder.process}: {fault}")

    def _missing(self, part: str) -> Damaged:
        return Damaged("; ".join([part, *self.faults.values(), *self._lost]))

    def verify_rest(self) -> None:
        """Verifies what was not read of the sets of this process, which are copies for others. Adds to `faults`."""
        for holder in self._holders:
            if holder.process == self._members.process:
                try:
                    self._served[holder.set_id].arrays.verify_unread()
                except Damaged as error:
                    self._note(holder, str(error))
