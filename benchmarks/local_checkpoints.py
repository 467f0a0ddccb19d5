"""Cost of local checkpoints: the copy to host memory, the background writes, and the steps meanwhile.

    python benchmarks/local_checkpoints.py [--every=40] [--rounds=6] [--folder=DIR]

Trains a GPT of 11 million weights (a state of 131 MB). Rounds with and without a local checkpoint in their first step
alternate, so that other load on the machine affects both. Writes benchmarks/results/local_checkpoints.json.
"""

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import outcome

from megajax.checkpoint.config import LocalConfig
from megajax.checkpoint.local.manager import LocalCheckpoints
from megajax.checkpoint.local.reader import LocalReader
from megajax.config import load
from megajax.training.session import Run, setup

SETTINGS = (
    *("model.hidden=512", "model.stack.repeats=8", "model.sequence_length=256", "data.type=MockConfig"),
    *("batch.global_size=4", "batch.micro_size=2", "precision.compute=float32", "evaluation.every=none"),
)


def used() -> float:
    """Seconds of processor time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def saves_alone(local: LocalCheckpoints, run: Run, count: int) -> list[dict[str, float]]:
    """Saves with nothing beside them: seconds of waiting, of writing, and of processor time."""
    figures = []
    for number in range(1, count + 1):
        before = used()
        local.save(number, run.state, {})
        local.wait()
        (report,) = local.poll()
        assert report.failure is None, report
        figures.append({"blocking": report.blocking_seconds, "total": report.total_seconds, "cpu": used() - before})
    return figures


def steps_beside(local: LocalCheckpoints, run: Run, every: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of `every` steps without a save, and of as many with one at the first; `rounds` times each, in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * rounds):
        began = time.perf_counter()
        if number % 2:
            local.save(1000 + number, run.state, {})
        for _ in run.steps(every):
            pass
        seconds[number % 2].append(time.perf_counter() - began)
        local.wait()
        assert all(report.failure is None for report in local.poll())
    return seconds


def overhead(folder: Path, every: int = 40, rounds: int = 6) -> dict[str, Any]:
    """Figures of local checkpoints every `every` steps in `folder`, for benchmarks/reliability.py too."""
    run = setup(load("gpt2.py:debug", *SETTINGS, f"run_dir={folder / 'run'}"))
    shared = folder / "run" / "checkpoints"
    shared.mkdir(parents=True, exist_ok=True)
    with LocalConfig(every=every, folder=folder / "node").build(shared) as local:
        for _ in run.steps(3):
            pass
        local.begin(0, run.state)
        samples = saves_alone(local, run, 4)
        plain, saving = steps_beside(local, run, every, rounds)
        step = statistics.median(plain) / every
        shares = [with_save / without - 1 for without, with_save in zip(plain, saving, strict=True)]
        cpu = statistics.median(sample["cpu"] for sample in samples)
        reader, like = LocalReader(local), run.program.state_like()
        restore_began = time.perf_counter()
        saved = reader.newest_intact()
        assert saved is not None
        jax.block_until_ready(reader.restore(saved, like)[0])
        restored = time.perf_counter() - restore_began
    return {
        "bytes": local.need,
        "every": every,
        "step_seconds": round(step, 4),
        "blocking_seconds": round(statistics.median(sample["blocking"] for sample in samples), 4),
        "total_seconds": round(statistics.median(sample["total"] for sample in samples), 3),
        "cpu_seconds": round(cpu, 3),
        "restore_seconds": round(restored, 3),
        "overhead_percent_median": round(100 * statistics.median(shares), 2),
        "overhead_percent_of_rounds": [round(100 * share, 2) for share in shares],
        "overhead_percent_if_all_writes_delayed_steps": round(100 * cpu / (every * step), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="local-checkpoints-") as temporary:
        figures = overhead(Path(temporary), options.every, options.rounds)
    outcome.write("local_checkpoints", figures)


if __name__ == "__main__":
    main()
