"""A run of four processes through four faults."""

import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.faults.supervised_run import SMALL, SupervisedRun, damage, kill

PROCESSES = 4
DISK_MIB = 48
LIMIT_SECONDS = 15
"""The watchdog's limit of a step and of a batch; a step takes a fraction of a second."""


@contextmanager
def small_disk(path: Path | None, folder: Path) -> Generator[Path]:
    """A folder on a file system of `DISK_MIB`."""
    if path is not None:
        yield path
        return
    place = folder / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=False)


def settings(steps: int) -> tuple[str, ...]:
    """Settings of both runs."""
    return (
        *(*SMALL, f"--steps={steps}", "--checkpoint.every=10", "--checkpoint.keep_last=3", "--logging.every=20"),
        *(f"--resilience.watchdog.step={LIMIT_SECONDS}",),
        *(f"--resilience.watchdog.data_wait={LIMIT_SECONDS}",),
    )


class Recording:
    """Events of the run with seconds since its start."""

    def __init__(self, run: SupervisedRun):
        self._run, self.lines = run, list[dict[str, Any]]()

    def note(self, event: str) -> None:
        """Add a line with the time and the step."""
        line = {"seconds": round(time.monotonic() - self._run.began, 1), "step": self._run.step(), "what": event}
        self.lines.append(line)
        print(f"{line['seconds']:7.1f} s  step {line['step']:4d}  {event}", flush=True)


def disturbed(run: SupervisedRun, disk: Path, steps: int) -> list[dict[str, Any]]:
    """Inject the faults into the run, and wait for its end."""
    record, draw = Recording(run), random.Random(1)

    def trained_to(step: int) -> None:
        run.until(lambda: run.step() >= step, f"step {step}")

    def restarted(count: int) -> None:
        run.until(lambda: len(run.events("first_step")) > count, "a restart that trains")
        record.note(f"trains again, from the checkpoint of step {run.events('start')[-1]['step']}")

    trained_to(steps // 8)
    kill(run, 2)
    record.note("kill -9 of process 2")
    restarted(1)

    run.until(lambda: run.events("hang"), "the watchdog")
    record.note("process 1 was stuck in its data, the watchdog ended the gang")
    restarted(2)

    trained_to(steps // 2)
    filler = disk / "filler"
    # A save may use the space in the meantime, which fills the disk as well.
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        fill_bytes = shutil.disk_usage(disk).free - 2**19
        file.write(bytes(max(fill_bytes, 0)))
    record.note(f"disk filled: {shutil.disk_usage(disk).free // 1024} KiB free")
    run.until(lambda: run.events("save_retried"), "a failed save")
    filler.unlink()
    record.note("a save has failed and will be retried; room again")
    failed = run.events("save_retried")[-1]["step"]
    run.until(lambda: any(event["step"] >= failed for event in run.events("save_committed")), "a save that succeeds")
    record.note(f"step {run.events('save_committed')[-1]['step']} saved")

    trained_to(3 * steps // 4 + 3)
    newest = run.events("save_committed")[-1]["step"]
    file = damage(disk / "checkpoints" / f"{newest:08d}", draw)
    record.note(f"one bit of {file} of step {newest} flipped")
    kill(run, 0)
    record.note("kill -9 of process 0")
    restarted(3)
    run.wait()
    record.note(f"ended with {run.process.returncode}")
    return record.lines


def survival(*, folder: Path | None = None, disk: Path | None = None, steps: int = 240) -> dict[str, Any]:
    """Runs four processes through four faults in sequence, and compares all losses with an undisturbed run bit by bit.

    The faults: kill -9 of a rank; a rank that is alive but stuck before its next batch; a full disk, until a save has
    failed and the run has continued; and a flipped bit in the newest checkpoint, followed by another kill. Only the
    launcher (`megajax.launch --max-restarts`) handles them. The third fault needs a small file system: root mounts a
    tmpfs; otherwise --disk=DIR is a folder on a file system with less than 64 MiB of space. --folder: of both runs.
    """
    folder = folder or Path(tempfile.mkdtemp(prefix="survival-"))
    folder.mkdir(parents=True, exist_ok=True)
    launcher = ("--max-restarts=10", "--backoff=1")
    with small_disk(disk, folder) as place:
        run_dir = folder / "disturbed"
        (place / "checkpoints").mkdir()
        run_dir.mkdir()
        (run_dir / "checkpoints").symlink_to(place / "checkpoints")
        # In the second attempt, process 1 gets stuck before this step.
        stuck = f"--resilience.inject=stuck:step={steps // 3}:process=1:attempt=2"
        with SupervisedRun(run_dir, PROCESSES, (*settings(steps), stuck), launcher) as run:
            lines = disturbed(run, place, steps)
            code, actual, events = run.process.returncode, run.losses(), run.events()
    with SupervisedRun(folder / "undisturbed", PROCESSES, settings(steps), launcher) as run:
        quiet_code, expected = run.wait(), run.losses()
    print(f"the runs are in {folder}; {folder / 'disturbed' / 'report.html'}")
    different = sum(actual.get(step) != loss for step, loss in expected.items())
    return {
        "processes": PROCESSES,
        "recording": lines,
        "exit codes": [code, quiet_code],
        "attempts": sum(event["event"] == "start" for event in events),
        "steps compared": len(expected),
        "steps whose loss differs in any bit": different,
        "events": [event for event in events if event["event"] not in ("compile", "save_begun", "save_committed")],
        "wrong": different,
    }
