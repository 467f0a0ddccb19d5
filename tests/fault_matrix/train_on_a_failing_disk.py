"""megajax.train, in whose process `FAILING_PROCESS` no file may exceed 2000 bytes while some saves are made.

FAILING_SAVES: first and last of them, counted from 1, retries included.
"""

import os
import resource

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}  # Before the checkpoint manager imports jax.

from megajax.checkpoint.manager import CheckpointManager
from megajax.command_line.parser import front_door
from megajax.mesh.processes.world import process_index
from megajax.train import main

if __name__ == "__main__":
    first, last = map(int, os.environ["FAILING_SAVES"].split("-"))
    saves = iter(range(1, 1 << 30))
    whole = CheckpointManager.save

    def save(manager: CheckpointManager, *arguments: object) -> bool:
        number = next(saves)
        manager.wait()
        limit = 2000 if first <= number <= last else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return whole(manager, *arguments)

    if process_index() == int(os.environ["FAILING_PROCESS"]):
        CheckpointManager.save = save
    front_door(main)
