"""Cost of guards, logging and the training loop: time per step relative to the bare jitted step of the same model.

Run:  python benchmarks/step_overhead.py [--rounds=24] [--steps=12]

bare: the jitted step, called repeatedly on one batch. told: the same with the limits of a guard, where each step
receives the results of the previous one. loop: also reads batches, detects spikes, fetches and logs every step
(metrics.jsonl and console) and calls the hooks, as a job does. Short rounds of all three alternate, so that other load
on the machine affects all. Ratios are of the medians and of the fastest rounds. Writes
benchmarks/results/step_overhead.json.
"""

import argparse
import io
import statistics
import tempfile
import time
from pathlib import Path

import jax
import outcome

from megajax.config import load
from megajax.faults.config import ResilienceConfig
from megajax.job.faults.watch import Watch
from megajax.job.steps import step_rate, step_record
from megajax.metrics.console import open_console
from megajax.metrics.runfolder import RunFolder
from megajax.metrics.writers import Writers, open_writers
from megajax.training import setup
from megajax.training.guarded.guard import Guard
from megajax.training.guarded.step import RERUN, StepControl
from megajax.training.loop import run_steps
from megajax.training.session import Run

WATCHFUL = ResilienceConfig(spike_factor=10.0, spike_reference="median", largest_norm=1e6)


def bare_round(run: Run, batch: object, steps: int, guard: Guard | None = None) -> float:
    precision = run.cfg.precision.matmul_precision()
    start = time.perf_counter()
    with jax.set_mesh(run.mesh), jax.default_matmul_precision(precision):
        rerun = None if guard is None else guard.no_rerun
        for step in range(steps):
            controls = () if guard is None else (StepControl(limits=guard.on_devices(guard.limits(step)), rerun=rerun),)
            run.state, metrics = run.train_step(run.state, batch, *controls)
            rerun = metrics.get(RERUN)
        jax.block_until_ready(metrics)
    return (time.perf_counter() - start) / steps


def loop_round(run: Run, log: Writers, steps: int, guard: Guard) -> float:
    rate, watch = step_rate(run), Watch(guard, None, log, lambda line: None)
    start = time.perf_counter()
    for info in run_steps(run, run.step + steps, guard=guard):
        log.log(step_record(run, info, rate, detailed=False))
        watch(info)
    return (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    total = 3 * (arguments.rounds + 1) * arguments.steps
    run = setup(load("quickstart.py", f"steps={total}", "parallel.data=1"))
    guard = Guard(WATCHFUL, None, run.mesh)
    batch, _ = next(run.batches)
    samples: dict[str, list[float]] = {"bare": [], "told": [], "loop": []}
    with tempfile.TemporaryDirectory() as folder:
        console = open_console(run.cfg.logging, total_steps=total, stream=io.StringIO())
        with Writers([open_writers(run.cfg.logging, RunFolder.create(Path(folder))), console]) as log:
            for warm in range(-1, arguments.rounds):
                seconds = {
                    "bare": bare_round(run, batch, arguments.steps),
                    "told": bare_round(run, batch, arguments.steps, guard),
                    "loop": loop_round(run, log, arguments.steps, guard),
                }
                for name, value in seconds.items() if warm >= 0 else ():
                    samples[name].append(value)
    run.close()
    figures = {f"{name}_ms": [round(1e3 * value, 2) for value in values] for name, values in samples.items()}
    ratios = {
        f"{name}_ratio_of_{kind}": round(of(samples[name]) / of(samples["bare"]), 4)
        for name in ("told", "loop")
        for kind, of in (("medians", statistics.median), ("fastest", min))
    }
    outcome.write("step_overhead", figures | ratios)


if __name__ == "__main__":
    main()
