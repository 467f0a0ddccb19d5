"""Start several processes of a run on this machine: `python -m megajax.launch --processes=4 -- COMMAND`."""

import os
import resource
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megajax.command_line.parser import Flag, front_door, parse
from megajax.config.bounds import Count, Index, NotNegative
from megajax.config.class_references import resolve
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.faults.unfailing_output import keep_writing
from megajax.launcher.gang import Gang, Port
from megajax.launcher.gang_watch import HangLimits, Timeout
from megajax.launcher.restarts import RestartConfig
from megajax.launcher.supervisor import Supervision, run
from megajax.processes.gpus import installed_gpus, visible_gpus

DESCRIPTION = """Start several processes of one program on this machine, by default one for each GPU, connected over its
loopback address; with --machines, a part of the processes of a run on several machines. If one fails, the others are
stopped, and its exit code is returned; with --max-restarts, all are restarted if that may help.
Everything after -- is the command; `python` in it is replaced by the launcher's interpreter. SIGTERM and Ctrl-C are
forwarded to all processes: a training run saves and exits."""

FILES_PER_PROCESS = 4
"""Open files of the launcher for each process: two pipes, and their other ends while the process starts."""

FLAGS = (
    Flag("processes", Count | None, help="number of processes; default: one for each visible GPU"),
    Flag("devices-per-process", Count | None, help="default: a CPU device, or an equal share of the visible GPUs"),
    Flag("machines", Count, 1, help="number of machines of the run, each with this launcher and as many processes"),
    Flag("machine", int | None, help="index of this machine, from 0; default: JOB_COMPLETION_INDEX of Kubernetes"),
    Flag("coordinator", str | None, help="with --machines: HOST:PORT of machine 0, for the processes of all machines"),
    Flag("log-dir", Path | None, help="write the output of each process to process_N.log in this folder, not here"),
    Flag("coordinator-port", Port | None, help="port at which the processes connect; default: a free port"),
    Flag("max-restarts", Index, 0, help="maximum number of restarts after failures that a restart may fix"),
    Flag("backoff", NotNegative, 1.0, help="seconds before a restart, doubled each time until a checkpoint is saved"),
    Flag("max-backoff", NotNegative, 60.0, help="maximum seconds before a restart"),
    Flag("min-processes", int | None, help="drop processes that keep failing, down to this number; default: never"),
    Flag("watchdog-timeout", Timeout | None, help="seconds without progress of any process: a hang; default: no limit"),
    Flag(
        "beat-timeout",
        Timeout | Literal["auto"] | None,
        "auto",
        help="seconds without a heartbeat of a process: a hang; auto: 60, 300 with --scheduler; none: no limit",
    ),
    Flag("scheduler", help="COMMAND starts the processes itself, as srun or mpirun do: start and restart only COMMAND"),
    Flag("ray", str | None, help="start the processes on a Ray cluster: the address of its head, or auto"),
    Flag("beats", Path | None, help="folder for heartbeats, shared by all machines; default: a local temporary folder"),
)

RAY = "megajax.launcher.ray_processes"
"""The module that starts processes on a Ray cluster, and waits for them as srun does."""

FIELDS = ("max_restarts", "backoff", "max_backoff", "min_processes")
"""Flags that are fields of RestartConfig."""


def main(argv: list[str], devices: Path = Path("/dev")) -> int:
    """Start the processes. devices: folder of device files.

    Exit codes: 0 if all processes exit with 0, else that of the first failure (1 for a signal); 2: bad arguments.

    Raises:
        UserError: invalid arguments, or a process that can't be started.
    """
    own_arguments, command = _split(argv)
    flags = dict(parse(own_arguments, verb="launch", flags=FLAGS, with_config=False, description=DESCRIPTION).flags)
    scheduler, processes, problems = flags["scheduler"], flags["processes"], []
    if flags["ray"] is not None:
        problems = _ray_problems(flags)
        command = command and [sys.executable, "-m", RAY, flags["ray"], str(processes), _devices(flags), *command]
        scheduler, processes, flags["devices_per_process"] = True, None, None
    elif processes is None and not scheduler:
        processes = _one_for_each_gpu(flags["devices_per_process"] or 1, devices)
    gang = Gang(
        command=command,
        processes=processes or 1,
        devices_per_process=flags["devices_per_process"],
        port=flags["coordinator_port"],
        coordinator=flags["coordinator"],
        machines=flags["machines"],
        machine=_machine(flags["machine"], flags["machines"]),
        log_dir=flags["log_dir"],
        scheduler=scheduler,
    )
    restarts = RestartConfig(**{name: flags[name] for name in FIELDS})
    beat = (300.0 if scheduler else 60.0) if flags["beat_timeout"] == "auto" else flags["beat_timeout"]
    limits = HangLimits(beat=beat, progress=flags["watchdog_timeout"])
    problems += [*gang.problems(processes), *restarts.problems(gang.processes)]
    if scheduler and restarts.min_processes is not None:
        problems.append(Problem("--min-processes", "has no effect with --scheduler"))
    if gang.machines > 1 and restarts.max_restarts:
        hint = "what starts the launchers must restart all of them, as a JobSet does"
        problems.append(Problem("--max-restarts", "would restart one of several machines alone", hint))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if gang.processes * FILES_PER_PROCESS > limit:
        message = f"{processes} processes need {FILES_PER_PROCESS} open files each, but the limit of this shell is"
        hint = f"use at most {limit // FILES_PER_PROCESS} on a machine, or raise the limit with ulimit -n"
        problems.append(Problem("--processes", f"{message} {limit}", hint))
    if not command:
        hint = "e.g. python -m megajax.launch --processes=2 -- python -m megajax.train --config=quickstart.py"
        problems.append(Problem("--", "needs a command to start", hint))
    if problems:
        raise ConfigError(problems, "command line")
    return run(gang, Supervision(restarts=restarts, limits=limits, beats=flags["beats"]), _record)


def _ray_problems(flags: Mapping[str, Any]) -> list[Problem]:
    """Problems of flags with --ray."""
    problems = [Problem("--scheduler", "has no meaning with --ray", "remove one of them")] if flags["scheduler"] else []
    if flags["processes"] is None:
        problems.append(Problem("--processes", "must be given with --ray", "the number of processes on all machines"))
    return problems


def _devices(flags: Mapping[str, Any]) -> str:
    """Devices of each process as an argument."""
    return str(flags["devices_per_process"] or "auto")


def _machine(index: int | None, machines: int) -> int:
    """The index of this machine; -1 if it is not known."""
    text = os.environ.get("JOB_COMPLETION_INDEX", "")
    return index if index is not None else 0 if machines == 1 else int(text) if text.isdigit() else -1


def _one_for_each_gpu(share: int, devices: Path) -> int | None:
    """The number of processes with `share` of the visible GPUs, which is printed; None without GPUs.

    Raises UserError if the GPUs cannot be divided so.
    """
    gpus = 0 if os.environ.get("JAX_PLATFORMS") == "cpu" else len(visible_gpus(os.environ, installed_gpus(devices)))
    if not gpus or share < 1:
        return None
    visible = f"{gpus} visible GPU{'s' * (gpus > 1)}"
    if gpus % share:
        raise UserError(f"--devices-per-process={share} does not divide {visible}: give a divisor, or --processes too")
    processes = gpus // share
    text = f"{processes} process{'es' * (processes > 1)} with {share} GPU{'s' * (share > 1)}{' each' * (processes > 1)}"
    print(f"megajax.launch: {visible}, so {text}; --processes=N starts others", file=sys.stderr)
    return processes


def _record(path: Path, name: str, **fields: object) -> None:
    """Append to events.jsonl. Its module is imported only after a failure."""
    resolve("megajax.metrics.event_log:append_event")(path, name, **fields)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's arguments, and the command after --, with this interpreter in place of `python`.

    Raises ConfigError for a command without --, as in torchrun --nproc_per_node=2 train.py.
    """
    split = argv.index("--") if "--" in argv else len(argv)
    own_arguments, command = argv[:split], argv[split + 1 :]
    programs = ("python", "python3")
    starts = (i for i, word in enumerate(own_arguments) if word in (*programs, "-m") or word.endswith(".py"))
    if not command and (start := next(starts, None)) is not None:
        words = argv[start:] if argv[start] in programs else ["python", *argv[start:]]
        hint = f"python -m megajax.launch {shlex.join([*argv[:start], '--', *words])}"
        raise ConfigError([Problem("--", "must stand before the command to start", hint)], "command line")
    return own_arguments, [sys.executable, *command[1:]] if command[:1] in (["python"], ["python3"]) else command


if __name__ == "__main__":
    keep_writing()
    front_door(main)
