"""Collectives of the compiled train step: the compiler may gather silently and still be right, so they are counted.

Compiled for CPU devices, whose compiler leaves an all-reduce and a slice where a GPU's makes a reduce-scatter, and sums
the gradients of one activation after reducing each.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
import pytest

from megajax.config import load
from megajax.job.notebook import prepare
from megajax.mesh.config import ParallelConfig
from megajax.planning.compiled.hlo import Collective, read
from megajax.training.config import BatchConfig
from megajax.training.session import Parts

LAYOUTS = {
    "zero1": ParallelConfig(data=2, tensor=2, sequence=True, data_sharding="zero1"),
    "fsdp": ParallelConfig(data=2, tensor=2, sequence=True, data_sharding="fsdp"),
    "zero1_groups": ParallelConfig(data=4, data_sharding="zero1", shards=2),
    "fsdp_groups": ParallelConfig(data=4, data_sharding="fsdp", shards=2),
}
LOCKED = "0.12.0.1"
"""The version in uv.lock."""
MICROBATCHES, ROWS, LENGTH = 3, 1, 64
STEP, MICROBATCH, LAYER = 0, 1, 2
"""Loops around a collective: none, over microbatches, and within it over layers (or chunks of the loss)."""


def _parts(layout: str) -> Parts:
    cfg = load("llama3.py:debug")
    parallel = LAYOUTS[layout]
    size = MICROBATCHES * ROWS * parallel.replicas(4)
    cfg = cfg.but(
        parallel=parallel,
        batch=BatchConfig(global_size=size, micro_size=ROWS),
        model=replace(cfg.model, sequence_length=LENGTH, loss_chunk=16),
    )
    return prepare(cfg, jax.devices()[:4])


def _compiled(parts: Parts) -> str:
    step: Any = parts.program.train_step
    with jax.set_mesh(parts.program.mesh):
        return step.lower(parts.program.state_like(), parts.program.batch_like()).compile().as_text()


def _over(axis: str, actual: list[Collective]) -> dict[tuple[int, str], int]:
    """(loops, kind) -> arrays moved over a mesh axis."""
    moved: dict[tuple[int, str], int] = {}
    for collective in actual:
        if axis in collective.groups.axes:
            place = len(collective.place.path), collective.kind
            moved[place] = moved.get(place, 0) + collective.arrays
    return moved


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


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow) if name == "zero1_groups" else name for name in LAYOUTS]
)
def test_collectives_of_a_step(layout: str, golden: Callable[[str, str], None]) -> None:
    parts = _parts(layout)
    every = read(_compiled(parts), parts.program.mesh.shape).collectives
    actual = [
        collective
        for collective in every
        if len(collective.place.path) > STEP or collective.elements > collective.arrays
    ]
    # Stacked gains are too small to be gathered layer by layer.
    stacked = sum("layer" in spec.axes and len(spec.axes) > 2 for spec in parts.program.declared.values())
    unstacked = len(parts.program.declared) - stacked
    if parts.cfg.parallel.data_sharding == "zero1":
        # One gather and one reduction of each weight per step, for any number of microbatches.
        weights = stacked + unstacked
        assert _over("data", actual) == {(STEP, "all-gather"): weights, (STEP, "reduce-scatter"): weights}
    else:
        # A layer's matrices twice per microbatch (the backward pass gathers them again), the others once per step.
        assert _over("data", actual) == {
            (STEP, "all-gather"): unstacked,
            (STEP, "reduce-scatter"): unstacked,
            (LAYER, "all-gather"): 2 * stacked,
            (LAYER, "reduce-scatter"): stacked,
        }
    # Between groups, one sum of each gradient per step.
    groups = parts.program.mesh.shape["replica"]
    assert _over("replica", actual) == ({(STEP, "all-reduce"): stacked + unstacked} if groups > 1 else {})
    assert all(len(collective.groups.axes) == 1 for collective in actual), "a collective over two axes at once"
    assert not {"all-to-all", "collective-permute"} & {collective.kind for collective in actual}
    if jax.__version__ != LOCKED:
        pytest.skip(f"the whole list is kept for jax {LOCKED}; this is {jax.__version__}")
    sizes = " x ".join(f"{axis} {size}" for axis, size in parts.program.mesh.shape.items() if size > 1)
    lines = [f"{sizes}, {layout}; sums of scalars once a step left out", *counts(actual)]
    golden(f"collectives_{layout}", "\n".join(lines) + "\n")
