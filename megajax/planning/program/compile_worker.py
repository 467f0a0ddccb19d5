"""Compile one plan in a process of its own: `python -m megajax.planning.program.compile_worker TASK.json PLAN.json`."""

import json
from pathlib import Path

from megajax.command_line import front_door
from megajax.config import load
from megajax.config.builds import resolve
from megajax.planning.cost.costs import Device
from megajax.planning.program.deviceless import prepare
from megajax.planning.program.devices import Cluster


def main(argv: list[str]) -> int:
    """The first file names a config file and has cluster and device; the second gets the plan.

    Raises UserError as compiling the plan does.
    """
    task = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    prepare()  # before what imports jax
    plan = resolve("megajax.planning.program.train_step:compile_train_step")(
        load(task["config"]), Cluster(*task["cluster"])
    )
    resolve("megajax.planning.report:write_json")(plan, Path(argv[1]), Device(**task["device"]))
    return 0


if __name__ == "__main__":
    front_door(main)
