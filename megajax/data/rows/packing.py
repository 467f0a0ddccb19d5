"""Packing of pieces of different lengths into rows of equal length, with little padding."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from megajax.data.rows.balancing import CAUSAL, imbalance

FILLING = 0.2
"""Share of the tokens, from the shortest pieces, that `balanced_fit` uses to fill rows. With log-normal lengths they
have few scores; a smaller share leaves rows less full."""
PADDING_PART = 128
"""Maximum positions of a document of padding: a block of queries of the attention kernels."""
DOCUMENTS = 64
"""Maximum number of documents in a row for cuDNN's attention (`megajax.kernels.attention.cudnn`)."""


def padding_lengths(padding: int, documents: int) -> np.ndarray:
    """Lengths of the documents that padding is divided into, int64 [P], about equal.

    Documents have at most `PADDING_PART` positions, which limits their scores, unless that would raise the number of
    documents of the row above `DOCUMENTS`.

    Args:
        padding: positions after the text, at least 1.
        documents: number of documents of the text.
    """
    parts = -(-padding // PADDING_PART)
    if documents < DOCUMENTS:
        parts = min(parts, DOCUMENTS - documents)
    return np.diff(np.arange(parts + 1) * padding // parts)


@dataclass(frozen=True, slots=True)
class Packing:
    """How well rows are packed."""

    fill: float
    """Share of the positions that are tokens."""
    imbalance: float
    """Maximum over mean of the attention scores of the rows; 1 if all rows have equal work."""

    @classmethod
    def of(cls, lengths: np.ndarray, rows: list[list[int]], room: int) -> "Packing":
        """The packing of pieces of these lengths, int [n], into rows of `room` positions; padding has no scores."""
        work = np.array([CAUSAL.pairs(lengths[row]).sum() for row in rows])
        return cls(float(sum(int(lengths[row].sum()) for row in rows) / (len(rows) * room)), imbalance(work))


@dataclass(slots=True)
class _Rows:
    """Partly filled rows."""

    room: int
    """Length of a row."""
    pieces: list[list[int]]
    """Pieces of each row."""
    space: list[int]
    """Free positions of each row."""

    @classmethod
    def empty(cls, count: int, room: int) -> "_Rows":
        return cls(room, [[] for _ in range(count)], [room] * count)

    def new(self) -> int:
        """Adds a row -> its number."""
        self.pieces.append([])
        self.space.append(self.room)
        return len(self.pieces) - 1

    def add(self, piece: int, length: int, row: int) -> None:
        self.pieces[row].append(piece)
        self.space[row] -= length

    def in_order(self) -> list[list[int]]:
        """Pieces of each nonempty row, ascending; rows in the order of their first pieces."""
        return sorted(sorted(row) for row in self.pieces if row)


def best_fit(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Pieces of each row by best-fit decreasing: each piece, longest first, goes into the fullest row that has room.

    It needs at most 11/9 of the fewest rows possible, plus one (Johnson 1974). About 10^6 pieces a second.

    Args:
        lengths: int [n], each from 0 to room.
        room: length of a row.

    Returns:
        The numbers of the pieces in each row, ascending; rows in the order of their first pieces.
    """
    rows = _Rows.empty(0, room)
    _fill(rows, lengths, np.argsort(-lengths, kind="stable"))
    return rows.in_order()


def balanced_fit(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Pieces of each row, with about equal attention work per row, in about as few rows as `best_fit`.

    Best-fit decreasing combines the longest pieces with each other, and the shortest ones, which have few scores. Here,
    each piece, longest first, goes into the row with the fewest scores that has room (Graham 1969: longest processing
    time first), and the shortest ones fill rows by best fit. No packing helps if a single piece has more scores than
    the mean row.

    Args, Returns: as of `best_fit`.
    """
    rows = _Rows.empty(len(best_fit(lengths, room)), room)
    order = np.argsort(-lengths, kind="stable")
    total = np.cumsum(lengths[order])
    large = int(np.searchsorted(total, (1 - FILLING) * total[-1])) if len(order) else 0
    work = [0.0] * len(rows.space)
    # Pieces get shorter, so a row without room for this piece waits for a shorter one.
    ready, waiting = [(0.0, row) for row in range(len(rows.space))], []
    heapify(ready)
    for piece in order[:large].tolist():
        length = int(lengths[piece])
        while waiting and -waiting[0][0] >= length:
            row = heappop(waiting)[1]
            heappush(ready, (work[row], row))
        if ready:
            row = heappop(ready)[1]
        else:
            row = rows.new()
            work.append(0.0)
        rows.add(piece, length, row)
        work[row] += length * (length + 1) / 2
        heappush(waiting, (-rows.space[row], row))
    _fill(rows, lengths, order[large:])
    return rows.in_order()


def _fill(rows: _Rows, lengths: np.ndarray, order: np.ndarray) -> None:
    """Put the pieces of `order` into the rows by best fit, and into new rows."""
    # Rows by their free space, and the distinct spaces in order.
    open_rows: dict[int, list[int]] = {}
    for row, space in enumerate(rows.space):
        open_rows.setdefault(space, []).append(row)
    rooms = sorted(open_rows)
    for piece in order.tolist():
        length = int(lengths[piece])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row = rows.new()
        else:
            space = rooms[place]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del open_rows[space], rooms[place]
        rows.add(piece, length, row)
        space = rows.space[row]
        if space not in open_rows:
            open_rows[space] = []
            insort(rooms, space)
        open_rows[space].append(row)
