"""Which mesh axes a collective runs along, from the groups of devices its text gives in one of several forms.

Devices are numbered by their place in the mesh, which is how the compiler numbers the partitions of a program.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_TILED = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\((.*?)\))? ?\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_TILES = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'?([\w.-]+)'?=(\d+)")
_USED = re.compile(r"'([\w.-]+)'(?::\((\d+)\)(\d+))?")


@dataclass(frozen=True, slots=True)
class Groups:
    """The devices that work together in one collective."""

    axes: tuple[str, ...]
    """Mesh axes along which members of a group differ, outermost first."""
    size: int
    """Devices of a group; of a permute, those of all the axes."""
    whole: bool = True
    """False where a group is only some of the devices along its axes."""

    @property
    def name(self) -> str:
        """Such as "tensor", "data+context", or "tensor (part)"."""
        return "+".join(self.axes) + ("" if self.whole else " (part)")


def groups_of(attributes: str, mesh: Mapping[str, int]) -> Groups:
    """From the attributes of a collective and the sizes of the mesh's axes. Raises ValueError for an unknown form."""
    return _groups_of(attributes, tuple(mesh.items()))


@lru_cache(maxsize=1024)
def _groups_of(attributes: str, mesh: tuple[tuple[str, int], ...]) -> Groups:
    sizes = dict(mesh)
    devices = prod(sizes.values())
    if pairs := _PAIRS.search(attributes):
        return _moved(_rows(pairs[1]), sizes)
    if listed := _LISTED.search(attributes):
        return _along(_rows(listed[1]) or [list(range(devices))], sizes)
    if tiled := _TILED.search(attributes):
        return _along(_order(tiled[1]).tolist(), sizes)
    if named := _NAMED.search(attributes):
        return _along(_by_name(*named.groups()), sizes)
    raise ValueError(f"a collective whose groups can't be read: {attributes[:300]}")


def _rows(text: str) -> list[list[int]]:
    return [[int(place) for place in row.split(",")] for row in re.findall(r"\{([\d,]+)\}", text)]


def _order(text: str) -> np.ndarray:
    """ "[2,4]<=[4,2]T(1,0)" -> the numbers of [4, 2], transposed, as an array [2, 4]."""
    tiles = _TILES.match(text)
    if tiles is None:
        raise ValueError(f"not an order of devices: {text}")
    shape, dims, turned = ([int(n) for n in part.split(",")] if part else [] for part in tiles.groups())
    order = np.arange(prod(shape)).reshape(dims or shape)
    return order.transpose(turned or range(order.ndim)).reshape(shape)


def _by_name(axes: str, order: str | None, used: str) -> list[list[int]]:
    """Groups along the used axes, or parts 'name':(steps before)size of them, of a mesh written out in the text."""
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    places = np.arange(prod(sizes.values())) if order is None else _order(order).ravel()
    split: list[tuple[int, bool]] = []
    for name, size in sizes.items():
        parts = [
            (int(before or 1), int(part or size)) for part_of, before, part in _USED.findall(used) if part_of == name
        ]
        done = 1
        for before, part in sorted(parts):
            split += [(before // done, False), (part, True)]
            done = before * part
        split.append((size // done, False))
    grid = places.reshape([size for size, _ in split])
    chosen = [dim for dim, (_, taken) in enumerate(split) if taken]
    last = np.moveaxis(grid, chosen, range(grid.ndim - len(chosen), grid.ndim))
    return last.reshape(-1, prod(split[dim][0] for dim in chosen)).tolist()


def _coordinates(places: list[int], sizes: dict[str, int]) -> np.ndarray:
    """[axes, places]."""
    return np.array(np.unravel_index(np.array(places), tuple(sizes.values())))


def _along(groups: list[list[int]], sizes: dict[str, int]) -> Groups:
    differing = np.zeros(len(sizes), bool)
    for group in groups:
        found = _coordinates(group, sizes)
        differing |= (found != found[:, :1]).any(axis=1)
    axes = tuple(name for name, differs in zip(sizes, differing, strict=True) if differs)
    members = max(len(group) for group in groups)
    return Groups(axes, members, members == prod(sizes[name] for name in axes))


def _moved(pairs: list[list[int]], sizes: dict[str, int]) -> Groups:
    """Of a permute: the axes along which anything moves."""
    if not pairs:
        return Groups((), 1)
    ends = np.array(pairs).T
    differing = (_coordinates(ends[0], sizes) != _coordinates(ends[1], sizes)).any(axis=1)
    axes = tuple(name for name, differs in zip(sizes, differing, strict=True) if differs)
    return Groups(axes, prod(sizes[name] for name in axes))
