"""Calls reward functions: JSON lines of tasks on its standard input, of results on its output.

`python -m megajax.tuning.reward_worker FUNCTION …` imports neither jax nor the rest of MegaJAX. It is two processes:
one calls the functions, and a guard kills everything that they have started as soon as that process or the process that
asks ends, or the guard receives END.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megajax.config.class_references import resolve

DIES_WITH_PARENT, ADOPTS_ORPHANS = 1, 36
"""PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of Linux."""
LOOK_SECONDS = 0.5
"""Time between looks whether the process that asks still exists."""
KILL_SECONDS = 3.0
"""Limit of the time until everything that functions have started has ended."""
DETAIL = 2**14
"""Limit of the description of a failure, characters."""
END = signal.SIGVTALRM
"""Ends the guard. Nobody else sends it."""
WATCHED = {signal.SIGCHLD, signal.SIGALRM, END}
STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
"""Schedulers send these to all processes of a job. The run ends by itself, after rewards that it still needs."""


def main(references: Sequence[str]) -> int:
    """Start the process that answers tasks, and guard it -> its exit code."""
    asking, guard = os.getppid(), os.getpid()
    process_control(ADOPTS_ORPHANS, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED | STOPS)
    worker = os.fork()
    if worker == 0:
        process_control(DIES_WITH_PARENT, signal.SIGKILL)
        os.setsid()  # functions may signal their process group
        for number in STOPS:
            signal.signal(number, partial(end_a_copy, os.getpid()))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED | STOPS)
        if os.getppid() == guard:
            answer_tasks(references)
        os._exit(0)
    for descriptor in (0, 1):  # results end with the process that writes them
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)
    ended = dict[int, int]()
    while worker not in ended and os.getppid() == asking and signal.sigwait(WATCHED) != END:
        ended |= reaped()
    deadline = time.monotonic() + KILL_SECONDS
    while (alive := descendants(worker, ended)) and time.monotonic() < deadline:
        for process in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
        ended |= reaped()
    code = os.waitstatus_to_exitcode(ended.get(worker, 0))
    return 128 - code if code < 0 else code


def end_a_copy(worker: int, number: int, frame: object) -> None:
    """The handler of STOPS: they end only copies by `os.fork`, such as the processes of a pool."""
    if os.getpid() != worker:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def process_control(option: int, value: int) -> None:
    """prctl of Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def reaped() -> dict[int, int]:
    """Children that have ended -> their status."""
    ended = dict[int, int]()
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended |= [child]
    return ended


def descendants(worker: int, ended: dict[int, int]) -> list[int]:
    """Processes that this one or its children have started. Without /proc, only the worker is known."""
    children = dict[int, list[int]]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    if not children:
        return [] if worker in ended else [worker]
    processes = children.get(os.getpid(), [])
    for process in processes:  # grows
        processes += children.get(process, [])
    return processes


def answer_tasks(references: Sequence[str]) -> None:
    """Answer tasks until the input ends."""
    worker, output, tasks = os.getpid(), os.dup(1), os.fdopen(os.dup(0), encoding="utf-8")
    # What functions print is no result, and what they read is no task.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def answer(**result: object) -> None:
        if os.getpid() != worker:
            os._exit(0)  # a function has forked, and its child has returned too
        line = json.dumps(result).encode() + b"\n"
        while line:
            line = line[os.write(output, line) :]

    functions = []
    for reference in references:
        try:
            functions.append(resolve(reference))
            if not callable(functions[-1]):
                raise TypeError("is not a function")
        except Exception as error:
            answer(problem=f"{reference}: cannot be loaded: {type(error).__name__}: {error}")
            return
    answer(problem="")
    for line in tasks:
        task = json.loads(line)
        try:
            value = functions[task["function"]](task["row"]["prompt"], task["answer"], task["row"])
            result: dict[str, Any] = {"value": float(value)}
        except Exception:
            result = {"failure": traceback.format_exc(limit=-3)[:DETAIL]}
        answer(number=task["number"], **result)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
