"""launch/slurm.sbatch on a real Slurm of two nodes; skipped where its programs are not installed."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gangs import CONFIG, REPOSITORY, TRAIN, losses, started
from run_folder import events, saved, steps
from slurm_cluster import CORES, SBATCH, Cluster, Job, cluster, missing
from waiting import wait_until

from megajax.faults.exit_codes import REQUEUE

MISSING = missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=f"no Slurm: {MISSING}")]

STEPS = 160
SETTINGS = ("--batch.micro_size=2", f"--steps={STEPS}", "--evaluation.batches=0", "--checkpoint.every=10")
SLOW = "--resilience.inject=slow:step=1"
"""0.3 s a step until its process ends: Slurm looks at limits of time every 30 s."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    variables = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    with cluster(tmp_path_factory.mktemp("slurm"), **variables) as made:
        yield made


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of one process without Slurm."""
    folder = tmp_path_factory.mktemp("plain")
    with started(folder) as start:
        words = (
            *TRAIN,
            f"--config={CONFIG}",
            *SETTINGS,
            "--parallel.data=2",
            "--devices=cpu:2",
            f"--run_dir={folder / 'run'}",
        )
        process = start(*words)
        assert process.wait() == 0, process.text
    return losses(folder / "run")


def submit(slurm: Cluster, run_dir: Path, *settings: str, per_node: int = 1) -> Job:
    """The shipped file. per_node: processes of a node, each with a device."""
    options = (f"--ntasks-per-node={per_node}", f"--gpus-per-node={per_node}", "--cpus-per-task=1")
    layout = (f"--parallel.data={2 * per_node}", "--devices=cpu:1", f"--run_dir={run_dir}")
    return slurm.submit(*options, SBATCH, CONFIG, *SETTINGS, *layout, *settings)


def disturbed(slurm: Cluster, run_dir: Path, per_node: int = 1) -> Job:
    """A job in the middle of its run."""
    job = submit(slurm, run_dir, SLOW, per_node=per_node)
    job.until(lambda: max(steps(run_dir), default=0) >= 12)
    return job


def check_end(job: Job, run_dir: Path, plain: dict[int, float], restarts: int) -> None:
    """Every step has the loss of a run without Slurm; restarts: how often Slurm has started the job again."""
    fields = job.ended()
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("COMPLETED", "0:0", str(restarts)), job.text
    assert list(plain) == list(losses(run_dir)) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(losses(run_dir).values()), list(plain.values()), rtol=1e-5)
    assert saved(run_dir)[-1] == STEPS and not job.processes()


def test_the_file_as_it_is_fits_two_nodes_of_eight_gpus(slurm):
    text = slurm.call("bash", "-c", f"sbatch --test-only {SBATCH} gpt2.py 2>&1")
    assert f"using {2 * CORES} processors on nodes n[1-2]" in text


def test_a_process_on_each_node_trains_as_one_machine(slurm, tmp_path, plain):
    job = submit(slurm, tmp_path / "run")
    check_end(job, tmp_path / "run", plain, 0)
    (start,) = events(tmp_path / "run", "start")
    assert (start["processes"], start["devices"]) == (2, 2)


def test_a_killed_task_of_a_drained_node_starts_again_within_the_job(slurm, tmp_path, plain):
    """Two processes a node. A drained node keeps its job to the end, and gets no further one."""
    job = disturbed(slurm, tmp_path / "run", per_node=2)
    slurm.call("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    os.kill(job.processes()[3], signal.SIGKILL)
    check_end(job, tmp_path / "run", plain, 0)
    (lost,) = events(tmp_path / "run", "restart")
    assert (lost["process"], lost["attempt"]) == (3, 2) and lost["cause"].startswith("process 3 was lost on n2: ")
    waiting = submit(slurm, tmp_path / "waiting", SLOW)
    waiting.until(lambda: "DRAINED" in waiting.fields["Reason"])
    slurm.call("scontrol", "update", "NodeName=n2", "State=RESUME")
    waiting.until(lambda: waiting.state == "RUNNING")
    slurm.call("scancel", waiting.number)
    waiting.ended()


def test_a_job_whose_time_is_up_saves_and_goes_on_from_there(slurm, tmp_path, plain):
    """--signal=B:TERM@300 of the file: a limit five minutes after its start is reached at once."""
    run = tmp_path / "run"
    job = disturbed(slurm, run)
    job.update(TimeLimit="00:05:00")
    requeued(job)
    (stop,) = events(run, "stopped")
    assert stop["saved"] == saved(run)[-1] == max(steps(run)) < STEPS and "SIGUSR1 received" in job.text
    job.update(TimeLimit="24:00:00", StartTime="now")
    check_end(job, run, plain, 1)
    assert [event["step"] for event in events(run, "start")] == [0, stop["saved"]]


def test_a_limit_during_set_up_puts_the_job_back_into_the_queue(slurm, tmp_path):
    job = submit(slurm, tmp_path / "run")
    job.until(lambda: len(job.processes()) == 2)
    slurm.call("scancel", "--batch", "--signal=TERM", job.number)  # as at the limit
    requeued(job)
    assert not steps(tmp_path / "run") and "restart" not in job.text
    slurm.call("scancel", job.number)
    assert job.ended()["JobState"] == "CANCELLED"


def test_a_lost_node_puts_the_job_back_into_the_queue(slurm, tmp_path, plain):
    job = disturbed(slurm, tmp_path / "run")
    slurm.call("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    requeued(job)
    slurm.call("bash", "-c", "scontrol update NodeName=n2 State=RESUME || true")  # if it is not back by itself
    job.update(StartTime="now")
    check_end(job, tmp_path / "run", plain, 1)


def test_a_cancelled_job_saves_and_is_not_requeued(slurm, tmp_path):
    run = tmp_path / "run"
    job = disturbed(slurm, run)
    slurm.call("scancel", job.number)
    fields = job.ended()
    assert (fields["JobState"], fields["Restarts"]) == ("CANCELLED", "0")
    assert wait_until(lambda: not job.processes())
    assert saved(run)[-1] == max(steps(run)) and f"task 0: Exited with exit code {REQUEUE}" in job.text


def test_a_setting_that_does_not_exist_ends_the_job_with_2(slurm, tmp_path):
    fields = submit(slurm, tmp_path / "run", "--batch.micro_sise=2").ended()
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("FAILED", "2:0", "0")


def requeued(job: Job) -> None:
    """Wait until the job is in the queue again, after it has left its nodes."""
    job.until(lambda: (fields := job.fields)["Restarts"] == "1" and fields["JobState"] == "PENDING")
    job.until(lambda: not job.processes())
