"""The arrays of a local checkpoint, read from the sets of this machine and of other processes, and verified."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from threading import Lock
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.boxes import Box, overlap, relative, shape_of
from megajax.checkpoint.integrity import Damaged, in_threads
from megajax.checkpoint.local.remote_shards import Members, RemoteSet
from megajax.checkpoint.local.shard_files import LocalSet, Shard, StoredShard, bounds_of


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
        self._owners = {holder.set_id: holder.process for holder in holders}
        self.faults: dict[str, str] = {}
        """Id of a set -> why a copy in it is damaged."""
        self._lost: list[str] = []
        """Why processes do not answer."""
        self._read: set[tuple[str, Shard]] = set()
        self._opened: dict[str, LocalSet | RemoteSet | None] = {}
        self._opening, self._stack = Lock(), ExitStack()

    def __enter__(self) -> "SetReader":
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
            return self._served[holder.set_id]
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
        own_sets = [self._served[set_id] for set_id in own_ids]
        pieces = [(source, piece) for source in own_sets for piece in source.index.pieces.values()]
        rest = [(source, piece) for source, piece in pieces if (source.index.info.id, piece.shard) not in self._read]
        in_threads(lambda item: self._values(*item) is None, rest)
