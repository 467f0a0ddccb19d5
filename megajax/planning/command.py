"""What `python -m megajax.plan --config` does: its flags, and the plan they ask for, compiled or by formula."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.config.builds import resolve
from megajax.config.command_line import Flag
from megajax.config.errors import Problem, UserError

FLAGS = (
    Flag("devices", str | None, help="GPUs to plan for, as GPU:N: a100-40gb, a100 (80 GB), h100, h200, b200 or gb200"),
    Flag("gpus-per-node", int | None, help="GPUs that NVLink connects; 8, of gb200 72, unless given"),
    Flag("formula", help="compile nothing: memory, traffic and speed by formulas"),
    Flag("device-file", Path | None, help="with --formula, YAML that describes another device"),
    Flag("calibration", Path | None, help="what benchmarks/calibrate.py measured, in place of what is known"),
    Flag("nvlink", float | None, help="GB/s from a GPU to others of its node, one direction"),
    Flag("network", float | None, help="GB/s from a GPU to other nodes, one direction"),
    Flag("json", Path | None, help="also write it into this file"),
)


def count_devices(flags: Mapping[str, Any]) -> tuple[int | None, list[Problem]]:
    """Devices that the flags ask for, and what is wrong with them. Raises UserError for an unreadable file."""
    cluster, problems = resolve("megajax.planning.formula:read_target")(flags)
    return None if cluster is None else cluster.devices, problems


def plan(config: Any, flags: Mapping[str, Any]) -> None:
    """Print a config's plan and, with --json, write it. Raises UserError for what the user has to change."""
    cluster, _ = resolve("megajax.planning.formula:read_target")(flags)
    device = resolve("megajax.planning.formula:device_of")(cluster, flags)
    if flags["formula"]:
        found = resolve("megajax.planning.formula:plan")(config, cluster, device)
        resolve("megajax.planning.formula:show")(found)
        if flags["json"] is not None:
            resolve("megajax.planning.formula:write_json")(found, flags["json"])
        return
    if cluster.name not in resolve("megajax.planning.devices:GPUS"):
        raise UserError(f"{cluster.name} is described in --device-file, which the compiler can't use: give --formula")
    resolve("megajax.planning.absent:prepare")()
    compiled = resolve("megajax.planning.train_step:compile_train_step")(config, cluster)
    resolve("megajax.planning.report:show")(compiled, device=device)
    if flags["json"] is not None:
        resolve("megajax.planning.report:write_json")(compiled, flags["json"], device)
