"""The collectives of a compiled program as lines of text, for golden files."""

from collections import Counter
from collections.abc import Iterable

from megajax.planning.program.hlo import Collective


def counts(actual: Iterable[Collective]) -> list[str]:
    """Lines "in 2 loops: all-gather over tensor: 3 arrays, 4,096 numbers", sorted."""
    arrays: Counter[tuple[int, str, str]] = Counter()
    elements: Counter[tuple[int, str, str]] = Counter()
    for collective in actual:
        place = len(collective.place.path), collective.kind, collective.groups.name
        arrays[place] += collective.arrays
        elements[place] += collective.elements
    return [
        f"in {place[0]} loops: {place[1]} over {place[2]}: {arrays[place]} arrays, {elements[place]:,} numbers"
        for place in sorted(arrays)
    ]
