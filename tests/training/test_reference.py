"""Files of a reference model's log-probabilities, and the checksum of its weights."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_runs import build_program, llama
from user_errors import user_error

from megajax.mesh.config import ParallelConfig
from megajax.processes.peers import Peers
from megajax.training.reference import ScoresFile, ScoresOrigin, intact_rows, record, weights_checksum

ORIGIN = ScoresOrigin("data", 3, "float32", "0123456789abcdef")
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def opened(folder: Path, origin: ScoresOrigin = ORIGIN, rows: int = 4) -> ScoresFile:
    """The store, as the next start finds it."""
    store = ScoresFile(folder, origin, rows, Peers("test"))
    store.load()
    return store


def test_an_interrupted_file_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """The last record may be cut, or damaged; the file has its name only when it is complete."""
    store = opened(tmp_path)
    store.add(ROWS[:2])
    assert opened(tmp_path).stored == 2 and not store.path.exists()
    (part,) = tmp_path.iterdir()
    part.write_bytes(part.read_bytes()[:-1])
    second = opened(tmp_path)
    assert second.stored == 1
    second.add(ROWS[1:4])
    assert second.complete and sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".scores"]
    third = opened(tmp_path)
    assert third.complete
    np.testing.assert_array_equal(third.scores, ROWS)


def test_a_damaged_file_is_computed_again(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add(ROWS)
    data = bytearray(store.path.read_bytes())
    data[20] ^= 1
    assert len(intact_rows(bytes(data), 4, 3)) == 1
    store.path.write_bytes(bytes(data))
    again = opened(tmp_path)
    assert again.stored == 0
    again.add(ROWS)
    assert opened(tmp_path).complete
    assert b"".join(map(record, ROWS)) == store.path.read_bytes()


def test_each_origin_has_its_own_file(tmp_path: Path) -> None:
    opened(tmp_path).add(ROWS)
    for change in ({"data": "other"}, {"length": 6}, {"compute": "bfloat16"}, {"weights": "fedcba9876543210"}):
        other = opened(tmp_path, ORIGIN._replace(**change))
        assert other.stored == 0 and f"has other {next(iter(change))}" in other.others()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with user_error():
        ScoresFile(tmp_path / "file" / "folder", ORIGIN, 4, Peers("test")).add(ROWS)


def test_the_checksum_depends_on_every_bit_and_on_no_layout() -> None:
    declared = build_program(llama(), ParallelConfig(data=1), microbatches=1).declared
    path = next(path for path, spec in declared.items() if spec.layers and len(spec.shape) > 2)
    spec = dataclasses.replace(declared[path], layers=(0, 1, 2, 3))
    weights = np.random.default_rng(0).normal(size=(4, 8, 6)).astype(np.float32)
    expected = weights_checksum({path: jnp.asarray(weights)}, {path: spec})
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    placed = jax.device_put(weights, NamedSharding(mesh, PartitionSpec("a", "b")))
    assert weights_checksum({path: placed}, {path: spec}) == expected
    # In the order of two stages, with a row of padding in each.
    stages = np.concatenate([weights[[2, 0]], weights[:1] * 0, weights[[3, 1]], weights[:1] * 0])
    moved = dataclasses.replace(spec, layers=(2, 0, -1, 3, 1, -1))
    assert weights_checksum({path: jnp.asarray(stages)}, {path: moved}) == expected
    assert weights_checksum({path: jnp.asarray(stages[::-1].copy())}, {path: moved}) != expected
    bits = weights.view(np.uint32).copy()
    bits[3, 7, 5] ^= 1
    assert weights_checksum({path: jnp.asarray(bits.view(np.float32))}, {path: spec}) != expected
