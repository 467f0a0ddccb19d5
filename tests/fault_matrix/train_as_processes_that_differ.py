"""megajax.train in processes that may differ: one compiles slowly, or can't read the metrics.

DIFFERENCE: the deviation of the second process.
"""

import os
import time

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}  # Before the checkpoint manager imports jax.

from jax._src import compiler
from jax._src.lib.mlir import ir

from megajax.command_line.parser import front_door
from megajax.job import ending
from megajax.processes.world import process_index
from megajax.train import main

if __name__ == "__main__":
    difference, second = os.environ["DIFFERENCE"], process_index() == 1
    if difference == "unreadable metrics" and second:
        ending.read_metrics = lambda path: ([], [])
    elif difference == "slow compiler" and second:
        compile_before = compiler.backend_compile_and_load

        def compile_slowly(backend: object, module: ir.Module, *arguments: object, **more: object) -> object:
            if "train_step" in str(module.operation.attributes["sym_name"]):
                time.sleep(40)
            return compile_before(backend, module, *arguments, **more)

        compiler.backend_compile_and_load = compile_slowly
    front_door(main)
