"""megajax.train whose line of step 3 in metrics.jsonl is never written: its file system does not answer."""

import os
import time

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}

from megajax.command_line.parser import front_door
from megajax.metrics.line_file import LineFile
from megajax.train import main

if __name__ == "__main__":
    whole = LineFile.write

    def write(file: LineFile, line: str) -> None:
        if line.startswith('{"step": 3,'):
            time.sleep(600)
        whole(file, line)

    LineFile.write = write
    front_door(main)
