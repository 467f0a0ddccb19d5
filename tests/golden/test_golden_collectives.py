"""Collectives of the compiled train step: the compiler may gather silently and still be right, so they are counted.

Compiled for CPU devices, whose compiler leaves an all-reduce and a slice where a GPU's makes a reduce-scatter, and sums
the gradients of one activation after reducing each.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import pytest
from collective_counts import counts

from megajax.config import load
from megajax.mesh.config import ParallelConfig
from megajax.planning.program.hlo import Collective, read
from megajax.training.config import BatchConfig
from megajax.training.session import Parts, prepare

LAYOUTS = {
    "zero1": ParallelConfig(data=2, tensor=2, sequence=True, data_sharding="zero1"),
    "fsdp": ParallelConfig(data=2, tensor=2, sequence=True, data_sharding="fsdp"),
}
LOCKED = "0.12.0.1"
"""The version in uv.lock."""
MICROBATCHES, ROWS, LENGTH = 3, 1, 64
STEP, MICROBATCH, LAYER = 0, 1, 2
"""Loops around a place: none, that over microbatches, that over layers (or over chunks of the loss) within it."""


def _parts(layout: str) -> Parts:
    cfg = load("llama3.py:debug")
    size = MICROBATCHES * ROWS * 2
    cfg = cfg.but(
        parallel=LAYOUTS[layout],
        batch=BatchConfig(global_size=size, micro_size=ROWS),
        model=replace(cfg.model, sequence_length=LENGTH, loss_chunk=16),
    )
    return prepare(cfg, jax.devices()[:4])


def _compiled(parts: Parts) -> str:
    step: Any = parts.program.train_step
    with jax.set_mesh(parts.program.mesh):
        return step.lower(parts.program.state_like(), parts.program.batch_like()).compile().as_text()


def _over_data(actual: list[Collective]) -> dict[tuple[int, str], int]:
    """(loops, kind) -> arrays moved over the data axis."""
    moved: dict[tuple[int, str], int] = {}
    for one in actual:
        if "data" in one.groups.axes:
            place = len(one.place.path), one.kind
            moved[place] = moved.get(place, 0) + one.arrays
    return moved


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_of_a_step(layout: str, golden: Callable[[str, str], None]) -> None:
    parts = _parts(layout)
    every = read(_compiled(parts), parts.program.mesh.shape).collectives
    actual = [one for one in every if len(one.place.path) > STEP or one.elements > one.arrays]
    # Of the stacked weights, gains are too small to be gathered layer by layer.
    stacked = sum("layer" in spec.axes and len(spec.axes) > 2 for spec in parts.program.declared.values())
    alone = len(parts.program.declared) - stacked
    if layout == "zero1":
        # One gather and one reduction of each weight a step, whatever the number of microbatches.
        weights = stacked + alone
        assert _over_data(actual) == {(STEP, "all-gather"): weights, (STEP, "reduce-scatter"): weights}
    else:
        # A layer's matrices twice a microbatch (the backward pass gathers them again), the others once a step.
        assert _over_data(actual) == {
            (STEP, "all-gather"): alone,
            (STEP, "reduce-scatter"): alone,
            (LAYER, "all-gather"): 2 * stacked,
            (LAYER, "reduce-scatter"): stacked,
        }
    assert all(len(one.groups.axes) == 1 for one in actual), "a collective over data and tensor at once"
    assert not {"all-to-all", "collective-permute"} & {one.kind for one in actual}
    if jax.__version__ != LOCKED:
        pytest.skip(f"the whole list is kept for jax {LOCKED}; this is {jax.__version__}")
    lines = [f"data 2 x tensor 2, sequence parallel, {layout}; sums of scalars once a step left out", *counts(actual)]
    golden(f"collectives_{layout}", "\n".join(lines) + "\n")
