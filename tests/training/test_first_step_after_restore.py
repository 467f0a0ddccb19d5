"""Buffers of a restored state: the first step reuses them, and so does the step after a save."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint import array_serialization, manifest
from megajax.checkpoint.checkpoint_manager import CheckpointManager
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.zarr_reader import StoredArrays
from megajax.config import load
from megajax.job.notebook import set_up
from megajax.training.session import Parts, Run
from megajax.training.state import TrainState, own_buffers


def buffers(state: Any) -> dict[str, list[int]]:
    """Address of each shard, by the name of the array."""
    leaves = {name: leaf for name, leaf in array_serialization.named_leaves(state).items() if leaf.size}
    return {name: [s.data.unsafe_buffer_pointer() for s in leaf.addressable_shards] for name, leaf in leaves.items()}


def share_of(names: set[str], state: Any) -> float:
    """Fraction of the bytes of a state in these arrays."""
    sizes = {name: leaf.nbytes for name, leaf in array_serialization.named_leaves(state).items()}
    return sum(sizes[name] for name in names) / sum(sizes.values())


def stored_and_read(tmp_path: Path) -> Any:
    """A start from a checkpoint of a fresh state, without the checks of a resume."""

    def start(parts: Parts, like: TrainState) -> TrainState:
        fresh = parts.program.fresh_state()()
        array_serialization.start_writing(tmp_path / "arrays", array_serialization.flatten(fresh)).result()
        manifest.complete_step(tmp_path)
        return array_serialization.read(StoredArrays(tmp_path), like)

    return start


def restored(tmp_path: Path, *layout: str) -> Run:
    (tmp_path / "run").mkdir()
    cfg = load("llama3.py:debug", f"run_dir={tmp_path / 'run'}", "steps=3", *layout)
    return set_up(cfg, start=stored_and_read(tmp_path))


def check_first_step(run: Run) -> None:
    before, leaves = buffers(run.state), array_serialization.named_leaves(run.state)
    for _ in run.steps(1):
        pass
    after = buffers(run.state)
    assert all(leaf.is_deleted() for leaf in leaves.values())
    assert share_of({name for name in after if after[name] == before[name]}, run.state) == 1


def test_the_first_step_after_a_restore_reuses_every_buffer(tmp_path: Path) -> None:
    """Arrays of this layout were once donated as restored, without a warning, and no buffer was reused."""
    check_first_step(restored(tmp_path, "parallel.data_sharding=fsdp", "model.stack.repeats=1"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [("parallel.pipeline=2", "parallel.tensor=2", "parallel.data_sharding=zero1"), ("optimizer.offload=0.5",)]
)
def test_other_layouts_reuse_them_too(layout: tuple[str, ...], tmp_path: Path) -> None:
    run = restored(tmp_path, *layout)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(run.state)}
    if "pinned_host" not in kinds:
        check_first_step(run)
        return
    # Moments in host memory are copied once; those on the device are reused.
    before = buffers(run.state)
    host = {
        name
        for name, leaf in array_serialization.named_leaves(run.state).items()
        if leaf.sharding.memory_kind == "pinned_host"
    }
    for _ in run.steps(1):
        pass
    after = buffers(run.state)
    assert host and all(after[name] == before[name] for name in after.keys() - host)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))


def from_host(shape: tuple[int, ...], spec: P, value: float) -> jax.Array:
    array = np.full(shape, value, np.float32)
    return jax.make_array_from_callback(shape, NamedSharding(mesh(), spec), lambda index: array[index])


def test_copies_are_bitwise_equal_and_take_the_memory_of_one_array(monkeypatch: pytest.MonkeyPatch) -> None:
    n = jax.device_count()
    state = {
        "large": from_host((n * 4096,), P("data"), 1.5),
        "replicated": from_host((2048,), P(), np.nan),
        "small": [from_host((n * 8,), P("data"), number) for number in range(20)],
        "scalar": from_host((), P(), 3),
    }
    leaves = jax.tree.leaves(state)
    expected = [np.asarray(leaf).tobytes() for leaf in leaves]
    ready, copied = jax.block_until_ready, []

    def block_until_ready(group: list[jax.Array]) -> list[jax.Array]:
        copied.append(sum(leaf.addressable_shards[0].data.nbytes for leaf in group))
        assert sum(not leaf.is_deleted() for leaf in leaves) == len(leaves) - sum(groups)
        groups.append(len(group))
        return ready(group)

    groups: list[int] = []
    monkeypatch.setattr(jax, "block_until_ready", block_until_ready)
    copies = own_buffers(state)
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(copies)] == expected
    assert all(leaf.is_deleted() for leaf in leaves)
    # The largest array, the next one and the rest; none has more bytes on a device than the largest.
    assert copied == [4 * 4096, 4 * 2048 + 20 * 4 * 8 + 4]
    for old, new in zip(leaves, jax.tree.leaves(copies), strict=True):
        assert old.sharding == new.sharding


def test_arrays_in_host_memory_stay() -> None:
    array = jnp.arange(jax.device_count() * 4.0)
    state = [
        jax.device_put(array, NamedSharding(mesh(), P("data"), memory_kind=kind)) for kind in ("pinned_host", None)
    ]
    host, device = own_buffers(state)
    assert host is state[0] and device is not state[1] and state[1].is_deleted()


def test_a_finished_save_keeps_no_copy_and_pins_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, Orbax's copy is the array's own memory, so a step could not reuse it while a copy is kept.

    On GPUs, Orbax's documented default is pinned memory, which the process would keep until its end.
    """
    kinds = []
    put = jax.device_put

    def device_put(x: Any, device: Any = None, **settings: Any) -> Any:
        kinds.append(getattr(device, "memory_kind", None))
        return put(x, device, **settings)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_put", device_put)
    sharding = NamedSharding(mesh(), P("data"))
    state = jax.jit(lambda: {"a": jnp.arange(8192.0), "b": jnp.ones(8192)}, out_shardings=sharding)()
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with CheckpointManager(CheckpointConfig(), tmp_path / "checkpoints") as manager:
        for number in (1, 2):
            manager.save(number, state)
            manager.wait()
            before = buffers(state)
            state = jax.block_until_ready(step(state))
            assert buffers(state) == before
    assert "pinned_host" not in kinds
