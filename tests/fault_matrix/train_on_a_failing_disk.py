"""megajax.train, in whose process 1 no file may exceed 2000 bytes from the second save on."""

import os
import resource
from itertools import count

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}  # Before the checkpoint manager imports jax.

from megajax.checkpoint.checkpoint_manager import CheckpointManager
from megajax.command_line.parser import front_door
from megajax.processes.world import process_index
from megajax.train import main

if __name__ == "__main__":
    saves, whole = count(1), CheckpointManager.save

    def save(manager: CheckpointManager, *arguments: object) -> bool:
        manager.wait()
        limit = 2000 if next(saves) > 1 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return whole(manager, *arguments)

    if process_index() == 1:
        CheckpointManager.save = save
    front_door(main)
