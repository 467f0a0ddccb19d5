"""Compares the gradients of every way to dispatch tokens to experts, on the devices of this machine.

Run:  python benchmarks/expert_ways.py --config=FILE[:function] [--setting=value ...] [--json=FILE]

  --json=FILE       also write JSON
  --devices=cpu:4   four virtual CPU devices instead of the devices that jax finds

The gradients of one global batch of random tokens are computed in the shipped program, with the shipped compiler
options, for dispatch.way=gather, ragged and capacity in float32 and bfloat16, with parallel.expert of all devices. They
must agree with those of gather. Returns 1 if they don't, or if one is not finite. With one device nothing is exchanged,
so nothing is compared.
"""

from pathlib import Path
from typing import Any

import outcome

from megajax.command_line.parser import PROCESS_FLAGS, Flag, front_door, parse
from megajax.config.builds import resolve
from megajax.mesh.processes.world import process_index
from megajax.mesh.xla import set_process

FLAGS = (Flag("json", None | Path), *PROCESS_FLAGS)


def main(argv: list[str]) -> int:
    """Read the command line, import jax after that, compare, print.

    Raises:
        UserError: a config without experts, or one that does not fit the devices.
    """
    if {"-h", "--help"} & set(argv):
        print(__doc__.strip())
        return 0
    command = parse(argv, verb="expert_ways", flags=FLAGS)
    set_process(command.config.xla)
    start, finish = (resolve(f"megajax.mesh.processes.agreement:{name}") for name in ("start", "finish"))
    start(patience=command.flags["init_timeout"])
    compare = resolve("expert_gradients:compare")
    figures: dict[str, Any] = {"rows": []}
    for figures["device"], text, row in compare(command.config):
        figures["rows"].append(row)
        if process_index() == 0:
            print(text, flush=True)
            if command.flags["json"]:
                outcome.write_to(command.flags["json"], figures, announce=False)
    if not figures["rows"]:
        print("one device exchanges nothing: nothing was compared; run this on a machine with several")
        if command.flags["json"]:
            outcome.write_to(command.flags["json"], figures)
    finish()
    return int(any(not row["right"] for row in figures["rows"]))


if __name__ == "__main__":
    front_door(main)
