"""Cost of the checks for silent corruption: time of a state hash and of a recomputed step, relative to a step.

Run:  python benchmarks/integrity.py [--rounds=5] [--devices=2]

Runs on CPU devices with replicated data parallelism, so that the whole state has copies. Other programs may call
`overheads`. Prints JSON: seconds, and the share of time if the check runs every 100 steps (hash) or 1000 (recomputed).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import jax

from megajax.config import load
from megajax.faults.integrity_config import RecomputeConfig
from megajax.job.integrity.recompute import CheckGradients
from megajax.job.integrity.replicas import state_hash
from megajax.training import setup
from megajax.training.session import Run


def median_seconds(call: Callable[[], object], rounds: int) -> float:
    """Of a call, after one that is not counted."""
    call()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def overheads(run: Run, rounds: int) -> dict[str, float]:
    """Seconds of a step, of a hash and of a recomputed step, and their shares."""
    steps = [info.seconds for info in run.steps(rounds + 2)]
    step, hashed = statistics.median(steps[2:]), state_hash(run.program)
    check = CheckGradients(RecomputeConfig(every=1), run, print, print, ())
    with jax.set_mesh(run.mesh):
        hash_seconds = median_seconds(lambda: hashed(run.state), rounds)
    recompute_seconds = median_seconds(lambda: check.verdict(run, run.step), rounds)
    return {
        "bytes_hashed_per_device": sum(leaf.bytes for leaf in hashed.leaves),
        "bytes_with_copies_per_device": sum(leaf.bytes for leaf in hashed.leaves if leaf.copies(run.mesh) > 1),
        "step_seconds": step,
        "hash_seconds": hash_seconds,
        "recompute_seconds": recompute_seconds,
        "hash_every_100": hash_seconds / step / 100,
        "recompute_every_1000": recompute_seconds / step / 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", default="gpt3.py:debug")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    run = setup(load(args.config, "parallel.data_sharding=replicate", f"parallel.data={args.devices}"))
    print(json.dumps(overheads(run, args.rounds), indent=1))
    run.close()


if __name__ == "__main__":
    main()
