"""Start several processes of a run on this machine: `python -m megajax.launch --processes=4 -- COMMAND`."""

import resource
import sys
from pathlib import Path

from megajax.command_line import Flag, front_door, parse
from megajax.config.errors import ConfigError, Problem
from megajax.resilience.supervisor import Gang, run

DESCRIPTION = """Start several processes of one program on this machine, connected over its loopback address. When one
fails, the others are stopped, and what it ended with is the exit code. Everything after -- is the command; `python`
there means the interpreter that runs the launcher. SIGTERM and Ctrl-C are passed on to all: a training run saves and
ends."""

FILES_PER_PROCESS = 4
"""Open files of the launcher for each process: its two pipes, while it starts also their other ends."""

FLAGS = (
    Flag("processes", int, required=True, help="how many"),
    Flag("devices-per-process", int | None, help="devices of each; none: one CPU device, or a share of the GPUs"),
    Flag("log-dir", Path | None, help="write each process's output to process_N.log there instead of showing it"),
    Flag("coordinator-port", int | None, help="port at which the processes meet; none: one that is free"),
)


def main(argv: list[str]) -> int:
    """Exit codes: 0 if all ended with 0, else that of the first to fail (1 for a signal); 2 for bad arguments.

    Raises:
        UserError: invalid arguments, or a process that can't be started.
    """
    own, command = _split(argv)
    asked = parse(own, verb="launch", flags=FLAGS, with_config=False, description=DESCRIPTION).flags
    port = asked["coordinator_port"]
    problems = [
        Problem(f"--{name}", f"must be at least 1, got {value}")
        for name, value in (("processes", asked["processes"]), ("devices-per-process", asked["devices_per_process"]))
        if value is not None and value < 1
    ]
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if asked["processes"] * FILES_PER_PROCESS > limit:
        what = f"{asked['processes']} processes need {FILES_PER_PROCESS} open files each, the limit of this shell is"
        hint = f"use at most {limit // FILES_PER_PROCESS} on a machine, or raise the limit with ulimit -n"
        problems.append(Problem("--processes", f"{what} {limit}", hint))
    if port is not None and not 0 < port < 65536:
        problems.append(Problem("--coordinator-port", f"must be a port, 1 to 65535, got {port}"))
    if not command:
        hint = "e.g. python -m megajax.launch --processes=2 -- python -m megajax.train --config=quickstart.py"
        problems.append(Problem("--", "no command to start", hint))
    if problems:
        raise ConfigError(problems, "command line")
    return run(
        Gang(
            command=command,
            processes=asked["processes"],
            devices_per_process=asked["devices_per_process"],
            port=port,
            log_dir=asked["log_dir"],
        )
    )


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's own arguments, and the command after the dashes, in which `python` is this interpreter."""
    split = argv.index("--") if "--" in argv else len(argv)
    own, command = argv[:split], argv[split + 1 :]
    return own, [sys.executable, *command[1:]] if command[:1] in (["python"], ["python3"]) else command


if __name__ == "__main__":
    front_door(main)
