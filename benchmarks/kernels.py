"""Attention, loss, norms and matmuls alone, of experts too: are they right, how far from what a device can do at most?

Run:  python benchmarks/kernels.py [--parts=attention,grouped] [--seconds=0.3] [--json[=FILE]]

  --parts=LIST      of attention, loss, norm, matmul, grouped, state_space (default: all)
  --seconds=N       of timed calls for each figure
  --json[=FILE]     write it down too; without a name into benchmarks/results/kernels.json
  --peak-tflops=N   bfloat16 peak of a device that is not in the table
  --devices=cpu     on CPU: tiny sizes, no share of a peak

Each is compared with a reference in float32 on the same inputs: relative error of the result and of every gradient, by
Euclidean norms; one above TOLERANCE ends the program with 1. Times are of calls one after another, waited for in
groups. The floor is the larger of operations over the published peak and bytes over the published bandwidth, each input
read and each output written once; causal attention counts half the square, its backward five matmuls to the forward's
two, because scores are computed again. One device; the loss on all there are (see benchmarks/loss.py).
"""

from pathlib import Path
from typing import Any

import outcome

from megajax.command_line import Flag, front_door, parse
from megajax.config.builds import resolve
from megajax.config.errors import UserError

PARTS = ("attention", "loss", "norm", "matmul", "grouped", "state_space")
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
        raise UserError(f"--parts={','.join(sorted(unknown))}: no such part; there are {', '.join(PARTS)}")
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
    print(f"on {figures['device']}; " + (f"WRONG: {', '.join(incorrect)}" if incorrect else "all results right"))
    return 1 if incorrect else 0


if __name__ == "__main__":
    front_door(main)
