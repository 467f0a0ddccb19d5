"""Packing: pieces of different lengths into rows of one length, with little room left over."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from megajax.data.attention_work import imbalance, scores

FILLING = 0.2
"""Share of the tokens, those of the shortest pieces, that `balanced_fit` fills rows with. Of log-normal lengths their
scores are few, and with less the rows get less full."""


PADDING_PART = 128
"""Positions of a document of padding: a block of queries of the attention kernels."""
DOCUMENTS = 64
"""cuDNN's attention takes no more documents in a row (`megajax.kernels.cudnn`)."""


def padding_lengths(padding: int, documents: int) -> np.ndarray:
    """Lengths of the documents that padding is cut into, int64 [P], with about equal lengths.

    As few scores as that takes: documents of at most `PADDING_PART` positions, unless the row then had more than
    `DOCUMENTS` documents and had fewer before.

    Args:
        padding: positions behind the text, at least 1.
        documents: of the text.
    """
    parts = -(-padding // PADDING_PART)
    if documents < DOCUMENTS:
        parts = min(parts, DOCUMENTS - documents)
    return np.diff(np.arange(parts + 1) * padding // parts)


@dataclass(frozen=True, slots=True)
class Packing:
    """How well rows are packed."""

    fill: float
    """Tokens among all places of the rows."""
    imbalance: float
    """Attention scores of the row with the most, over the mean: 1 where all have the same work."""

    @classmethod
    def of(cls, lengths: np.ndarray, rows: list[list[int]], room: int) -> "Packing":
        """Of pieces with these lengths, int [n], in rows of `room` places; padding has no scores."""
        work = np.array([scores(lengths[row]).sum() for row in rows])
        return cls(float(sum(int(lengths[row].sum()) for row in rows) / (len(rows) * room)), imbalance(work))


@dataclass(slots=True)
class _Rows:
    """Rows that are being filled."""

    room: int
    pieces: list[list[int]]
    """Of each row."""
    space: list[int]
    """Room that each row has left."""

    @classmethod
    def empty(cls, count: int, room: int) -> "_Rows":
        return cls(room, [[] for _ in range(count)], [room] * count)

    def new(self) -> int:
        """The number of a further row."""
        self.pieces.append([])
        self.space.append(self.room)
        return len(self.pieces) - 1

    def add(self, piece: int, length: int, row: int) -> None:
        self.pieces[row].append(piece)
        self.space[row] -= length

    def in_order(self) -> list[list[int]]:
        """Pieces of each row that has some, rising; rows in the order of their first pieces."""
        return sorted(sorted(row) for row in self.pieces if row)


def best_fit(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Pieces of each row: best-fit decreasing, which takes the longest piece first, into the fullest row that has room.

    It needs at most 11/9 of the fewest rows possible, plus one (Johnson 1974). About 10^6 pieces a second.

    Args:
        lengths: int [n], each from 0 to room.
        room: length of a row.

    Returns:
        The numbers of the pieces in each row, rising; rows in the order of their first pieces.
    """
    rows = _Rows.empty(0, room)
    _fill(rows, lengths, np.argsort(-lengths, kind="stable"))
    return rows.in_order()


def balanced_fit(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Pieces of each row, so that attention has about equal work on each, in about as few rows as by `best_fit`.

    Best-fit decreasing puts the longest pieces together, and the shortest, which need few scores. Here the longest
    piece goes into the row with the fewest scores that has room (Graham 1969: longest processing time first), and the
    shortest ones fill rows by best fit. No packing helps where a piece alone has more scores than a mean row.

    Args, Returns: as of `best_fit`.
    """
    rows = _Rows.empty(len(best_fit(lengths, room)), room)
    order = np.argsort(-lengths, kind="stable")
    total = np.cumsum(lengths[order])
    large = int(np.searchsorted(total, (1 - FILLING) * total[-1])) if len(order) else 0
    work = [0.0] * len(rows.space)
    # Pieces get shorter, so a row without room for one waits until the next is short enough.
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
    """Put the pieces of `order` into the rows by best fit, and into new ones."""
    # Rows by the room they have left, and the different rooms in order.
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
