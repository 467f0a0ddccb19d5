"""Kills, restarts, the watchdog, and leaks, measured on real runs."""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.faults.supervised_run import SMALL, SupervisedRun, alive, kill
from benchmarks.outcome import ROOT
from megajax.faults.activity import Activity
from megajax.faults.pulse import Pulse
from megajax.faults.watchdog import WatchdogConfig

KILL_TRIALS = ROOT / "tests/checkpoint/kill_trials.py"


@contextmanager
def place() -> Iterator[Path]:
    """A temporary folder of runs."""
    with tempfile.TemporaryDirectory(prefix="reliability-") as temporary:
        yield Path(temporary)


def kills(*, single: int = 200, gang: int = 40, seed: int = 1) -> dict[str, Any]:
    """Kills at random moments: of a process that saves in a loop (--single), and of a rank of two under the launcher.

    No commit may be lost, no resume may be wrong, and all losses must equal those of an undisturbed run.
    """
    with place() as folder:
        figures = {"single": single_kills(single, folder, seed)} if single else {}
        return figures | ({"gang": gang_kills(gang, folder, seed)} if gang else {})


def single_kills(trials: int, folder: Path, seed: int) -> dict[str, Any]:
    """Kills of a process that saves in a loop, half of them with synchronous saves."""
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


def start_gang(run_dir: Path, *settings: str, restarts: int = 1000) -> SupervisedRun:
    """Two processes of a small model, restarted without delay."""
    launcher = (f"--max-restarts={restarts}", "--backoff=0")
    return SupervisedRun(run_dir, 2, (*SMALL, *settings), launcher)


def gang_kills(trials: int, folder: Path, seed: int) -> dict[str, Any]:
    """Kills of a random rank during a save or soon after; the losses are compared with an undisturbed run's.

    The launcher gives up after three attempts without a new checkpoint, so every second attempt saves before its kill.
    """
    draw, every, steps = random.Random(seed), 5, 20 * trials
    settings = (f"--steps={steps}", f"--checkpoint.every={every}", "--checkpoint.keep_last=2", "--logging.every=50")
    resumed, lost_commits, during = list[int](), 0, 0
    with start_gang(folder / "killed", *settings) as run:
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
    with start_gang(folder / "quiet", *settings) as run:
        quiet_code, expected = run.wait(), run.losses()
    return {
        "kills": len(resumed),
        "while a save was under way": during,
        "lost commits": lost_commits,
        "exit codes": [code, quiet_code],
        "steps compared": len(expected),
        "steps whose loss differs in any bit": sum(actual.get(step) != loss for step, loss in expected.items()),
    }


def restarts(*, trials: int = 20) -> dict[str, Any]:
    """Seconds from the death of a rank until no process of the gang is left, and until the next step is logged."""
    down, recovered = [], []
    settings = ("--steps=100000", "--checkpoint.every=5", "--logging.every=50")
    with place() as folder, start_gang(folder / "run", *settings) as run:
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
    """The newest committed step, or 0."""
    return max([0, *(event["step"] for event in run.events("save_committed"))])


def _statistics(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "worst": round(max(values), 3)}


def watchdog(*, trials: int = 20) -> dict[str, Any]:
    """Seconds from a rank that stops, in a sleep or by SIGSTOP, until the gang is down, with a limit of ten seconds.

    Also the cost of the watchdog in a run where nothing stops.
    """
    limit, results = 10.0, {}
    for kind in ("stuck", "frozen"):
        delays, codes, blamed = [], [], []
        for _ in range(trials):
            settings = (
                *("--steps=100000", "--checkpoint.every=none", "--logging.every=50"),
                *(f"--resilience.inject={kind}:step=12:process=1", f"--resilience.watchdog.step={limit:g}"),
                f"--resilience.watchdog.data_wait={limit:g}",
            )
            with place() as folder, start_gang(folder / "run", *settings, restarts=0) as run:
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
    with place() as folder:
        results["cost"] = watchdog_cost(folder)
    return {"limit of a step, seconds": limit, "trials of each": trials, **results}


def watchdog_cost(folder: Path, seconds: float = 10.0) -> dict[str, float]:
    """Processor time of the watchdog's thread per second, and time of the marks in the loop per step."""
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


def leaks(*, steps: int = 4000) -> dict[str, Any]:
    """Memory, descriptors and threads of a process over many steps with a save every tenth step."""
    settings = (
        *(*SMALL, f"--steps={steps}", "--checkpoint.every=10", "--parallel.data=1", "--logging.every=500"),
        "--model.hidden=32",
    )
    samples = []
    with place() as folder, SupervisedRun(folder / "run", 1, settings) as run:
        run.until(lambda: run.step() >= steps // 10, "a tenth of the steps", 3600.0)
        while run.process.poll() is None:
            for pid in run.ranks().values():
                if sample := _sample(pid):
                    samples.append(sample)
            time.sleep(5.0)
    third = len(samples) // 3
    parts = {"median of the first third": samples[:third], "median of the last third": samples[-third:]}
    return {
        "steps": steps,
        "saves": steps // 10,
        "exit code": run.process.returncode,
        **{
            name: {title: statistics.median(sample[name] for sample in part) for title, part in parts.items()}
            | {"largest": max(sample[name] for sample in samples)}
            for name in ("MiB", "descriptors", "threads")
        },
    }


def _sample(pid: int) -> dict[str, int] | None:
    status = Path(f"/proc/{pid}/status")
    try:
        text = status.read_text()
        kib, threads = (int(text.partition(name)[2].split()[0]) for name in ("VmRSS:", "Threads:"))
        descriptors = len(list(status.with_name("fd").iterdir()))
        return {"MiB": kib // 1024, "threads": threads, "descriptors": descriptors}
    except (OSError, IndexError):
        return None
