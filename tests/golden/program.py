"""Reads the collectives out of a compiled program: which, how many, over which mesh axes, in how many loops."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from jax.sharding import Mesh

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\((.*?)\), ")
CALLED = re.compile(r"(?:to_apply|calls|condition|true_computation|false_computation)=%?([\w.-]+)")
BODY = re.compile(r"body=%?([\w.-]+)")
BRANCHES = re.compile(r"branch_computations=\{(.*?)\}")
LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


@dataclass(frozen=True)
class Collective:
    """One collective of a program."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes its groups run along."""
    loops: int
    """Loops around it: 0 is once a step."""
    arrays: int
    """How many arrays it moves; the compiler joins neighbours."""
    elements: int
    """Numbers in its results on one device."""


def collectives(text: str, mesh: Mesh) -> Iterator[Collective]:
    """Those of a compiled program's text, for devices in the order of `mesh`."""
    bodies, entry = _computations(text)
    groups = _axes_by_groups(mesh)
    depths = {entry: 0}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        for line in bodies[name]:
            inner = [(called, 0) for called in CALLED.findall(line)] + [(body, 1) for body in BODY.findall(line)]
            for branches in BRANCHES.findall(line):
                inner += [(branch.strip(" %"), 0) for branch in branches.split(",")]
            for called, more in inner:
                if called in bodies and depths[name] + more > depths.get(called, -1):
                    depths[called] = depths[name] + more
                    waiting.append(called)
    for name, depth in depths.items():
        for line in bodies[name]:
            if found := COLLECTIVE.search(line):
                result, kind, operands = found.groups()
                axes = _named(line, mesh) or groups[_groups(line, mesh.size)]
                shapes = re.findall(r"\w+\[([\d,]*)\]", result)
                elements = sum(int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes)
                if any(mesh.shape[axis] > 1 for axis in axes):
                    yield Collective(kind, axes, depth, operands.count("%"), elements)


def counts(found: list[Collective]) -> list[str]:
    """Lines "in 2 loops: all-gather over tensor: 3 arrays, 4,096 numbers", sorted."""
    arrays: Counter[tuple[int, str, str]] = Counter()
    elements: Counter[tuple[int, str, str]] = Counter()
    for one in found:
        place = one.loops, one.kind, "+".join(one.axes)
        arrays[place] += one.arrays
        elements[place] += one.elements
    return [
        f"in {place[0]} loops: {place[1]} over {place[2]}: {arrays[place]} arrays, {elements[place]:,} numbers"
        for place in sorted(arrays)
    ]


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _named(line: str, mesh: Mesh) -> tuple[str, ...]:
    """Axes where the text names them, as newer compilers do."""
    named = NAMED.search(line)
    if not named:
        return ()
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
    assert sizes == {name: str(size) for name, size in mesh.shape.items()}, f"another mesh: {line}"
    return tuple(name for name in re.findall(r"'(\w+)'", named[2]) if mesh.shape[name] > 1)


def _groups(line: str, devices: int) -> frozenset[tuple[int, ...]]:
    if pairs := PAIRS.search(line):
        return _joined([tuple(map(int, pair)) for pair in re.findall(r"\{(\d+),(\d+)\}", pairs[1])])
    if listed := LISTED.search(line):
        groups = [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
        return frozenset(tuple(sorted(group)) for group in groups or [tuple(range(devices))])
    counted = COUNTED.search(line)
    assert counted, f"a collective whose groups cannot be read: {line}"
    shape, dims = ([int(n) for n in part.split(",")] for part in counted.groups()[:2])
    order = np.arange(np.prod(dims)).reshape(dims)
    if counted[3]:
        order = order.transpose([int(n) for n in counted[3].split(",")])
    return frozenset(tuple(sorted(row)) for row in order.reshape(shape[0], -1).tolist())


def _joined(pairs: list[tuple[int, ...]]) -> frozenset[tuple[int, ...]]:
    """Devices that a permute links, directly or through others."""
    groups: list[set[int]] = []
    for pair in pairs:
        touching = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in touching] + [set(pair).union(*touching)]
    return frozenset(tuple(sorted(group)) for group in groups)


def _axes_by_groups(mesh: Mesh) -> dict[frozenset[tuple[int, ...]], tuple[str, ...]]:
    """Groups of device places -> the axes they run along, for every choice of axes of more than one device."""
    names = [name for name, size in mesh.shape.items() if size > 1]
    places = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    found = {}
    for chosen in product((False, True), repeat=len(names)):
        axes = tuple(name for name, taken in zip(names, chosen, strict=True) if taken)
        along = [mesh.axis_names.index(name) for name in axes]
        rows = np.moveaxis(places, along, range(-len(along), 0)) if along else places[..., None]
        size = int(np.prod([mesh.shape[name] for name in axes]))
        found[frozenset(tuple(sorted(row)) for row in rows.reshape(-1, size).tolist())] = axes
    return found
