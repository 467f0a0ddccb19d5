"""Runs four processes through four faults in sequence, and compares all losses with an undisturbed run bit by bit.

    python benchmarks/survival.py [--folder=DIR] [--steps=240]

This script injects the faults; only the supervisor (`megajax.launch --max-restarts`) handles them:
  1. kill -9 of a rank
  2. a rank that is alive but stuck: it sleeps forever before its next batch
  3. a full disk: the file system of the checkpoints has no space until a save has failed and the run has continued
  4. a damaged newest checkpoint: one bit of one file is flipped, then a rank is killed
The third fault needs a small file system. As root, the script mounts a tmpfs; otherwise pass --disk=DIR, a folder on a
file system with less than 64 MiB of space. Writes benchmarks/results/survival.json.
"""

import argparse
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import outcome
from supervised_run import SMALL, SupervisedRun, damage, kill

PROCESSES = 4
DISK_MIB = 48
LIMIT_SECONDS = 15
"""Of a step and of a batch, for the watchdog: a step takes a fraction of a second."""


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
    """Of both runs: what a fault may change is not among them."""
    return (
        *(*SMALL, f"--steps={steps}", "--checkpoint.every=10", "--checkpoint.keep_last=3", "--logging.every=20"),
        *(f"--resilience.watchdog.step={LIMIT_SECONDS}",),
        *(f"--resilience.watchdog.data_wait={LIMIT_SECONDS}",),
    )


class Recording:
    """What happened when, in seconds since the start."""

    def __init__(self, run: SupervisedRun):
        self._run, self.lines = run, list[dict[str, Any]]()

    def note(self, event: str) -> None:
        """A line with the time and the step."""
        line = {"seconds": round(time.monotonic() - self._run.began, 1), "step": self._run.step(), "what": event}
        self.lines.append(line)
        print(f"{line['seconds']:7.1f} s  step {line['step']:4d}  {event}", flush=True)


def disturbed(run: SupervisedRun, disk: Path, steps: int) -> list[dict[str, Any]]:
    """Put the faults into the run, and wait for its end."""
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
    # A save may take the room in the meantime: the disk is full all the same.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--folder", type=Path, help="folder of both runs; none: a temporary folder")
    parser.add_argument("--disk", type=Path, help="a folder on a small file system; none: a tmpfs is mounted")
    parser.add_argument("--steps", type=int, default=240)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="survival-"))
    folder.mkdir(parents=True, exist_ok=True)
    with small_disk(arguments.disk, folder) as disk:
        run_dir = folder / "disturbed"
        (disk / "checkpoints").mkdir()
        run_dir.mkdir()
        (run_dir / "checkpoints").symlink_to(disk / "checkpoints")
        stuck = f"--resilience.inject=stuck:step={steps_of_stuck(arguments.steps)}:process=1:attempt=2"
        launcher = ("--max-restarts=10", "--backoff=1")
        with SupervisedRun(run_dir, PROCESSES, (*settings(arguments.steps), stuck), launcher) as run:
            lines = disturbed(run, disk, arguments.steps)
            code, actual, events = run.process.returncode, run.losses(), run.events()
    with SupervisedRun(folder / "undisturbed", PROCESSES, settings(arguments.steps), launcher) as run:
        quiet_code, expected = run.wait(), run.losses()
    outcome.write(
        "survival",
        {
            "processes": PROCESSES,
            "recording": lines,
            "exit codes": [code, quiet_code],
            "attempts": sum(event["event"] == "start" for event in events),
            "steps compared": len(expected),
            "steps whose loss differs in any bit": sum(actual.get(step) != loss for step, loss in expected.items()),
            "events": [event for event in events if event["event"] not in ("compile", "save_begun", "save_committed")],
        },
    )
    print(f"the runs are in {folder}; {os.fspath(folder / 'disturbed' / 'report.html')}")


def steps_of_stuck(steps: int) -> int:
    """The step before which process 1 is stuck in the second attempt."""
    return 2 * steps // 6


if __name__ == "__main__":
    main()
