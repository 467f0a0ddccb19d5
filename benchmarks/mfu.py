"""Speed of the shipped train step on the devices of this machine: tokens/s, TFLOP/s, MFU, memory, kernels.

Run:  python benchmarks/mfu.py --config=FILE[:function] [--setting=value ...] [--steps=N] [--json[=FILE]]

  --steps=N         timed steps, after untimed warm-up steps (default 20)
  --json[=FILE]     also write JSON; the default file is benchmarks/results/mfu_NAME.json
  --trace=FILE      then trace two further steps: a compressed file for python -m megajax.tools.trace FILE
  --peak-tflops=N   bfloat16 peak of one device, for devices that are not in the table
  --devices=cpu:8   eight virtual CPU devices instead of the devices that jax finds

Settings are those of training (python -m megajax.train --help). No data or tokenizer is loaded: all steps use one batch
of random tokens, and the weights are freshly initialised. MFU is FLOP/s over the published bfloat16 peak, with causal
attention counted as half and in full. A GPU without a known peak is an error (exit code 2); a CPU has no MFU. For
several processes, start each as for training (docs/launch.md).
"""

from pathlib import Path

import outcome

from megajax.command_line.parser import PROCESS_FLAGS, Flag, front_door, parse
from megajax.config.builds import resolve
from megajax.config.errors import UserError
from megajax.mesh.processes.world import process_index
from megajax.mesh.xla import set_process

FLAGS = (
    Flag("steps", int, 20),
    Flag("json", None | bool | Path),
    Flag("trace", Path | None),
    Flag("peak-tflops", float | None),
    # For benchmarks/peers.py: the weights and the batch of the first step, for another trainer to start from.
    Flag("export", Path | None),
    *PROCESS_FLAGS,
)


def main(argv: list[str]) -> int:
    """Read the command line, import jax after that, measure, print.

    Raises:
        UserError: a config or command that can't be measured, or a GPU without a known peak.
    """
    if {"-h", "--help"} & set(argv):
        print(__doc__.strip())
        return 0
    command = parse(argv, verb="mfu", flags=FLAGS)
    flags = command.flags
    if flags["steps"] < 1:
        raise UserError(f"--steps must be at least 1, got {flags['steps']}")
    set_process(command.config.xla)
    start, finish = (resolve(f"megajax.mesh.processes.agreement:{name}") for name in ("start", "finish"))
    start(patience=flags["init_timeout"])
    measure, report, write_trace = (resolve(f"train_speed:{name}") for name in ("measure", "report", "write_trace"))
    figures, bench = measure(
        command.config, steps=flags["steps"], peak_tflops=flags["peak_tflops"], export=flags["export"]
    )
    if process_index() == 0:
        print(report(figures))
        if flags["json"]:
            outcome.write_to(outcome.file_for("mfu", flags["json"], argv), figures)
    # Last, so that a profiler that fails does not take the figures with it.
    if flags["trace"] is not None:
        write_trace(bench, flags["trace"])
        print(f"trace: {flags['trace']}, {flags['trace'].stat().st_size / 2**20:.1f} MiB")
    finish()
    return 0


if __name__ == "__main__":
    front_door(main)
