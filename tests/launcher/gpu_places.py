"""A process of a machine whose device files are in a folder: it prints its GPUs and the NCCL variables, and ends.

gpu_places.py FOLDER. The processes meet as those of a run do; jax, which would look for the GPUs, is not started.
"""

import json
import sys
from pathlib import Path

import jax

from megajax.config.errors import UserError
from megajax.processes import start as processes
from megajax.processes.gpus import nccl_variables

told = {}
jax.distributed.initialize = lambda *_, local_device_ids, **__: told.update(gpus=local_device_ids)
try:
    processes.start(devices=Path(sys.argv[1]), patience=60.0)
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(error.code)
print(json.dumps([told.get("gpus"), nccl_variables()]))
