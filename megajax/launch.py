"""Start several processes of a run on this machine: `python -m megajax.launch --processes=4 -- COMMAND`."""

import resource
import sys
from pathlib import Path
from typing import Any, Literal

from megajax.command_line import Flag, front_door, parse
from megajax.config.builds import resolve
from megajax.config.errors import ConfigError, Problem
from megajax.resilience.gang import Gang
from megajax.resilience.gang_watch import Limits
from megajax.resilience.restarts import RestartConfig
from megajax.resilience.supervisor import Supervision, run

DESCRIPTION = """Start several processes of one program on this machine, connected over its loopback address. When one
fails, the others are stopped, and what it ended with is the exit code; with --max-restarts, all are started again if
that may help. Everything after -- is the command; `python` there means the interpreter that runs the launcher. SIGTERM
and Ctrl-C are passed on to all: a training run saves and ends."""

FILES_PER_PROCESS = 4
"""Open files of the launcher for each process: its two pipes, while it starts also their other ends."""

FLAGS = (
    Flag("processes", int | None, help="how many; must be given without --scheduler"),
    Flag("devices-per-process", int | None, help="devices of each; none: one CPU device, or a share of the GPUs"),
    Flag("log-dir", Path | None, help="write each process's output to process_N.log there instead of showing it"),
    Flag("coordinator-port", int | None, help="port at which the processes meet; none: one that is free"),
    Flag("max-restarts", int, 0, help="start all again so many times after failures that a restart may mend"),
    Flag("backoff", float, 1.0, help="seconds before a restart, doubled each time until a new checkpoint is saved"),
    Flag("max-backoff", float, 60.0, help="the longest of these waits"),
    Flag("min-processes", int | None, help="leave out a process that keeps failing, while so many remain; none: never"),
    Flag("watchdog-timeout", float | None, help="seconds without progress of any process: a hang; none: never"),
    Flag(
        "beat-timeout",
        float | Literal["auto"] | None,
        "auto",
        help="seconds without a heartbeat of a process: a hang; auto: 60, 300 with --scheduler; none: never",
    ),
    Flag("scheduler", help="COMMAND starts the processes itself, e.g. srun or mpirun: start it once, restart it"),
    Flag(
        "beats", Path | None, help="folder for heartbeats that all machines share; none: a temporary one, of this one"
    ),
)

FIELDS = ("max_restarts", "backoff", "max_backoff", "min_processes")
"""Flags that are fields of RestartConfig."""


def main(argv: list[str]) -> int:
    """Exit codes: 0 if all ended with 0, else that of the first to fail (1 for a signal); 2 for bad arguments.

    Raises:
        UserError: invalid arguments, or a process that can't be started.
    """
    own, command = _split(argv)
    asked = parse(own, verb="launch", flags=FLAGS, with_config=False, description=DESCRIPTION).flags
    scheduler, processes = asked["scheduler"], asked["processes"]
    gang = Gang(
        command=command,
        processes=processes or 1,
        devices_per_process=asked["devices_per_process"],
        port=asked["coordinator_port"],
        log_dir=asked["log_dir"],
        scheduler=scheduler,
    )
    restarts = RestartConfig(**{name: asked[name] for name in FIELDS})
    beat = (300.0 if scheduler else 60.0) if asked["beat_timeout"] == "auto" else asked["beat_timeout"]
    limits = Limits(beat=beat, progress=asked["watchdog_timeout"])
    problems = [*gang.problems(processes), *restarts.problems(gang.processes), *limits.problems()]
    if scheduler and restarts.min_processes is not None:
        problems.append(Problem("--min-processes", "has no meaning with --scheduler"))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if gang.processes * FILES_PER_PROCESS > limit:
        what = f"{processes} processes need {FILES_PER_PROCESS} open files each, the limit of this shell is"
        hint = f"use at most {limit // FILES_PER_PROCESS} on a machine, or raise the limit with ulimit -n"
        problems.append(Problem("--processes", f"{what} {limit}", hint))
    if not command:
        hint = "e.g. python -m megajax.launch --processes=2 -- python -m megajax.train --config=quickstart.py"
        problems.append(Problem("--", "no command to start", hint))
    if problems:
        raise ConfigError(problems, "command line")
    return run(gang, Supervision(restarts=restarts, limits=limits, beats=asked["beats"]), _record)


def _record(path: Path, name: str, **fields: Any) -> None:
    """Append to events.jsonl; what that needs is imported only when something has failed."""
    resolve("megajax.metrics.event_log:append_event")(path, name, **fields)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's own arguments, and the command after the dashes, in which `python` is this interpreter."""
    split = argv.index("--") if "--" in argv else len(argv)
    own, command = argv[:split], argv[split + 1 :]
    return own, [sys.executable, *command[1:]] if command[:1] in (["python"], ["python3"]) else command


if __name__ == "__main__":
    front_door(main)
