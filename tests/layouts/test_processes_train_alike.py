"""Several processes have the losses of one process, step by step, and each resumes from the other's steps.

Real processes over gloo. A further layout is a further line of LAYOUTS.
"""

from pathlib import Path

import gangs
import pytest
from run_folder import saved
from waiting import wait_until

from megajax.config import load
from megajax.job.job import train

LAYOUTS = {
    "zero1": (2, ["--parallel.data=2"]),
    "pipeline": (2, ["--parallel.data=1", "--parallel.pipeline=2"]),
    "groups": (
        4,
        ["--parallel.data=4", "--parallel.data_sharding=fsdp", "--parallel.shards=2", "--model.recompute=full"],
    ),
}
"""Name -> devices, settings."""

RTOL = 1e-5


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[int, float]:
    """Step -> loss of one process with one device."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    assert train(load(gangs.CONFIG).but(run_dir=str(run_dir))) == 0
    return gangs.losses(run_dir)


@pytest.fixture
def start(tmp_path):
    with gangs.started(tmp_path) as begin:
        yield begin


def run(start, processes: int, layout: str, run_dir: Path, *settings: str) -> dict[int, float]:
    """Train with the devices of a layout divided among so many processes. -> step -> loss."""
    devices, parallel = LAYOUTS[layout]
    rows = ["--batch.micro_size=2", f"--devices=cpu:{devices // processes}", f"--run_dir={run_dir}"]
    # Each process chooses the options with a compiler of its own, beside its defaults, and schedules its own program.
    rows += ["--xla=xla_cpu_enable_fast_math=false", "--xla.schedule=costs"]
    command = [*gangs.TRAIN, f"--config={gangs.CONFIG}", *rows, *parallel, *settings]
    gang = start(*(gangs.launcher(processes=processes) if processes > 1 else ()), *command)
    assert gang.wait() == 0, gang.text
    assert f"{devices} x cpu, {processes} process" in gang.text
    return gangs.losses(run_dir)


def check(losses: dict[int, float], expected: dict[int, float]) -> None:
    assert list(losses) == list(expected) == [1, 2, 3, 4, 5, 6]
    assert losses == pytest.approx(expected, rel=RTOL)


@pytest.mark.slow
def test_two_processes_with_one_device_each(start, tmp_path, alone):
    """Process 0 offers metrics, and runs the command of events."""
    observers = [f"--logging.telemetry.prometheus=127.0.0.1:{gangs.free_port()}", "--logging.on_event=cat"]
    check(run(start, 2, "pipeline", tmp_path / "run", "--evaluation.at_end=false", *observers), alone)
    events, log = tmp_path / "run" / "events.jsonl", tmp_path / "run" / "on_event.log"
    assert wait_until(lambda: log.read_text() == events.read_text())


@pytest.mark.slow
def test_resuming_with_other_processes_and_groups(start, tmp_path, alone):
    """Two processes with a group each, then one process without groups, then groups of two of four processes."""
    check(run(start, 2, "groups", tmp_path / "run"), alone)
    assert saved(tmp_path / "run") == [3, 6]
    check(run(start, 1, "zero1", tmp_path / "run", "--checkpoint.step=3"), alone)
    check(run(start, 4, "groups", tmp_path / "run", "--checkpoint.step=3"), alone)
