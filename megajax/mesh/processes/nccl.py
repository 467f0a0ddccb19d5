"""Variables of NCCL that depend on how many GPUs a process drives; like the options in `megajax.mesh.xla`."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

SET = "MEGAJAX_NCCL"
"""Variable that names the variables of NCCL which MegaJAX has set, separated by commas."""


class Variable(NamedTuple):
    """A variable of NCCL."""

    name: str
    value: str
    why: str


SEVERAL_GPUS = Variable(
    "NCCL_LAUNCH_MODE",
    "GROUP",
    "launches the kernels of all GPUs of a process together; otherwise a call that waits for a GPU may block the rest",
)
ONE_GPU = Variable(
    "NCCL_LAUNCH_ORDER_IMPLICIT",
    "1",
    "runs the collectives of different communicators in the order in which the process launches them",
)


def set_variables(gpus: int, *, processes: int, environment: Any = os.environ) -> None:
    """Sets the variable for a process that drives so many GPUs, unless the user has set it. Before jax starts."""
    variable = SEVERAL_GPUS if gpus > 1 else ONE_GPU if gpus == 1 and processes > 1 else None
    if variable is not None and variable.name not in environment:
        environment[variable.name] = variable.value
        environment[SET] = ",".join([*filter(None, environment.get(SET, "").split(",")), variable.name])


def variables(environment: Mapping[str, str] = os.environ) -> str:
    """The variables of NCCL in force, with those that MegaJAX set marked; "" without any."""
    set_by_megajax = environment.get(SET, "").split(",")
    return ", ".join(
        f"{name}={value} ({'MegaJAX' if name in set_by_megajax else 'environment'})"
        for name, value in sorted(environment.items())
        if name.startswith("NCCL_")
    )
