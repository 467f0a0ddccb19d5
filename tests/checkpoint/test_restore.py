"""Restores are bit-exact, on the requested layout."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from user_errors import user_error

from megajax.checkpoint import manifest, verified_reads
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.reader import CheckpointReader
from megajax.config.errors import UserError

pytestmark = pytest.mark.smoke


def mesh_of(data: int, tensor: int):
    return jax.sharding.Mesh(np.array(jax.devices()[: data * tensor]).reshape(data, tensor), ("data", "tensor"))


def random_bits(shape, dtype, seed):
    """Random bit patterns, including NaN payloads and denormals."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return raw.view(dtype).reshape(shape)


def bits(array) -> bytes:
    return np.asarray(array).tobytes()


def state_on(mesh):
    def random_array(seed, dtype, shape, *spec):
        return jax.device_put(random_bits(shape, dtype, seed), NamedSharding(mesh, PartitionSpec(*spec)))

    return {
        "params": {
            "matrix": random_array(0, np.float32, (16, 24), "data", "tensor"),
            "replicated": random_array(1, np.float32, (5, 3)),
            "half": random_array(2, jnp.bfloat16, (8, 16), "tensor", None),
        },
        "optimizer": {
            "counts": random_array(3, np.int32, (8,), "data"),
            "keys": random_array(4, np.uint32, (8, 2), ("data", "tensor")),
        },
        "step": random_array(5, np.int32, ()),
    }


def like_on(mesh, state, *spec):
    def spec_of(leaf):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec[: leaf.ndim]))
        )

    return jax.tree.map(spec_of, state)


def saved(folder, state, meta=None, step=7):
    with CheckpointConfig().build(folder) as manager:
        manager.save(step, state, meta)
    return CheckpointReader(folder)


@pytest.mark.parametrize(
    ("shape", "spec", "block"),
    [
        ((4, 2), None, 64),
        ((4, 2), None, 2**23),
        ((2, 4), ("tensor",), 64),
        ((8, 1), (None, "data"), 64),
        ((1, 1), (), 64),
        ((1, 8), (None, "tensor"), 2**23),
    ],
)
def test_restores_are_bit_exact_on_any_layout(tmp_path, monkeypatch, shape, spec, block):
    """block: bytes that have one hash. Files of several blocks are verified while they are read."""
    monkeypatch.setattr(manifest, "BLOCK_BYTES", block)
    monkeypatch.setattr(verified_reads, "BLOCK_BYTES", block)
    state = state_on(mesh_of(4, 2))
    reader = saved(tmp_path, state)
    if spec is None:
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    else:
        fits = {"matrix": spec, "replicated": (), "half": spec, "counts": spec[:1], "keys": spec[:1], "step": ()}
        like = jax.tree_util.tree_map_with_path(
            lambda path, leaf: like_on(mesh_of(*shape), leaf, *fits[path[-1].key]), state
        )
    restored, _ = reader.restore(7, like)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for before, expected, after in zip(*map(jax.tree.leaves, (state, like, restored)), strict=True):
        assert after.dtype == before.dtype and after.sharding == expected.sharding
        assert bits(after) == bits(before)


def test_meta_comes_back_without_reading_arrays(tmp_path):
    meta = {"config": "steps: 10\n", "consumed_samples": 2**53 + 1, "versions": {"jax": jax.__version__}}
    reader = saved(tmp_path, {"x": jnp.ones(3)}, meta)
    for file in (tmp_path / "00000007" / "arrays").rglob("*"):
        if file.is_file():
            file.unlink()
    assert reader.meta(7) == meta


def test_donating_the_state_after_a_save_does_not_change_the_checkpoint(tmp_path):
    mesh = mesh_of(4, 2)
    before = np.random.default_rng(0).standard_normal((2048, 1024)).astype(np.float32)
    state = {"w": jax.device_put(before, NamedSharding(mesh, PartitionSpec("data", "tensor")))}
    like = like_on(mesh, state, "data")
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: -leaf, tree), donate_argnums=0)
    overwrite(jax.tree.map(jnp.copy, state))
    with CheckpointConfig().build(tmp_path) as manager:
        manager.save(1, state)
        for _ in range(5):
            state = overwrite(state)
        jax.block_until_ready(state)
        manager.wait()
        restored, _ = manager.restore(1, like)
    np.testing.assert_array_equal(np.asarray(restored["w"]), before)


class Moments(NamedTuple):
    count: Any
    mean: dict


def test_arrays_are_matched_by_name_whatever_their_containers(tmp_path):
    state = {"optimizer": (Moments(jnp.int32(3), {"w": jnp.arange(4.0)}), {}), "none": None}
    reader = saved(tmp_path, state)
    like = jax.eval_shape(lambda: state)
    restored, _ = reader.restore(7, like)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    as_dicts = {"optimizer": [{"count": like["optimizer"][0].count, "mean": {"w": like["optimizer"][0].mean["w"]}}]}
    restored, _ = reader.restore(7, as_dicts)
    np.testing.assert_array_equal(restored["optimizer"][0]["mean"]["w"], np.arange(4.0))


def test_arrays_without_elements_are_restored(tmp_path):
    state = {"empty": jnp.zeros((0, 3)), "full": jnp.ones(2)}
    restored, _ = saved(tmp_path, state).restore(7, jax.eval_shape(lambda: state))
    assert restored["empty"].shape == (0, 3) and restored["empty"].dtype == jnp.float32


def test_several_processes_need_shardings(tmp_path, monkeypatch):
    reader = saved(tmp_path, {"a": jnp.ones(2)})
    like = {"a": jax.ShapeDtypeStruct((2,), jnp.float32)}
    assert reader.restore(7, like)[0]["a"].sharding.device_set == {jax.local_devices()[0]}
    monkeypatch.setattr("megajax.checkpoint.array_serialization.jax.process_count", lambda: 2)
    with pytest.raises(ValueError, match="every array to restore needs a sharding"):
        reader.restore(7, like)


def test_differences_are_one_error_with_a_table(tmp_path, capfd):
    reader = saved(
        tmp_path, {"a": jnp.ones((2, 3)), "b": jnp.ones(4, jnp.int32), "c": jnp.ones(1), "same": jnp.ones(2)}
    )
    like = {
        "a": jax.ShapeDtypeStruct((3, 2), jnp.float32),
        "b": jax.ShapeDtypeStruct((4,), jnp.uint32),
        "d": jax.ShapeDtypeStruct((1,), jnp.bfloat16),
        "same": jax.ShapeDtypeStruct((2,), jnp.float32),
    }
    with pytest.raises(UserError) as caught:
        reader.restore(7, like)
    rows = {line.split()[0]: line.split()[1:] for line in str(caught.value).splitlines() if line.startswith("  ")}
    assert rows["a"] == ["shape", "float32[2,", "3]", "float32[3,", "2]"]
    assert rows["b"] == ["dtype", "int32[4]", "uint32[4]"]
    assert rows["c"] == ["extra", "float32[1]", "-"]
    assert rows["d"] == ["missing", "-", "bfloat16[1]"]
    assert "same" not in rows
    assert capfd.readouterr() == ("", "")


def test_the_error_for_a_missing_step_lists_the_existing_ones(tmp_path):
    reader = saved(tmp_path, {"x": jnp.ones(1)}, step=40)
    with user_error():
        reader.restore(41, {})


def test_leaves_that_are_not_arrays_are_refused(tmp_path):
    with CheckpointConfig().build(tmp_path) as manager:
        with pytest.raises(TypeError, match="step"):
            manager.save(1, {"step": 3})
        with pytest.raises(ValueError, match="same dotted name"):
            manager.save(1, {"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)})
        with pytest.raises(ValueError, match="JSON"):
            manager.save(1, {"x": jnp.ones(1)}, {"loss": float("nan")})
        assert manager.steps() == []
        manager.save(1, {"x": jnp.ones(1)})
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["00000001"]
