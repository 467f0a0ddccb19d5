"""megajax.train in which the process HANGING_PROCESS hangs at HANGING_PLACE: in a function, or in an fsync.

HANGING_PLACE is MODULE:NAME, or fsync:REGEX for the path of the file.
"""

import importlib
import os
import re
import time
from pathlib import Path

from megajax.command_line.parser import front_door
from megajax.processes.world import process_index
from megajax.train import main


def hang(*arguments: object, **keywords: object) -> None:
    time.sleep(600)


def stick(pattern: str) -> None:
    """Files whose path matches never reach the disk."""
    flush = os.fsync

    def fsync(file: int) -> None:
        if re.search(pattern, str(Path(f"/proc/self/fd/{file}").readlink())):
            hang()
        flush(file)

    os.fsync = fsync


if __name__ == "__main__":
    if process_index() == int(os.environ["HANGING_PROCESS"]):
        module, _, name = os.environ["HANGING_PLACE"].partition(":")
        # Not before the command line has set jax's devices.
        resolve = importlib.import_module("megajax.train").resolve

        def patched(path: str) -> object:
            value = resolve(path)
            if path == "megajax.job.job:train":
                stick(name) if module == "fsync" else setattr(importlib.import_module(module), name, hang)
            return value

        importlib.import_module("megajax.train").resolve = patched
    front_door(main)
