"""Correctness and speed of single kernels: attention, loss, norms, matmuls, grouped matmuls, state-space layers.

Run:  python benchmarks/kernels.py [--parts=attention,grouped] [--seconds=0.3] [--json[=FILE]]

  --parts=LIST      of attention, faults, loss, norm, matmul, grouped, state_space (default: all)
  --seconds=N       duration of the timed calls for each figure
  --json[=FILE]     also write JSON; the default file is benchmarks/results/kernels.json
  --peak-tflops=N   bfloat16 peak of a device that is not in the table
  --devices=cpu     on CPU: tiny sizes, no share of a peak

Each result and gradient is compared with a float32 reference on the same inputs by relative Euclidean error; an error
above TOLERANCE makes the exit code 1. Calls are timed in sequence, and the host waits once per group. The minimum time
is the larger of operations over the published peak and bytes over the published bandwidth, with each input read once
and each output written once. Causal attention counts half the square; its backward pass counts five matmuls for two of
the forward pass, because scores are recomputed. Uses one device, except for the loss (see benchmarks/loss.py).
"""

from pathlib import Path
from typing import Any

import outcome

from megajax.command_line.parser import Flag, front_door, parse
from megajax.config.builds import resolve
from megajax.config.errors import UserError

PARTS = ("attention", "faults", "loss", "norm", "matmul", "grouped", "state_space")
FLAGS = (
    Flag("parts", tuple[str, ...], PARTS),
    Flag("seconds", float, 0.3),
    Flag("json", None | bool | Path),
    Flag("peak-tflops", float | None),
)


def main(argv: list[str]) -> int:
    """Measure the parts asked for. Returns 1 where a result is wrong.

    Raises:
        UserError: an unknown part, or a GPU without a known peak.
    """
    if {"-h", "--help"} & set(argv):
        print(__doc__.strip())
        return 0
    flags = parse(argv, verb="kernels", flags=FLAGS, with_config=False).flags
    if unknown := set(flags["parts"]) - set(PARTS):
        raise UserError(f"--parts={','.join(sorted(unknown))}: unknown part; choose from {', '.join(PARTS)}")
    table = resolve("kernel_cases:table")
    path = None
    if flags["json"]:
        path = outcome.RESULTS / "kernels.json" if flags["json"] is True else Path(flags["json"])
    figures: dict[str, Any] = {"parts": {}}
    for part in flags["parts"]:
        figures["parts"][part] = []
        rows = table(part, seconds=flags["seconds"], peak_tflops=flags["peak_tflops"])
        for figures["device"], text, row in rows:
            print(text, flush=True)
            figures["parts"][part].append(row)
            # After each: an end by force leaves what there is.
            if path is not None:
                outcome.write_to(path, figures, announce=False)
    if path is not None:
        print(f"written: {path}")
    incorrect = [record["name"] for records in figures["parts"].values() for record in records if not record["right"]]
    print(f"on {figures['device']}; " + (f"WRONG: {', '.join(incorrect)}" if incorrect else "all results correct"))
    return 1 if incorrect else 0


if __name__ == "__main__":
    front_door(main)
