"""Run by test_crash.py: a process that saves in a loop is killed at random moments, many times over.

Every trial is a fork of a process that has imported JAX but not started it, so that a trial takes a second. Each starts
from the newest intact checkpoint, checks every element of what it restored, and saves on until it is killed. Prints
a JSON line per trial.

Modes: asynchronous and synchronous saves; `failing`, whose saves fail now and then in any of their stages; `retention`,
which kills itself while it deletes an old step, after any number of its files.
"""

import errno
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from megajax.checkpoint import manifest
from megajax.checkpoint.background_saves import CheckpointError
from megajax.checkpoint.config import CheckpointConfig
from megajax.storage import disk

SHAPES = {"a": (256, 1024), "b": (64,), "c": (32, 512)}


def state_of(step: int) -> dict:
    return {name: jnp.full(shape, step, jnp.float32) for name, shape in SHAPES.items()} | {"step": jnp.int32(step)}


def fail_now_and_then(draw: random.Random) -> None:
    """A full disk at a stage of about every third save."""
    stages = {"hash_files": manifest, "write_manifest": manifest, "write_durably": disk, "flush_to_disk": disk}
    for name, module in stages.items():
        original = getattr(module, name)

        def failing(*arguments, original=original, **options):
            if draw.random() < 0.03:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*arguments, **options)

        setattr(module, name, failing)


def die_in_a_deletion(draw: random.Random, ready: int) -> None:
    """SIGKILL in the middle of the deletion of an old step, now and then."""
    original = shutil.rmtree

    def dying(path: Path, *arguments, **options):
        if str(path).endswith(".deleting") and draw.random() < 0.5:
            files = [file for file in sorted(Path(path).rglob("*")) if file.is_file()]
            for file in draw.sample(files, draw.randrange(len(files) + 1)):
                file.unlink()
            os.write(ready, b"dying\n")
            os.kill(os.getpid(), signal.SIGKILL)
        original(path, *arguments, **options)

    shutil.rmtree = dying


def attempt(folder: Path, mode: str, ready: int, draw: random.Random) -> None:
    if mode == "failing":
        fail_now_and_then(draw)
    with CheckpointConfig(keep_last=2, asynchronous=mode != "synchronous").build(folder) as manager:
        actual = manager.start()
        step = 0
        if actual is not None:
            source, step = actual
            state, meta = source.restore(step, jax.eval_shape(lambda: state_of(0)))
            assert meta == {"step": step}
            for name, expected in state_of(step).items():
                np.testing.assert_array_equal(np.asarray(state[name]), np.asarray(expected))
        os.write(ready, f"{step}\n".encode())
        if mode == "retention":  # not before: the start deletes what the attempt before left
            die_in_a_deletion(draw, ready)
        while True:
            step += 1
            try:
                manager.save(step, state_of(step), {"step": step})
                if manager.poll():
                    os.write(ready, b"committed\n")
            except CheckpointError:
                os.write(ready, b"failed\n")


def trial(folder: Path, mode: str, commits: int, delay: float, draw: random.Random) -> dict:
    """One attempt, killed `delay` seconds after it had restored what it found and committed that many steps."""
    seed = draw.random()
    reader, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            attempt(folder, mode, writing, random.Random(seed))
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reader) as pipe:
        started_from = pipe.readline()
        if mode == "retention" and commits:
            while pipe.readline() not in ("dying\n", ""):
                pass
        else:
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
    folder, trials, mode, seed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    draw = random.Random(int(seed))
    for _ in range(trials):
        print(json.dumps(trial(folder, mode, draw.choice((0, 1, 1)), draw.uniform(0.0, 0.3), draw)), flush=True)
    print(json.dumps(trial(folder, mode, 0, 0.0, draw)), flush=True)


if __name__ == "__main__":
    main()
