"""Batches are the same for every layout and number of processes, and after every resume."""

import errno
import threading
import time
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from user_errors import user_error
from waiting import wait_until

from megajax.batch import Leaf, batch_schema
from megajax.config.errors import UserError
from megajax.data.rows.balancing import CAUSAL, Balancing, RowWork, balance_rows
from megajax.data.rows.config import LoaderConfig
from megajax.data.rows.loader import Loader, LocalRows, read_rows
from megajax.mesh.zigzag_order import SequenceSharding
from megajax.models.decoder.config import text_schema
from megajax.storage.retried_reads import ReadError

pytestmark = pytest.mark.smoke

S, G, M = 8, 16, 2
AXES = ("pipeline", "data", "expert", "context", "tensor")
SPEC = PartitionSpec(None, ("data", "expert"), "context")
LEAVES = {name: leaf.dtype for name, leaf in text_schema(S, 10_000).items()}
SCHEMA = batch_schema(text_schema(S, 10_000), LEAVES)
LAYOUTS = [(1, 8, 1, 1, 1), (1, 2, 2, 1, 2), (2, 2, 1, 2, 1), (1, 1, 1, 1, 8), (2, 1, 2, 2, 1), (1, 1, 1, 8, 1)]


class Numbers:
    """Row i has i·S + position in every leaf; records the rows that are read."""

    def __init__(self, length: int = 200):
        self.length, self.rows_read = length, []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        self.rows_read.append(row)
        return {name: (row * S + np.arange(S)).astype(dtype) for name, dtype in LEAVES.items()}


def layout(sizes: tuple[int, ...]) -> NamedSharding:
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return NamedSharding(jax.sharding.Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 5), SPEC)


def expected(first: int) -> np.ndarray:
    """[M, B, S]: row-major runs of the global batch."""
    return (np.arange(first * S, (first + G) * S)).reshape(M, G // M, S)


def load(sharding: NamedSharding, consumed: int = 0, source: Any = None, **options: Any) -> Loader:
    shardings = dict.fromkeys(LEAVES, sharding) | {"sample": NamedSharding(sharding.mesh, PartitionSpec(*SPEC[:2]))}
    arguments = {"global_size": G, "microbatches": M, "schema": SCHEMA, "shardings": shardings, "consumed": consumed}
    return Loader(source or Numbers(), **(arguments | options))


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_every_layout_gets_the_same_batches(sizes: tuple[int, ...]) -> None:
    sharding = layout(sizes)
    with load(sharding, consumed=16) as loader:
        for first in (16, 32, 48):
            batch, consumed = next(loader)
            assert consumed == first + G
            for name, dtype in LEAVES.items():
                leaf = batch[name]
                assert leaf.dtype == dtype and leaf.sharding == sharding
                np.testing.assert_array_equal(leaf, expected(first))
            assert batch["sample"].dtype == np.uint32 and batch["sample"].shape == (M, G // M)
            np.testing.assert_array_equal(batch["sample"], np.arange(first, first + G).reshape(M, G // M))


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_processes_read_the_rows_of_their_devices(sizes: tuple[int, ...], processes: int, interleaved: bool) -> None:
    """Each process has a run of the devices, or every n-th: their blocks make up the batch, none reads more."""
    sharding, full = layout(sizes), expected(32)
    numbers = full[..., 0] // S
    indices = list(sharding.devices_indices_map(full.shape).values())
    counts = np.zeros(full.shape, np.int32)
    for process in range(processes):
        size = len(indices) // processes
        local_indices = indices[process::processes] if interleaved else indices[process * size : (process + 1) * size]
        source = Numbers()
        rows = LocalRows(local_indices, *full.shape[:2])
        block = read_rows(source, SCHEMA, 32, rows.offsets)
        for index in local_indices:
            np.testing.assert_array_equal(rows.block(block["tokens"], index), full[index])
            np.testing.assert_array_equal(rows.block(block["sample"], index[:2]), numbers[index[:2]])
            counts[index] += 1
        local_rows = {row for index in local_indices for row in numbers[index[:2]].ravel().tolist()}
        assert sorted(source.rows_read) == sorted(local_rows)
    assert (counts > 0).all()


def test_a_resumed_loader_continues_at_the_same_row_also_with_another_batch_size() -> None:
    """The position is the number of rows used: a larger batch continues where the smaller one stopped."""
    sharding = layout((1, 8, 1, 1, 1))
    with load(sharding) as loader:
        batches = [next(loader) for _ in range(3)]
    with load(sharding, consumed=batches[0][1]) as loader:
        for batch, consumed in batches[1:]:
            repeated, after = next(loader)
            assert after == consumed
            np.testing.assert_array_equal(repeated["tokens"], batch["tokens"])
    larger = load(sharding, consumed=48, global_size=2 * G, microbatches=4)
    with larger:
        batch, after = next(larger)
    assert after == 80
    np.testing.assert_array_equal(batch["tokens"], np.concatenate([expected(48), expected(64)]))


def test_a_closed_loader_continues_where_it_stopped() -> None:
    loader = load(layout((1, 1, 1, 1, 8)), config=LoaderConfig(threads=1, prefetch=1))
    next(loader)
    loader.close()
    loader.close()
    batch, _ = next(loader)
    np.testing.assert_array_equal(batch["tokens"], expected(16))
    loader.close()


def test_rows_beyond_the_end_of_the_data_are_an_error() -> None:
    sharding = layout((1, 8, 1, 1, 1))
    with load(sharding, source=Numbers(40)) as loader:
        next(loader)
        next(loader)
        with user_error():
            next(loader)
    with load(sharding, consumed=40, source=Numbers(40)) as finished:
        assert finished.consumed == 40


def test_microbatches_must_divide() -> None:
    with user_error():
        load(layout((1, 1, 1, 1, 1)), microbatches=3)


def test_reading_runs_ahead() -> None:
    """Rows of later batches are read before they are requested."""
    release = threading.Event()

    class Watched(Numbers):
        def __getitem__(self, row: int) -> dict[str, np.ndarray]:
            if row >= 3 * G:
                release.set()
            return super().__getitem__(row)

    with load(layout((1, 8, 1, 1, 1)), source=Watched(), config=LoaderConfig(threads=1, prefetch=4)) as loader:
        next(loader)
        assert release.wait(100)


def test_sample_numbers_wrap_at_32_bits() -> None:
    block = read_rows(Numbers(), SCHEMA, (1 << 32) + 5, np.array([0, 1]))
    assert block["sample"].tolist() == [5, 6]


@pytest.mark.parametrize(
    "row",
    [
        {"tokens": None},
        {"tokens": np.zeros(3, np.int32)},
        {"tokens": np.full(S, 0.5)},
        {"loss_mask": np.full(S, "1")},
        {"labels": np.arange(9_993, 9_993 + S)},
        {"labels": np.full(S, -1)},
    ],
    ids=["missing", "shape", "dtype", "text", "above", "below"],
)
def test_a_row_that_does_not_match_the_schema_is_refused(row: dict[str, Any]) -> None:
    class Wrong(Numbers):
        def __getitem__(self, number: int) -> dict[str, np.ndarray]:
            right = super().__getitem__(number)
            return {name: value for name, value in (right | row).items() if value is not None} if number == 6 else right

    with user_error():
        read_rows(Wrong(), SCHEMA, 0, np.array([2, 6]))


def test_a_class_id_outside_the_range_is_refused_unless_it_does_not_count() -> None:
    schema = {"labels": Leaf("int32", (2,), (None,), below=3, ignored=255)}
    assert read_rows([{"labels": np.array([2, 255])}], schema, 0, np.array([0]))["labels"].tolist() == [[2, 255]]
    with user_error():
        read_rows([{"labels": np.array([7, 255])}], schema, 0, np.array([0]))


def test_integers_of_any_size_are_read_and_a_row_must_be_a_mapping() -> None:
    schema = {"label": Leaf("uint8")}
    assert read_rows([{"label": 3}], schema, 0, np.array([0]))["label"].tolist() == [3]
    with user_error():
        read_rows([[3]], schema, 0, np.array([0]))


def test_batches_of_steps_that_grow() -> None:
    """Every size is a multiple of microbatches of 8 rows; the position determines the next size."""
    sizes = {0: 8, 8: 8, 16: 16, 32: 24, 56: 24}
    sharding = layout((1, 8, 1, 1, 1))

    def batches(consumed: int, count: int) -> list[tuple[tuple[int, int], list[int], int]]:
        with load(sharding, consumed=consumed, size_at=sizes.__getitem__) as loader:
            batches = [next(loader) for _ in range(count)]
        return [(batch["sample"].shape, np.ravel(batch["sample"]).tolist(), after) for batch, after in batches]

    edges = (0, 8, 16, 32, 56)
    every = [(((last - first) // 8, 8), [*range(first, last)], last) for first, last in pairwise(edges)]
    assert batches(0, 4) == every
    assert batches(16, 2) == every[2:]


class Documents(Numbers):
    """Rows of 1 to S documents, which are known without reading."""

    def document_lengths(self, row: int) -> np.ndarray:
        starts = np.flatnonzero(np.random.default_rng(row).random(S) < row % 7 / 7)
        return np.diff(np.union1d(starts, [0]), append=S)

    def work(self, first: int, count: int) -> np.ndarray:
        return np.array([CAUSAL.pairs(self.document_lengths(row)).sum() for row in range(first, first + count)])


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("sizes", [(1, 2, 1, 2, 2), (1, 2, 2, 1, 2), (1, 8, 1, 1, 1)], ids=str)
def test_rows_are_balanced_over_data_groups(sizes: tuple[int, ...], across: bool) -> None:
    """Each row is where `balance_rows` puts it, also after a resume; no process reads the rows of another."""
    sharding, source, balancing = layout(sizes), Documents(), Balancing(RowWork(), across)
    groups = sizes[1] * sizes[2]
    with load(sharding, source=source, balancing=balancing) as loader:
        before, after = loader.imbalance()
        batches = [next(loader)[0] for _ in range(3)]
    assert after.step <= before.step and after.microbatch <= before.microbatch and before.microbatch > 1.01
    for number, batch in enumerate(batches):
        first = number * G
        order = first + balance_rows(source.work(first, G), groups, M, across=across).reshape(M, G // M)
        assert (order != np.arange(first, first + G).reshape(order.shape)).any()
        np.testing.assert_array_equal(batch["sample"], order)
        np.testing.assert_array_equal(batch["tokens"], order[..., None] * S + np.arange(S))
    with load(sharding, consumed=G, source=source, balancing=balancing) as loader:
        for batch in batches[1:]:
            np.testing.assert_array_equal(next(loader)[0]["sample"], batch["sample"])
    with load(sharding, consumed=192, source=source, balancing=balancing) as ended:
        assert ended.imbalance() is None and load(sharding).imbalance() is None


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 4, 1), (1, 2, 1, 4, 1), (1, 1, 1, 4, 2)], ids=str)
@pytest.mark.parametrize("rounds", [0, 1])
def test_processes_hold_parts_of_the_same_rows(sizes: tuple[int, ...], rounds: int, processes: int) -> None:
    """Where context is over processes, each reads full rows, and the blocks of devices equal those of one process."""
    sharding, rows_sharding = layout(sizes), SequenceSharding(4, rounds)
    schema = batch_schema(text_schema(16, 10_000), LEAVES)
    rows = [{name: (row * 16 + np.arange(16)).astype(dtype) for name, dtype in LEAVES.items()} for row in range(G)]
    full = np.stack([row["tokens"] for row in rows]).reshape(M, G // M, 16)
    full = full[..., rows_sharding.places(16)]
    indices = list(sharding.devices_indices_map(full.shape).values())
    size, counts = len(indices) // processes, np.zeros(full.shape, np.int32)
    for process in range(processes):
        local_indices = indices[process * size : (process + 1) * size]
        local = LocalRows(local_indices, M, G // M)
        block = read_rows(rows, schema, 0, local.offsets, rows_sharding)
        for index in local_indices:
            np.testing.assert_array_equal(local.block(block["tokens"], index), full[index])
            counts[index] += 1
    assert (counts == sizes[4]).all()
    if rounds and processes == 4 and sizes == (1, 1, 1, 4, 1):
        assert local.block(block["tokens"], local_indices[0])[0, 0].tolist() == [6, 7, 8, 9], "chunks 3 and 4 of 8"


class Broken(Numbers):
    """Reading row 40 always fails, by default as a disk does."""

    def __init__(self, error: Exception | None = None):
        super().__init__()
        self.error, self.tries = error or OSError(errno.EIO, "Input/output error", "x.bin"), 0

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        if row == 40:
            self.tries += 1
            raise self.error
        return super().__getitem__(row)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    ("error", "expected_type", "message"),
    [
        (None, ReadError, r"row 40 of the data cannot be read .*x.bin: Input/output error \(EIO\)"),
        (UserError("token 7 outside"), UserError, "^token 7 outside"),
    ],
)
def test_an_error_in_a_reading_thread_is_raised_where_its_batch_is_requested(
    threads: int, error: Exception | None, expected_type: type[Exception], message: str
) -> None:
    config = LoaderConfig(threads=threads, prefetch=4, retries=0)
    with load(layout((1, 8, 1, 1, 1)), source=Broken(error), config=config) as loader:
        for first in (0, 16):
            np.testing.assert_array_equal(next(loader)[0]["tokens"], expected(first))
        with pytest.raises(expected_type, match=message):
            next(loader)


def test_a_loader_whose_disk_fails_is_closed_at_once() -> None:
    """A thread that waits for a retry does not delay a run that is asked to stop, and ends."""
    source, threads = Broken(), threading.active_count()
    with load(layout((1, 8, 1, 1, 1)), source=source, config=LoaderConfig(retries=20)) as loader:
        next(loader)
        next(loader)
        assert wait_until(lambda: source.tries > 1)
        started = time.monotonic()
    assert time.monotonic() - started < 60
    assert wait_until(lambda: threading.active_count() <= threads)
