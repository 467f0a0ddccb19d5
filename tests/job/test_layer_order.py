"""Stacked arrays from one order of rows to another: values, layouts and memory."""

from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_runs import ONE, Program, build_program, llama, start

from megajax.job.start import layer_order
from megajax.job.start.layer_order import like_stored, reorder
from megajax.layers.block.config import BlockConfig
from megajax.layers.stack.config import SegmentsConfig
from megajax.mesh.config import ParallelConfig
from megajax.optim.config import AdamWConfig
from megajax.training.state import TrainState

PIPELINE = ParallelConfig(pipeline=4, data=2, data_sharding="zero1")


@cache
def made(repeats: int, parallel: ParallelConfig = PIPELINE, offload: float = 0.0) -> Program:
    whole = build_program(llama(repeats=repeats), parallel, microbatches=4)
    return Program.of(replace(whole.cfg, optimizer=AdamWConfig(offload=offload)), whole.mesh)


def restored(run: Program, stored: tuple[int, ...]) -> TrainState:
    """A state of random numbers, as restored from a checkpoint with rows in that order."""
    like = like_stored(run.state_like(), run.arrays, lambda _: stored)
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jax.device_put(rng.normal(size=leaf.shape).astype(leaf.dtype), leaf.sharding), like
    )


def on_devices(leaf: Any) -> int:
    """Bytes of an array on all devices together."""
    return leaf.sharding.num_devices * prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def held(tree: Any) -> int:
    return sum(map(on_devices, jax.tree.leaves(tree)))


def live() -> int:
    return sum(on_devices(leaf) for leaf in jax.live_arrays())


def test_rows_that_the_stages_do_not_divide_move_to_their_places():
    """Moments in host memory; six layers on four stages have two rows of padding."""
    stored = (5, 4, 3, 2, 1, 0)
    run = made(6, offload=1.0)
    wanted, like = run.partition.order(), run.state_like()
    assert sorted(wanted) == [-1, -1, *range(6)]
    state = restored(run, stored)
    before = jax.tree.map(np.asarray, state)
    moved = reorder(state, like, run.arrays, lambda _: stored, run.partition.order_of)
    parts = {"params": (before.params, moved.params)} | {
        name: (before.optimizer[name], moved.optimizer[name]) for name in ("first_moment", "second_moment")
    }
    for name, (old, new) in parts.items():
        for path, array in new.items():
            spec, expected = run.declared[path], old[path]
            if spec.layers:
                row = {repeat: expected[place] for place, repeat in enumerate(stored)}
                expected = np.stack([row[repeat] if repeat >= 0 else np.zeros_like(row[0]) for repeat in wanted])
            np.testing.assert_array_equal(array, expected, err_msg=f"{name} {path}")
    assert jax.tree.map(lambda x: x.sharding, moved) == jax.tree.map(lambda x: x.sharding, like)


def test_memory_holds_at_most_the_state_and_one_array_twice(monkeypatch):
    """`unsharded_rows` is called before each array is read: by then, each array before it exists once."""
    run = made(8)
    stored, wanted, like = tuple(reversed(range(8))), run.partition.order(), run.state_like()
    others = live()
    state = restored(run, stored)
    whole, seen, unsharded_rows = held(state), [], layer_order.unsharded_rows

    def watched(*arguments: Any) -> NamedSharding:
        seen.append(live() - others)
        return unsharded_rows(*arguments)

    monkeypatch.setattr(layer_order, "unsharded_rows", watched)
    moved = reorder(state, like, run.arrays, lambda _: stored, lambda _: wanted)
    stacked = [path for path, spec in run.declared.items() if spec.layers]
    assert len(seen) == 3 * len(stacked) and max(seen) == whole == held(moved)
    assert all(state.params[path].is_deleted() for path in stacked)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(moved))


def test_rows_that_the_stages_do_not_divide_leave_each_device_its_share():
    """Seven rows over four stages: instead, the embedding dimension is sharded over four times as many devices."""
    run = made(8)
    like = run.state_like()
    there = like_stored(like, run.arrays, lambda _: tuple(range(7)))
    for path, spec in run.declared.items():
        if not spec.layers:
            continue
        assert on_devices(there.params[path]) * 8 == on_devices(like.params[path]) * 7, path
        assert on_devices(there.optimizer["first_moment"][path]) * 8 == on_devices(like.params[path]) * 7, path
    assert there.params["stack.blocks.0.mixer.query"].sharding.spec == PartitionSpec(
        None, ("data", "expert", "context", "pipeline"), "tensor", None
    )


def test_no_device_holds_a_whole_array():
    """Rows move between stages by an all-to-all; the compiler's own way is to gather all of them."""
    run = made(8)
    target = run.state_like().params["stack.blocks.0.mlp.up"]
    shape = (8, *target.shape[1:])
    source, none = np.arange(8, dtype=np.int32)[::-1], np.zeros(8, bool)
    place = NamedSharding(run.mesh, target.sharding.spec)
    take = jax.jit(
        lambda leaf: layer_order._gather_rows(leaf, source, none, layer_order.unsharded_rows(place, shape)),
        in_shardings=place,
        out_shardings=place,
    )
    text = take.lower(jax.ShapeDtypeStruct(shape, target.dtype)).compile().as_text()
    assert "all-to-all" in text and "all-gather" not in text


@pytest.mark.slow
def test_rows_of_hybrids_move_to_their_places():
    """Weights that some of seven layers have, on one device and on two stages with two chunks each."""
    (block,) = llama().stack.pattern
    mixer, mlp = BlockConfig(mixer=block.mixer), BlockConfig(mlp=block.mlp)
    letters = {"A": mixer, "B": replace(mixer, dropout=0.1), "-": mlp}
    model = replace(llama(), stack=SegmentsConfig.of([letters[letter] for letter in "A-B-A-A"]))
    one, cut = (
        build_program(model, parallel, microbatches=4)
        for parallel in (ONE, ParallelConfig(pipeline=2, virtual_stages=2, data=1))
    )
    like, order = cut.state_like(), one.partition.order_of
    rows = {path: cut.declared[f"stack.blocks.{path}"].layers for path in ("0.mixer.query", "1.mlp.up")}
    assert rows == {"0.mixer.query": (0, 4, -1, 6), "1.mlp.up": (1, 5, 3, -1)}, "stage 0 has layers 0, 1, 4 and 5"
    there = like_stored(like, cut.arrays, order)
    drawn = start(one).params
    given = {path: jax.device_put(drawn[path], leaf.sharding) for path, leaf in there.params.items()}
    moved = reorder({"params": given}, {"params": like.params}, cut.arrays, order, cut.partition.order_of)
    for path, expected in start(cut).params.items():
        np.testing.assert_array_equal(moved["params"][path], expected, err_msg=path)
