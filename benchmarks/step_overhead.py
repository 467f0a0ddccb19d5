"""What the loop costs: our time per step over the bare jitted step's on the same model.

Run:  python benchmarks/step_overhead.py [--rounds=24] [--steps=12]

The loop reads batches, fetches and logs every step (metrics.jsonl and console) and asks its hooks; the bare step is
called again and again on one batch. Short rounds of both take turns, so that a noisy machine disturbs both alike; the
ratio is given of the medians and of the fastest rounds. Writes benchmarks/results/step_overhead.json.
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
from megajax.metrics.console import open_console
from megajax.metrics.runfolder import RunFolder
from megajax.metrics.writers import Writers, open_writers
from megajax.training import setup
from megajax.training.job import step_rate, step_record
from megajax.training.session import Run


def bare_round(run: Run, batch: object, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        run.state, metrics = run.train_step(run.state, batch)
    jax.block_until_ready(metrics)
    return (time.perf_counter() - start) / steps


def loop_round(run: Run, log: Writers, steps: int) -> float:
    rate = step_rate(run)
    start = time.perf_counter()
    for info in run.steps(steps):
        log.log(step_record(run, info, rate))
    return (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args()
    total = 2 * (asked.rounds + 1) * asked.steps
    run = setup(load("quickstart.py", f"steps={total}", "parallel.data=1"))
    batch, _ = next(run.batches)
    with tempfile.TemporaryDirectory() as folder, jax.set_mesh(run.mesh):
        console = open_console(run.cfg.logging, total_steps=total, stream=io.StringIO())
        with Writers([open_writers(run.cfg.logging, RunFolder.create(Path(folder))), console]) as log:
            with jax.default_matmul_precision(run.cfg.precision.matmul_precision()):
                bare_round(run, batch, asked.steps)
            loop_round(run, log, asked.steps)
            bare, loop = [], []
            for _ in range(asked.rounds):
                with jax.default_matmul_precision(run.cfg.precision.matmul_precision()):
                    bare.append(bare_round(run, batch, asked.steps))
                loop.append(loop_round(run, log, asked.steps))
    run.close()
    outcome.write(
        "step_overhead",
        {
            "bare_ms": [round(1e3 * seconds, 2) for seconds in bare],
            "loop_ms": [round(1e3 * seconds, 2) for seconds in loop],
            "ratio_of_medians": round(statistics.median(loop) / statistics.median(bare), 4),
            "ratio_of_fastest": round(min(loop) / min(bare), 4),
        },
    )


if __name__ == "__main__":
    main()
