"""megajax.train whose process 1 raises an error of the user's before step 7."""

import os
from itertools import count

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}  # before the loader imports jax

from megajax.command_line.parser import front_door
from megajax.config.errors import UserError
from megajax.data.rows.loader import Loader
from megajax.processes.world import process_index
from megajax.train import main

if __name__ == "__main__":
    numbers, next_batch = count(1), Loader.__next__

    def faulty(loader: Loader) -> tuple:
        if next(numbers) == 7:
            raise UserError("raised on purpose")
        return next_batch(loader)

    if process_index() == 1:
        Loader.__next__ = faulty
    front_door(main)
