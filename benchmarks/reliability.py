"""Kills, restarts, watchdog delay, overhead and leaks, measured on real runs.

    python benchmarks/reliability.py kills [--single=200] [--gang=40]
    python benchmarks/reliability.py restarts [--trials=20]
    python benchmarks/reliability.py watchdog [--trials=5]
    python benchmarks/reliability.py overhead
    python benchmarks/reliability.py leaks [--steps=4000]

kills: kills a process that saves in a loop at random moments and restarts it (--single), and kills a random rank of two
supervised processes (--gang). restarts: time from the death of a rank to the end of all processes, and to the next
step. watchdog: time from a rank that stops to the end of all processes. overhead: cost of the watchdog, hashes of
replicas, saves and local checkpoints with a model whose steps take at least 0.3 s. leaks: memory, descriptors and
threads over many steps with saves. Each writes benchmarks/results/reliability_NAME.json.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import integrity
import jax
import local_checkpoints
import outcome
from supervised_run import SMALL, SupervisedRun, alive, kill

from megajax.checkpoint.config import CheckpointConfig
from megajax.config import load
from megajax.faults.activity import Activity
from megajax.faults.watchdog import WatchdogConfig
from megajax.job.faults.hang import Pulse
from megajax.training import setup

REPOSITORY = Path(__file__).resolve().parents[1]
KILL_TRIALS = REPOSITORY / "tests/checkpoint/kill_trials.py"


def single_kills(trials: int, folder: Path, seed: int) -> dict[str, Any]:
    """`trials` kills of a process that saves in a loop, half of them with saves in the foreground."""
    results, failures, lost_commits = [], 0, 0
    for mode in ("asynchronous", "synchronous"):
        place = folder / mode
        place.mkdir()
        command = [sys.executable, str(KILL_TRIALS), str(place), str(trials // 2), mode, str(seed)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        starts = [line["started_from"] for line in lines]
        failures += sum(not line["ok"] for line in lines)
        lost_commits += sum(after < before for before, after in pairwise(starts))
        results += lines
    return {
        "kills": trials // 2 * 2,
        "in the middle of a save": sum(bool(line["in_the_middle"]) for line in results),
        "lost commits": lost_commits,
        "wrong resumes": failures,
        "steps damaged": sum(bool(line["damaged"]) for line in results),
    }


def gang(run_dir: Path, *settings: str, restarts: int = 1000) -> SupervisedRun:
    """Two processes of a small model, restarted at once."""
    launcher = (f"--max-restarts={restarts}", "--backoff=0")
    return SupervisedRun(run_dir, 2, (*SMALL, *settings), launcher)


def gang_kills(trials: int, folder: Path, seed: int) -> dict[str, Any]:
    """A random rank is killed during a save or soon after, `trials` times; the losses are compared with a quiet run's.

    The supervisor gives up after three attempts without a new checkpoint, so each second attempt saves before its kill.
    """
    draw, every, steps = random.Random(seed), 5, 20 * trials
    settings = (f"--steps={steps}", f"--checkpoint.every={every}", "--checkpoint.keep_last=2", "--logging.every=50")
    resumed, lost_commits, during = list[int](), 0, 0
    with gang(folder / "killed", *settings) as run:
        for trial in range(trials):
            run.until(lambda trial=trial: len(run.events("start")) > trial, f"start {trial + 1}")
            first, saves = run.events("start")[-1]["step"], len(run.events("save_begun"))
            run.until(lambda saves=saves: len(run.events("save_begun")) > saves, "a save")
            if trial % 2:
                run.until(lambda first=first: _newest(run) > first, "a committed save")
            time.sleep(draw.uniform(0.0, 1.0))
            if run.step() >= steps - 2 * every:
                break
            committed = _newest(run)
            during += run.events("save_begun")[-1]["step"] > committed
            kill(run, draw.randrange(2))
            run.until(lambda trial=trial: len(run.events("start")) > trial + 1, "a restart")
            resumed.append(run.events("start")[-1]["step"])
            lost_commits += resumed[-1] < committed
        code, actual = run.wait(), run.losses()
    with gang(folder / "quiet", *settings) as run:
        quiet_code, expected = run.wait(), run.losses()
    return {
        "kills": len(resumed),
        "while a save was under way": during,
        "lost commits": lost_commits,
        "exit codes": [code, quiet_code],
        "steps compared": len(expected),
        "steps whose loss differs in any bit": sum(actual.get(step) != loss for step, loss in expected.items()),
    }


def restarts(trials: int, folder: Path) -> dict[str, Any]:
    """Seconds from the death of a rank until no process of the gang is left, and until the next step is logged."""
    down, recovered = [], []
    settings = ("--steps=100000", "--checkpoint.every=5", "--logging.every=50")
    with gang(folder / "run", *settings) as run:
        for trial in range(trials):
            run.until(lambda trial=trial: len(run.events("first_step")) > trial, "the first step")
            first = run.events("start")[-1]["step"]
            run.until(lambda first=first: _newest(run) > first, "a committed save")
            pids, rank = run.ranks(), trial % 2
            kill(run, rank)
            since = time.monotonic()
            run.until(lambda pids=pids: not any(map(alive, pids.values())), "the end of the gang")
            down.append(time.monotonic() - since)
            run.until(lambda trial=trial: len(run.events("first_step")) > trial + 1, "the first step of a new attempt")
            recovered.append(time.monotonic() - since)
    return {
        "trials": trials,
        "seconds to gang down": _statistics(down),
        "seconds to the next step": _statistics(recovered),
    }


def _newest(run: SupervisedRun) -> int:
    """The newest committed step; 0: none."""
    return max([0, *(event["step"] for event in run.events("save_committed"))])


def _statistics(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "worst": round(max(values), 3)}


def watchdog(trials: int, folder: Path) -> dict[str, Any]:
    """Seconds from a rank that stops, in a sleep or by SIGSTOP, until the gang is down, with a limit of ten seconds."""
    limit, results = 10.0, {}
    for kind in ("stuck", "frozen"):
        delays, codes, blamed = [], [], []
        for trial in range(trials):
            settings = (
                *("--steps=100000", "--checkpoint.every=none", "--logging.every=50"),
                *(f"--resilience.inject={kind}:step=12:process=1", f"--resilience.watchdog.step={limit:g}"),
                f"--resilience.watchdog.data_wait={limit:g}",
            )
            with gang(folder / f"{kind}{trial}", *settings, restarts=0) as run:
                run.until(lambda run=run: run.step() >= 10, "step 10")
                since = time.monotonic()
                codes.append(run.wait(120.0))
                delays.append(time.monotonic() - since)
                blamed.append("process 1" in run.tail(3))
        results[kind] = {
            "seconds": _statistics(delays),
            "exit codes": sorted(set(codes)),
            "named process 1": sum(blamed),
        }
    return {"limit of a step, seconds": limit, "trials of each": trials, **results}


def overhead(folder: Path) -> dict[str, Any]:
    """Shares of a step: the watchdog's thread and marks, a hash of replicas, saves and local checkpoints."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    return {
        "watchdog": watchdog_cost(folder),
        "copies of the state": hashes(folder),
        "saves": save_stall(folder / "saves"),
        "local checkpoints": local_checkpoints.overhead(folder / "local", every=40, rounds=2),
    }


def save_stall(folder: Path, every: int = 100, rounds: int = 5) -> dict[str, float]:
    """How long training waits for a save of a model of 0.3 s a step or more, and its share of `every` steps."""
    run = setup(load("gpt2.py:debug", *local_checkpoints.SETTINGS, f"run_dir={folder}"))
    folder.mkdir(parents=True, exist_ok=True)
    with CheckpointConfig(keep_last=1).build(folder / "checkpoints") as manager:
        steps = [info.seconds for info in run.steps(7)][2:]
        reports = []
        for number in range(1, rounds + 1):
            manager.save(number, run.state, {})
            manager.wait()
            reports += manager.poll()
    run.close()
    step, blocking = statistics.median(steps), statistics.median(report.blocking_seconds for report in reports)
    return {
        "seconds of a step": round(step, 3),
        "MiB": round(reports[-1].bytes / 2**20, 1),
        "seconds training waits": round(blocking, 4),
        "seconds until committed": round(statistics.median(report.total_seconds for report in reports), 3),
        f"percent of {every} steps": round(100 * blocking / (every * step), 3),
    }


def watchdog_cost(folder: Path, seconds: float = 10.0) -> dict[str, float]:
    """Of the thread, processor time by second; of the marks in the loop, time by step."""
    activity = Activity()
    with Pulse(folder / "pulse", activity, WatchdogConfig()):
        before = time.process_time()
        time.sleep(seconds)
        thread = (time.process_time() - before) / seconds
        count, start = 10_000, time.perf_counter()
        for step in range(count):
            for phase in ("data_wait", "step", "step"):
                with activity.phase(phase, step):
                    pass
        marks = (time.perf_counter() - start) / count
    return {
        "processor seconds of the thread by second": round(thread, 6),
        "microseconds of marks by step": round(1e6 * marks, 1),
        "percent of a step of 0.3 s": round(100 * (thread + marks / 0.3), 3),
    }


def hashes(folder: Path) -> dict[str, Any]:
    """Of a model of 0.3 s a step or more on two devices, all of its state with copies."""
    settings = (*local_checkpoints.SETTINGS, "parallel.data=2")
    run = setup(load("gpt2.py:debug", *settings, "parallel.data_sharding=replicate", f"run_dir={folder / 'hashes'}"))
    try:
        figures = integrity.overheads(run, 5)
    finally:
        run.close()
    return {name: round(value, 5) for name, value in figures.items()}


def leaks(steps: int, folder: Path) -> dict[str, Any]:
    """Memory, descriptors and threads of a process over many steps with a save each tenth."""
    settings = (
        *SMALL,
        *(f"--steps={steps}", "--checkpoint.every=10", "--parallel.data=1", "--logging.every=500", "--model.hidden=32"),
    )
    samples = []
    with SupervisedRun(folder / "run", 1, settings) as run:
        run.until(lambda: run.step() >= steps // 10, "a tenth of the steps", 3600.0)
        while run.process.poll() is None:
            for pid in run.ranks().values():
                if sample := _sample(pid):
                    samples.append({"step": run.step(), **sample})
            time.sleep(5.0)
    thirds = len(samples) // 3
    first, last = samples[:thirds], samples[-thirds:]
    return {
        "steps": steps,
        "saves": steps // 10,
        "exit code": run.process.returncode,
        **{
            name: {
                "median of the first third": statistics.median(sample[name] for sample in first),
                "median of the last third": statistics.median(sample[name] for sample in last),
                "largest": max(sample[name] for sample in samples),
            }
            for name in ("MiB", "descriptors", "threads")
        },
    }


def _sample(pid: int) -> dict[str, int] | None:
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return {
            "MiB": int(status["VmRSS"].split()[0]) // 1024,
            "threads": int(status["Threads"]),
            "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        }
    except (OSError, KeyError):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=("kills", "restarts", "watchdog", "overhead", "leaks"))
    parser.add_argument("--single", type=int, default=200, help="kills of a process that saves in a loop")
    parser.add_argument("--gang", type=int, default=40, help="kills of a rank of a supervised gang")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reliability-") as temporary:
        folder = Path(temporary)
        figures: dict[str, Any]
        match arguments.what:
            case "kills":
                figures = {"single": single_kills(arguments.single, folder, arguments.seed)} if arguments.single else {}
                figures |= {"gang": gang_kills(arguments.gang, folder, arguments.seed)} if arguments.gang else {}
            case "restarts":
                figures = restarts(arguments.trials, folder)
            case "watchdog":
                figures = watchdog(arguments.trials, folder)
            case "overhead":
                figures = overhead(folder)
            case "leaks":
                figures = leaks(arguments.steps, folder)
    outcome.write(f"reliability_{arguments.what}", figures)


if __name__ == "__main__":
    main()
