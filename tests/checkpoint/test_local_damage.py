"""One of two processes finds damage in its local checkpoint: both use another copy, or both use the step before."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from local_sets import damage, pack_of
from peer_threads import ThreadPeers, together

from megajax.checkpoint import verified_reads
from megajax.checkpoint.config import LocalConfig
from megajax.checkpoint.local import local_checkpoints
from megajax.checkpoint.local.local_checkpoints import LocalCheckpoints
from megajax.checkpoint.local.remote_shards import Members, RemoteSet
from megajax.checkpoint.local.shard_set import LocalSet, SetInfo, SetWriter
from megajax.checkpoint.pack_writer import copy_to_host
from megajax.checkpoint.reader import DamagedStep
from megajax.checkpoint.zarr_reader import StoredArrays

ROWS = slice(0, 4), slice(4, 8)
"""The rows that each process has."""

SHARDING = jax.sharding.NamedSharding(
    jax.sharding.Mesh(np.array(jax.devices()[:2]), ("a",)), jax.sharding.PartitionSpec("a")
)


def values(step: int) -> np.ndarray:
    return np.arange(32, dtype=np.float32).reshape(8, 4) + 100 * step


def write(folder: Path, step: int, process: int, *, replica: bool) -> LocalSet:
    """The set of a process: its rows, and a replica of the other process's rows."""
    writer, parts = SetWriter(folder / f"{step:08d}.saving"), [process, 1 - process][: 1 + replica]
    descriptions, shards = copy_to_host({"w": jax.device_put(values(step), SHARDING)}, once=False)
    for part in parts:
        shard = "w", (ROWS[part], slice(0, 4))
        writer.append(part, descriptions, [(shard, shards[shard])])
    writer.finish(
        SetInfo(
            step=step, save=f"a-{step}", process=process, attempt="a", processes=2, parts=tuple(parts),
            meta={"step": step},
        )
    )  # fmt: skip
    return writer.rename(folder / f"{step:08d}")


class Outcome(NamedTuple):
    """What came of the start of a process."""

    steps: list[int | None]
    """Steps that it chose; the last one was restored."""
    value: np.ndarray | None
    reasons: list[str]
    """Why it skipped steps."""
    served: list[int]
    """The steps that it still has."""


@pytest.fixture
def restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Outcome]]:
    """restored(harm, replicas=...): two processes save steps 1 and 2, `harm` is called in each, and they restore."""
    current = threading.local()
    monkeypatch.setattr(local_checkpoints, "Peers", lambda: current.peers)
    (tmp_path / "shared").mkdir()
    like = {"w": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=SHARDING)}

    def run(harm: Callable[[LocalCheckpoints], Any], *, replicas: bool = True) -> list[Outcome]:
        def process(peers: ThreadPeers) -> Outcome:
            current.peers = peers
            with LocalConfig(every=1, folder=tmp_path / "node").build(tmp_path / "shared") as local:
                for step in (1, 2):
                    local.serve(write(local.folder, step, peers.process, replica=replicas))
                harm(local)
                steps, reasons = [], []
                while True:
                    steps.append(local.newest_intact())
                    reasons += [skipped.reason for skipped in local.skipped]
                    try:
                        tree, meta = ({}, {}) if steps[-1] is None else local.restore(steps[-1], like)
                    except DamagedStep:
                        continue
                    assert meta.get("step") == steps[-1]
                    served = sorted(one.info.step for one in local.served.values())
                    peers.agree()  # nobody closes its server before all have read
                    return Outcome(steps, np.asarray(tree["w"]) if tree else None, reasons, served)

        outcomes = together(2, process)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            assert outcome.steps == outcomes[0].steps and outcome.reasons == outcomes[0].reasons
            if outcome.value is not None:
                np.testing.assert_array_equal(outcome.value, values(outcome.steps[-1]))
        return outcomes

    return run


def harm_files(*damaged: tuple[int, str]) -> Callable[[LocalCheckpoints], None]:
    """Flips a bit in these files of step 2: (process, name)."""

    def harm(local: LocalCheckpoints) -> None:
        for process, name in damaged:
            if process == local.peers.process:
                damage(local.folder / "00000002" / name)

    return harm


@pytest.mark.parametrize("replicas", [True, False])
def test_each_shard_is_read_once_and_once_more_for_a_process_without_a_copy(restored, monkeypatch, replicas):
    read, real = Counter[tuple[str, str]](), verified_reads.read_into

    def counted(folder: Any, name: str, target: np.ndarray, start: int) -> int:
        if name.endswith(".bin"):
            read[folder.parent.name if isinstance(folder, Path) else "remote", name] += 1
        return real(folder, name, target, start)

    connections, connect = list[str](), Members.read_from

    def connected(self: Members, process: int, set_id: str) -> RemoteSet:
        connections.append(set_id)
        return connect(self, process, set_id)

    monkeypatch.setattr(verified_reads, "read_into", counted)
    monkeypatch.setattr(Members, "read_from", connected)
    assert [outcome.steps for outcome in restored(lambda local: None, replicas=replicas)] == [[2], [2]]
    assert sorted(connections) == ([] if replicas else ["a-2/0", "a-2/1"])
    held = {(process, part) for process in (0, 1) for part in (0, 1) if replicas or part == process}
    local = {(f"process_{process}", pack_of(part)): 1 for process, part in held}
    assert read == local | ({} if replicas else {("remote", pack_of(part)): 1 for part in (0, 1)})


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("name", [pack_of(0), pack_of(1)])
def test_both_processes_use_the_intact_copy_of_a_damaged_shard(restored, capfd, process, name):
    outcomes = restored(harm_files((process, name)))
    assert [outcome.steps for outcome in outcomes] == [[2], [2]]
    assert outcomes[process].served == [1] and outcomes[1 - process].served == [1, 2]
    stderr = capfd.readouterr().err
    assert stderr.count("removed the local checkpoint") == 1
    assert f"process_{process}/00000002, which is damaged: {name}: sha256" in stderr


def test_the_intact_shard_of_a_damaged_set_is_used(restored):
    outcomes = restored(harm_files((0, pack_of(0)), (1, pack_of(1))))
    assert [(outcome.steps, outcome.served) for outcome in outcomes] == [([2], [1])] * 2


@pytest.mark.parametrize(
    ("damaged", "replicas"), [(((0, pack_of(0)), (1, pack_of(0))), True), (((1, pack_of(1)),), False)]
)
def test_without_an_intact_copy_both_processes_use_the_step_before(restored, damaged, replicas):
    outcomes = restored(harm_files(*damaged), replicas=replicas)
    assert [outcome.steps for outcome in outcomes] == [[2, 1], [2, 1]]
    (reason,) = outcomes[0].reasons
    assert "has no intact copy" in reason
    assert all(f"on process {process}: {name}: sha256" in reason for process, name in damaged)
    harmed = {process for process, _ in damaged}
    assert [outcome.served for outcome in outcomes] == [[1] if process in harmed else [1, 2] for process in (0, 1)]


def test_shards_that_no_process_needs_are_verified_too(restored, capfd):
    """A set that process 0 adopted, with shards that are also in its own set."""

    def take_over(local: LocalCheckpoints) -> None:
        if local.peers.process == 0:
            (folder := local.store.path / "process_9").mkdir()
            taken = write(folder, 2, 0, replica=True)
            local.serve(LocalSet(taken.path, taken.arrays, replace(taken.info, process=9)))
            damage(taken.path / pack_of(0))

    outcomes = restored(take_over)
    assert [(outcome.steps, outcome.served) for outcome in outcomes] == [([2], [1, 2])] * 2
    stderr = capfd.readouterr().err
    assert stderr.count("removed the local checkpoint") == 1 and "process_9/00000002, which is damaged" in stderr


def without_set(local: LocalCheckpoints) -> None:
    """Process 0 has lost step 2."""
    if local.peers.process == 0:
        local.drop(local.served["a-2/0"])


def test_a_set_damaged_only_in_transfer_is_kept(restored, monkeypatch, capfd):
    read = RemoteSet.read

    def flipped(self: RemoteSet, name: str, *size: int) -> bytes:
        received = bytearray(read(self, name, *size))
        received[3] ^= name.endswith(".bin")
        return bytes(received)

    monkeypatch.setattr(RemoteSet, "read", flipped)
    outcomes = restored(without_set)
    assert [outcome.steps for outcome in outcomes] == [[2, 1], [2, 1]]
    assert outcomes[1].served == [1, 2]
    assert "process_1/00000002 is intact, but was damaged when it was read: on process 1" in capfd.readouterr().err


@pytest.mark.parametrize("late", [False, True])
def test_sets_of_a_process_that_does_not_answer_are_kept(restored, monkeypatch, late):
    read = RemoteSet.read

    def silent(*arguments: Any) -> Any:
        if late and not arguments[1].endswith(".bin"):
            return read(*arguments)
        raise ConnectionError("no connection to 10.0.0.2:40000: timed out")

    monkeypatch.setattr(RemoteSet, "read" if late else "__init__", silent)
    outcomes = restored(without_set)
    assert [outcome.steps for outcome in outcomes] == [[2, 1] if late else [1]] * 2
    assert "no connection to 10.0.0.2:40000" in outcomes[1].reasons[0] and outcomes[1].served == [1, 2]


def test_sets_without_all_shards_of_an_array_are_skipped(restored):
    def without_shard(local: LocalCheckpoints) -> None:
        complete = local.served[f"a-2/{local.peers.process}"]
        entries = {name: entry for name, entry in complete.arrays.files.entries.items() if "process_1/" not in name}
        local.serve(LocalSet(complete.path, StoredArrays(complete.path, entries), complete.info))

    outcomes = restored(without_shard)
    assert [outcome.steps for outcome in outcomes] == [[2, 1], [2, 1]]
    assert "w [(4, 8), (0, 4)] has no intact copy" in outcomes[0].reasons[0]
