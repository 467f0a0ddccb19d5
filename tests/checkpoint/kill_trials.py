"""Run by test_crash.py: a process that saves in a loop is killed at random moments, many times over.

Every trial is a fork of a process that has imported JAX but not started it, so that a trial takes a second. Each starts
from the newest whole checkpoint, checks every element of what it restored, and saves on until it is killed. Prints
a JSON line per trial.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.config import CheckpointConfig

SHAPES = {"a": (256, 1024), "b": (64,), "c": (32, 512)}


def state_of(step: int) -> dict:
    return {name: jnp.full(shape, step, jnp.float32) for name, shape in SHAPES.items()} | {"step": jnp.int32(step)}


def attempt(folder: Path, asynchronous: bool, ready: int) -> None:
    with CheckpointConfig(keep_last=2, asynchronous=asynchronous).build(folder) as manager:
        actual = manager.start()
        step = 0
        if actual is not None:
            source, step = actual
            state, meta = source.restore(step, jax.eval_shape(lambda: state_of(0)))
            assert meta == {"step": step}
            for name, wanted in state_of(step).items():
                np.testing.assert_array_equal(np.asarray(state[name]), np.asarray(wanted))
        os.write(ready, f"{step}\n".encode())
        while True:
            step += 1
            manager.save(step, state_of(step), {"step": step})
            if manager.poll():
                os.write(ready, b"committed\n")


def trial(folder: Path, asynchronous: bool, commits: int, delay: float) -> dict:
    """One attempt, killed `delay` seconds after it had restored what it found and committed that many steps."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            attempt(folder, asynchronous, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        started_from = pipe.readline()
        for _ in range(commits):
            pipe.readline()
        time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    return {
        "ok": started_from != "" and os.WIFSIGNALED(status),
        "started_from": int(started_from or -1),
        "in_the_middle": [name for name in names if name.endswith((".saving", ".deleting"))],
        "damaged": [name for name in names if ".damaged" in name],
    }


def main() -> None:
    folder, trials, asynchronous, seed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "asynchronous", sys.argv[4]
    draw = random.Random(int(seed))
    for _ in range(trials):
        print(json.dumps(trial(folder, asynchronous, draw.choice((0, 1, 1)), draw.uniform(0.0, 0.3))), flush=True)
    print(json.dumps(trial(folder, asynchronous, 0, 0.0)), flush=True)


if __name__ == "__main__":
    main()
