"""The flags of verbs that spread their work over replicas of a model on a Ray cluster."""

from collections.abc import Mapping
from typing import Any

from megajax.command_line.devices import count_processes
from megajax.command_line.parser import Flag
from megajax.config.errors import Problem

REPLICA_FLAGS = (
    Flag("ray", str | None, help="spread the work over a Ray cluster whose machines share files: the address of its "
         "head, or auto"),
    Flag("replicas", int | None, help="with --ray: copies of the model; default: as many as the cluster has GPUs for, "
         "without GPUs one for each machine"),
    Flag("replica-gpus", int, 1, help="GPUs of each copy on a cluster with GPUs"),
)  # fmt: skip


def replica_problems(flags: Mapping[str, Any]) -> list[Problem]:
    """Problems of these flags."""
    if flags["ray"] is None:
        is_set = flags["replicas"] is not None or flags["replica_gpus"] != 1
        return [Problem("--replicas", "has no meaning without --ray=ADDRESS")] if is_set else []
    problems = [
        Problem(f"--{name.replace('_', '-')}", f"must be at least 1, got {flags[name]}")
        for name in ("replicas", "replica_gpus")
        if flags[name] is not None and flags[name] < 1
    ]
    if count_processes() != 1:
        hint = "each replica is one process, which Ray starts: remove the launcher and the flags of several processes"
        problems.append(Problem("--ray", "is given to one of several processes", hint))
    return problems
