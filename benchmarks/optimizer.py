"""Cost of Muon relative to AdamW on the same small model: the update alone, and the whole train step.

Run:  python benchmarks/optimizer.py [--config=FILE] [--rounds=12] [--steps=4]

Short rounds of both alternate, so that other load on the machine affects both. Ratios are of the medians and of the
fastest rounds. Writes benchmarks/results/optimizer.json.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import outcome

from megajax.config import load
from megajax.training import setup
from megajax.training.session import Run

KINDS = ("AdamW", "Muon")


def step_round(run: Run, batch: object, steps: int) -> float:
    """Seconds of one whole train step."""
    start = time.perf_counter()
    for _ in range(steps):
        run.state, metrics = run.train_step(run.state, batch)
    jax.block_until_ready(metrics)
    return (time.perf_counter() - start) / steps


def update_of(run: Run) -> Callable[[int], float]:
    """(number of updates) -> seconds of one, with gradients of the weights' own size."""
    program, params, state = run.program, run.state.params, run.state.optimizer
    rates = partial(program.schedule.rates, jnp.int32(1), run.cfg.optimizer.weight_decay)
    update = jax.jit(partial(program.optimizer.update, rates=rates))

    def timed(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            result = update(params, state, params)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / count

    return timed


def medians(seconds: dict[str, list[float]]) -> dict[str, object]:
    adam, muon = seconds["AdamW"], seconds["Muon"]
    return {f"{kind.lower()}_ms": [round(1e3 * value, 2) for value in seconds[kind]] for kind in KINDS} | {
        "ratio_of_medians": round(statistics.median(muon) / statistics.median(adam), 3),
        "ratio_of_fastest": round(min(muon) / min(adam), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", default="quickstart.py")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    runs = {kind: setup(load(arguments.config, f"optimizer.type={kind}", "parallel.data=1")) for kind in KINDS}
    batches = {kind: next(run.batches)[0] for kind, run in runs.items()}
    with_reads, update_only = ({kind: [] for kind in KINDS} for _ in range(2))
    precision = runs["AdamW"].cfg.precision.matmul_precision()
    with jax.set_mesh(runs["AdamW"].mesh), jax.default_matmul_precision(precision):
        updates = {kind: update_of(run) for kind, run in runs.items()}
        for number in range(arguments.rounds + 1):
            for kind in KINDS:
                seconds = updates[kind](arguments.steps)
                if number:
                    update_only[kind].append(seconds)
        for number in range(arguments.rounds + 1):
            for kind, run in runs.items():
                seconds = step_round(run, batches[kind], arguments.steps)
                if number:
                    with_reads[kind].append(seconds)
    for run in runs.values():
        run.close()
    size = sum(weight.size for weight in runs["AdamW"].state.params.values())
    outcome.write(
        "optimizer",
        {
            "config": arguments.config,
            "weights": size,
            "device": jax.devices()[0].device_kind,
            "update": medians(update_only),
            "train_step": medians(with_reads),
        },
    )


if __name__ == "__main__":
    main()
