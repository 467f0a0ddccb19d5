"""The hash of the state: a changed bit in one copy is detected and named on every layout, and nothing else is."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import QUICK, build_program, llama, start

from megajax.job.integrity.replicas import (
    HashedLeaf,
    StateHash,
    array_hash,
    copied_weight,
    group_hashes,
    mismatch_fields,
    mismatch_message,
    mismatches,
    with_flipped_bit,
)
from megajax.mesh.config import ParallelConfig
from megajax.training.program import Program

LAYOUTS = {
    "tensor": ParallelConfig(data=4, tensor=2, data_sharding="replicate"),
    "fsdp": ParallelConfig(data=8, data_sharding="fsdp"),
    "pipeline": ParallelConfig(pipeline=2, data=2, tensor=2, data_sharding="replicate"),
}


@cache
def hashed(layout: str) -> tuple[Program, StateHash]:
    of = build_program(llama(), LAYOUTS[layout], microbatches=3)
    return of, StateHash(of.shardings, of.state_like(), of.mesh, of.optimizer.cfg.offload, QUICK)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flipped_bit_of_one_copy_is_named(layout):
    of, state_hash = hashed(layout)
    state = start(of)
    assert [*mismatches(state_hash(state), state_hash.leaves, of.mesh)] == []
    path = copied_weight(state_hash.leaves, of.mesh)
    copies = next(leaf.copies(of.mesh) for leaf in state_hash.leaves if leaf.path == f"params.{path}")
    device = of.mesh.devices.flat[5]
    damaged = with_flipped_bit(state, path, device)
    odd = [*mismatches(state_hash(damaged), state_hash.leaves, of.mesh)]
    if layout == "fsdp":
        assert copies == 1 and odd == [], "nothing that has no copy can be compared"
        return
    fields = mismatch_fields(odd, of.mesh)
    assert fields["weight"] == f"params.{path}" and fields["arrays"] == 1 and fields["copies"] == copies
    assert device.id in fields["devices"] and fields["processes"] == [0]
    assert (fields["devices"] == [device.id]) == (copies > 2), "of two copies nothing says which is right"
    assert f"device {device.id} (process 0)" in mismatch_message(3, odd, of.mesh)


def test_the_hash_of_a_part_does_not_depend_on_the_layout():
    sums = {}
    for layout in LAYOUTS:
        of, state_hash = hashed(layout)
        sums[layout] = group_hashes(state_hash(start(of)), state_hash.leaves, of.mesh)
    assert all(total == sums["tensor"] for total in sums.values())
    optimizer = {f"optimizer.{name}" for name in ("count", "first_moment", "second_moment")}
    assert sums["fsdp"].keys() == {"counters", "params"} | optimizer


def test_every_bit_and_every_position_counts():
    values = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)

    def digest(array: np.ndarray) -> bytes:
        return np.asarray(array_hash(jnp.asarray(array), [jnp.uint32(0)] * array.ndim)).tobytes()

    unchanged = digest(values)
    digests = {unchanged}
    for bit in range(32):
        flipped = values.copy()
        flipped.view(np.uint32)[2, 3] ^= np.uint32(1 << bit)
        digests.add(digest(flipped))
    assert len(digests) == 33
    swapped = values.copy()
    swapped[1, 2], swapped[2, 1] = values[2, 1], values[1, 2]
    assert digest(swapped) != unchanged, "a sum of floats would be the same"
    assert digest(values[::-1].copy()) != unchanged and digest(np.negative(values)) != unchanged
    zero = np.zeros((3,), np.float32)
    assert digest(zero) != digest(-zero), "equal numbers of other bytes"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn, jnp.int4, jnp.bool_])
def test_narrow_dtypes(dtype):
    values = jnp.asarray([[0, 1, 1], [1, 0, 0]], dtype)
    permuted = jnp.asarray([[0, 1, 1], [1, 0, 1]], dtype)
    first = [jnp.uint32(0)] * 2
    assert np.any(np.asarray(array_hash(values, first)) != np.asarray(array_hash(permuted, first)))


def test_the_majority_is_right():
    mesh = jax.make_mesh((4,), ("data",))
    hashes = np.zeros((4, 2, 2), np.uint32)
    hashes[2, 1] = 7
    leaves = [HashedLeaf("params.cut", (True,), 4), HashedLeaf("params.w", (False,), 4)]
    assert [odd.devices for odd in mismatches(hashes, leaves, mesh)] == [(2,)]
    hashes[0, 1] = 7
    assert [odd.devices for odd in mismatches(hashes, leaves, mesh)] == [(0, 1, 2, 3)]
    hashes[0, 1], hashes[:, 0] = 0, np.arange(8).reshape(4, 2)
    assert [odd.path for odd in mismatches(hashes, leaves, mesh)] == ["params.w"], "shards differ, and may"
