"""The checkpoint that a run starts from, local or shared, and whole runs that do so."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import pytest
import run_folder
import small_jobs
from local_sets import damage, like, pack_of, sets, small

from megajax.checkpoint.config import CheckpointConfig, LocalConfig
from megajax.checkpoint.reader import DamagedStep
from megajax.faults.activity import Activity
from megajax.job.saves.local_saves import LocalSaves, intact_step
from megajax.mesh.config import MESH_AXES, ParallelConfig
from megajax.metrics.event_log import EventLog
from megajax.planning.resolve import resolve
from megajax.storage import disk
from megajax.training.run_config import RunConfig

ONE = dict.fromkeys(MESH_AXES, 1)


def config(folder: Path, **changes: Any) -> RunConfig:
    local = LocalConfig(every=2, folder=folder / "node")
    return small_jobs.run_config(folder / "run", checkpoint=CheckpointConfig(every=3, local=local), **changes)


class Started(NamedTuple):
    kind: str | None
    step: int | None
    value: float | None
    """In the state that was read."""
    events: list[dict[str, Any]]


def attempt(folder: Path, cfg: RunConfig, shared: tuple[int, ...] = (), local: tuple[int, ...] = ()) -> Started:
    """A start, followed by saves of these steps: 100 + step in the shared folder, the step in local ones."""
    events: list[dict[str, Any]] = []

    def event(name: str, **fields: Any) -> None:
        events.append({"event": name, **fields})

    with (
        cfg.checkpoint.build(folder / "run" / "checkpoints") as manager,
        LocalSaves(resolve(cfg), manager, Activity(), event) as saves,
    ):
        kind, step, value = None, None, None
        while value is None and (start := saves.start()) is not None:
            step = start[1]
            kind = "local" if start[0] is saves.local else "shared" if start[0] is manager else "other"
            assert saves.belongs_to_run(start) == (kind != "other")
            with suppress(DamagedStep):  # As a job does, which then chooses again.
                value = float(start[0].restore(step, like(small(0)))[0]["w"][0, 0])
        if shared or local:
            assert saves.local is not None
            saves.local.begin(step or 0, small(0))
            for each in shared:
                manager.save(each, small(100 + each), {"mesh": ONE})
            for each in local:
                saves.local.save(each, small(each), {"mesh": ONE})
        saves.committed()
    return Started(kind, step, value, events)


def shared_step(folder: Path, step: int) -> Path:
    return folder / "run" / "checkpoints" / f"{step:08d}" / "meta.json"


@pytest.mark.parametrize(
    ("shared", "local", "kind", "step"),
    [
        ((), (), None, None),
        ((), (2,), "local", 2),
        ((3,), (2,), "shared", 3),
        ((3,), (2, 4), "local", 4),
        ((4,), (4,), "shared", 4),
        ((3, 6), (4,), "shared", 6),
    ],
)
def test_the_newest_wins(tmp_path, shared, local, kind, step):
    attempt(tmp_path, config(tmp_path), shared, local)
    second = attempt(tmp_path, config(tmp_path))
    assert (second.kind, second.step) == (kind, step)
    assert second.value == (None if step is None else step if kind == "local" else 100 + step)
    sources = [event for event in second.events if event["event"] == "start_source"]
    assert sources == ([{"event": "start_source", "step": step, "kind": "local"}] if kind == "local" else [])


def test_a_damaged_local_checkpoint_falls_back_to_the_next_newest(tmp_path, capfd):
    attempt(tmp_path, config(tmp_path), (3,), (2, 4))
    damage(sets(tmp_path)[-1] / pack_of(0))
    second = attempt(tmp_path, config(tmp_path))
    assert (second.kind, second.step) == ("shared", 3)
    (passed_over,) = [event for event in second.events if event["event"] == "checkpoint_fallback"]
    assert (passed_over["from_step"], passed_over["to_step"], passed_over["kind"]) == (4, 3, "local")
    assert "sha256" in passed_over["why"]
    stderr = capfd.readouterr().err
    assert "the local checkpoint of step 4 can't be used: process 0: w [(0, 4), (0, 4)] has no intact copy" in stderr
    assert "trying the shared folder's checkpoints" in stderr


def test_a_damaged_shared_checkpoint_falls_back_to_a_local_one(tmp_path, capfd):
    attempt(tmp_path, config(tmp_path), (1, 3), (2,))
    damage(shared_step(tmp_path, 3))
    assert attempt(tmp_path, config(tmp_path))[:3] == ("local", 2, 2.0)
    attempt(tmp_path, config(tmp_path), (3,))
    for step in (1, 3):
        damage(shared_step(tmp_path, step))
    assert attempt(tmp_path, config(tmp_path))[:3] == ("local", 2, 2.0)
    assert "The local checkpoint of step 2 is complete and is used" in capfd.readouterr().err


def test_another_mesh_starts_from_the_shared_folder_and_reports_it(tmp_path, capfd):
    attempt(tmp_path, config(tmp_path), (3,), (4,))
    second = attempt(tmp_path, config(tmp_path, parallel=ParallelConfig(data=2)))
    assert (second.kind, second.step) == ("shared", 3)
    assert "local checkpoint of step 4 is not used: it is of the mesh 1 device, this run has data 2" in (
        capfd.readouterr().err
    )
    assert [event["from_step"] for event in second.events if event["event"] == "checkpoint_fallback"] == [4]


def test_a_step_given_by_number_is_the_shared_one(tmp_path):
    cfg = config(tmp_path)
    attempt(tmp_path, cfg, (3,), (4,))
    assert attempt(tmp_path, replace(cfg, checkpoint=replace(cfg.checkpoint, step=3)))[:2] == ("shared", 3)


def test_an_attempt_without_local_checkpoints_deletes_those_before_it(tmp_path):
    cfg = config(tmp_path)
    attempt(tmp_path, cfg, (3,), (6,))
    without = replace(cfg, checkpoint=replace(cfg.checkpoint, local=None))
    with cfg.checkpoint.build(tmp_path / "run" / "checkpoints") as manager:
        with LocalSaves(resolve(without), manager, Activity(), print) as saves:
            start = saves.start()
            assert start is not None and start[1] == 3
            saves.begin(cast(Any, None), 3)
        manager.save(5, small(105), {"mesh": ONE})
    assert attempt(tmp_path, cfg)[:2] == ("shared", 5)


def test_own_local_checkpoints_come_before_another_run(tmp_path):
    cfg = config(tmp_path)
    with CheckpointConfig().build(tmp_path / "other" / "checkpoints") as manager:
        manager.save(9, small(109), {"mesh": ONE})
    loading = replace(cfg, checkpoint=replace(cfg.checkpoint, load=tmp_path / "other"))
    assert attempt(tmp_path, loading, (), (10,))[:2] == ("other", 9)
    assert attempt(tmp_path, loading)[:2] == ("local", 10)


def test_a_failed_local_save_is_an_event_and_no_error(tmp_path, monkeypatch, capfd):
    with config(tmp_path).checkpoint.build(tmp_path / "run" / "checkpoints") as manager:
        events: list[dict[str, Any]] = []
        with LocalSaves(
            resolve(config(tmp_path)), manager, Activity(), lambda name, **more: events.append({"event": name} | more)
        ) as saves:
            saves.start()
            assert saves.local is not None
            saves.local.begin(0, small(0))
            monkeypatch.setattr(disk, "free_bytes", lambda path: 1)
            for step in (2, 4, 8):
                saves.local.save(step, small(step), {})
                saves.local.wait()
                saves.committed()
            # Due on every process, whether or not it knows yet that saves fail; then none of them saves.
            assert saves.due(10)
            saves(SimpleNamespace(state=small(10)), 10)
            assert saves.saved is None
    failed = [event for event in events if event["event"] == "save_failed"]
    assert [event["failures"] for event in failed] == [1, 2, 3] and {event["kind"] for event in failed} == {"local"}
    assert failed[-1]["next"] == "no more local checkpoints in this attempt"
    assert "needs 64 B, 1 B are free (No space left on device); 3 in a row: no more local" in capfd.readouterr().err


class State(NamedTuple):
    step: jax.Array
    w: jax.Array


def test_the_state_saved_when_another_process_is_lost(tmp_path, capfd):
    """One process in the role of the first of two, whose state has no shards of the other."""
    cfg, error, activity = config(tmp_path), jax.errors.JaxRuntimeError("Gloo: Connection closed by peer"), Activity()
    events = tmp_path / "run" / "events.jsonl"
    with (
        cfg.checkpoint.build(tmp_path / "run" / "checkpoints") as manager,
        LocalSaves(
            resolve(cfg), manager, activity, lambda name, **fields: None, record=EventLog(events).append
        ) as saves,
    ):
        assert saves.local is not None
        run: Any = SimpleNamespace(state=State(jnp.asarray(4), jnp.ones((4, 4))))
        saves.local.begin(0, run.state)
        activity.step = 4
        saves.rescue(run, error)  # A run of one process has lost none.
        assert sets(tmp_path) == []
        saves.local.peers.count = 2
        saves.rescue(run, ValueError("of something else"))
        assert sets(tmp_path) == []
        saves.rescue(run, error)
        assert "process 0 saved step 4 in" in (stderr := capfd.readouterr().err) and "1 of 2 processes" in stderr
        assert [path.name for path in sets(tmp_path)] == ["00000004"]
        (line,) = run_folder.events(tmp_path / "run")
        assert (line["kind"], line["parts"], line["whole"]) == ("emergency", [0], False)
        activity.step = 3  # The results of step 4 have not arrived: it may be the one that failed.
        saves.rescue(run, error)
        run.state.w.delete()
        saves.rescue(run, error)
        assert capfd.readouterr().err.count("this state is incomplete and not saved; there is none yet") == 2
        saves.local.peers.count = 1
    assert attempt(tmp_path, cfg).kind is None  # No set has the shards of process 1.


def test_only_a_complete_state_has_a_step():
    state = State(jnp.asarray(7), jnp.ones((4, 4)))
    assert intact_step(state, 10.0) == 7
    state.w.delete()
    assert intact_step(state, 10.0) is None
