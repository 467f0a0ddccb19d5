"""megajax.train in processes that may differ: only one has a full disk, a delay, its own folder, a signal.

DIFFERENCE: the deviation of the second process.
"""

import errno
import os
import time

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}  # Before the checkpoint manager imports jax.

from jax._src import compiler
from jax._src.lib.mlir import ir

from megajax.checkpoint.background_saves import SaveReport
from megajax.checkpoint.local.local_checkpoints import LocalCheckpoints
from megajax.command_line.parser import front_door
from megajax.faults.signals import Signals
from megajax.job import ending
from megajax.processes.world import process_index
from megajax.train import main

if __name__ == "__main__":
    difference, second = os.environ["DIFFERENCE"], process_index() == 1
    if difference == "full disk" and second:

        def write(local: LocalCheckpoints, *arguments: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        LocalCheckpoints._write_own = write
    elif difference == "full disk":
        # This process learns only at the next save that the last one failed.
        def poll(local: LocalCheckpoints) -> list[SaveReport]:
            reports, local._reports = local._reports, []
            return reports

        LocalCheckpoints.poll = poll
    elif difference == "unreadable metrics" and second:
        ending.read_metrics = lambda path: ([], [])
    elif difference == "slow compiler" and second:
        compile_before = compiler.backend_compile_and_load

        def compile_slowly(backend: object, module: ir.Module, *arguments: object, **more: object) -> object:
            if "train_step" in str(module.operation.attributes["sym_name"]):
                time.sleep(40)
            return compile_before(backend, module, *arguments, **more)

        compiler.backend_compile_and_load = compile_slowly
    elif difference == "signal" and second:
        # Arrives when the other process has begun to finish.
        finish = ending.Ending.finish

        def finish_after_signal(self: ending.Ending, last: object) -> None:
            signals: Signals = self._job.signals
            signals._request = None
            signals.request_stop("SIGTERM")
            finish(self, last)

        ending.Ending.finish = finish_after_signal
    front_door(main)
