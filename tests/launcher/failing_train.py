"""megajax.train with an event in process 1: `crash`, `user` (a wrong input) or `late` (at the end)."""

import os
import sys
import time

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}  # before the loader imports jax

from megajax.command_line.parser import front_door
from megajax.config.errors import UserError
from megajax.data.rows.loader import Loader
from megajax.mesh.processes import agreement as processes
from megajax.mesh.processes.world import process_index
from megajax.train import main

LATE_SECONDS = 6.0


def fail_at(step: int, error: Exception) -> None:
    """Make the loader raise instead of returning the batch of `step`."""
    numbers = iter(range(1, 1 << 30))
    next_batch = Loader.__next__

    def faulty(loader: Loader) -> tuple:
        if next(numbers) == step:
            raise error
        return next_batch(loader)

    Loader.__next__ = faulty


def come_late() -> None:
    """Make this process the last to finish."""
    finish = processes.finish

    def late() -> None:
        time.sleep(LATE_SECONDS)
        print("process 1 is late", flush=True)
        finish()

    processes.finish = late


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    if process_index() == 1:
        if kind == "late":
            come_late()
        else:
            fail_at(7, (UserError if kind == "user" else RuntimeError)("raised on purpose"))
    front_door(main)
