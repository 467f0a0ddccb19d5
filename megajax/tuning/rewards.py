"""Rewards of answers by the user's functions, in processes with a time limit."""

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import megajax
from megajax.config.errors import UserError
from megajax.tuning.reward_worker import END

LOAD_SECONDS = 120.0
"""Limit of the time in which a process loads the functions."""
END_SECONDS = 5.0
"""Limit of the time in which a process ends what its functions have started."""
LINE_BYTES = 2**20
"""Limit of the bytes of a result."""
DISTURBED = "wrote something else among the results of its process"
QUEUED = 8
"""Tasks that a process has at a time."""
CHECK_SECONDS = 0.2
"""Time between looks at the limits."""


class RewardTask(NamedTuple):
    """An answer to judge."""

    function: int
    answer: str
    row: Mapping[str, Any]


class Failure(NamedTuple):
    """A reward that is 0 because its function failed."""

    task: int
    reason: str
    """A few words, for counts."""
    detail: str


class RewardWorkers:
    """Calls reward functions. A function that fails costs its reward, and perhaps a process, but not the run."""

    def __init__(self, functions: Sequence[str], *, workers: int, seconds: float):
        """Raises UserError for functions that can't be loaded."""
        self._command = [sys.executable, "-m", "megajax.tuning.reward_worker", *functions]
        self._closed = False
        self._seconds, self._workers = seconds, [RewardProcess(self._command) for _ in range(workers)]
        for worker in self._workers:
            if problem := worker.problem():
                self.close()
                raise UserError(f"data.rewards: {problem}")

    def __call__(self, tasks: Sequence[RewardTask]) -> tuple[list[float], list[Failure]]:
        """The reward of each task, 0 where it failed. Another thread may `close` meanwhile."""
        values, failures, waiting = [0.0] * len(tasks), list[Failure](), deque(range(len(tasks)))
        while not self._closed and (waiting or any(worker.queued for worker in self._workers)):
            for _, worker in product(range(QUEUED), self._workers):
                if waiting and len(worker.queued) < QUEUED:
                    worker.ask(waiting[0], tasks[waiting[0]])
                    waiting.popleft()
            for worker in [*ready(worker for worker in self._workers if worker.queued)]:
                for number, value, failure in worker.results():
                    values[number] = value
                    failures += [] if failure is None else [failure]
                if worker.ended:
                    self._restart(worker, waiting)
            for worker in [*self._workers]:
                if worker.queued and time.monotonic() > worker.since + self._seconds:
                    number = worker.queued.popleft()
                    failures.append(Failure(number, "took too long", f"longer than {self._seconds:g} s"))
                    self._restart(worker, waiting)
        return values, sorted(failures)

    def _restart(self, worker: "RewardProcess", waiting: deque[int]) -> None:
        """Replace a process, whose other tasks wait again. Raises UserError if functions can no longer be loaded."""
        waiting.extendleft(reversed(worker.queued))
        worker.close()
        if self._closed:
            return
        new = self._workers[self._workers.index(worker)] = RewardProcess(self._command)
        if (problem := new.problem()) and not self._closed:
            raise UserError(f"data.rewards: {problem}")

    def close(self) -> None:
        """End the processes."""
        self._closed = True
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.close()


class RewardProcess:
    """A process, which ends what its functions have started when it or this process ends."""

    def __init__(self, command: Sequence[str]):
        root = str(Path(megajax.__file__).parents[1])
        path = os.pathsep.join([root, os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
        # In a session of its own: Ctrl-C is the business of the run.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        self.input, self.output = cast(tuple[Any, Any], (self._process.stdin, self._process.stdout))
        os.set_blocking(self.input.fileno(), False)
        self.ended, self._rest, self.unsent = False, b"", b""
        self.queued, self._task_count = deque[int](), 0
        """Numbers of the tasks without a result. They are queued here, because a round trip for each would take longer
        than most functions."""
        self.since = 0.0
        """When the first of them began."""

    def problem(self) -> str:
        """Why the functions can't be loaded; "" if they are. Waits."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.output, selectors.EVENT_READ)
            if not selector.select(LOAD_SECONDS):
                return f"loading the functions takes more than {LOAD_SECONDS:g} s"
        answer = next(self._answers(), {"problem": "the process that loads the functions ended"})
        return str(answer.get("problem", f"a module of the functions {DISTURBED}"))

    def ask(self, number: int, task: RewardTask) -> None:
        """Queue a task."""
        self.since = self.since if self.queued else time.monotonic()
        # Counted over the life of the process: a late result is never taken for another one.
        self.unsent += json.dumps({"number": self._task_count, **task._asdict()}).encode() + b"\n"
        self._task_count += 1
        self.queued.append(number)
        self.send()

    def send(self) -> None:
        """Write as much as the pipe has room for."""
        try:
            self.unsent = self.unsent[os.write(self.input.fileno(), self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.unsent = b""  # the process has ended; `results` will tell

    def results(self) -> Iterator[tuple[int, float, Failure | None]]:
        """(number, reward, why it is 0) of the tasks that have a result. Call it when there is one.

        At the end of the results, or after something else among them, `ended` is set.
        """
        disturbed = False
        for answer in self._answers():
            value, detail = answer.get("value", 0.0), answer.get("failure")
            expected = self._task_count - len(self.queued)
            if disturbed := not self.queued or answer.get("number") != expected or not isinstance(value, float):
                break
            number, self.since = self.queued.popleft(), time.monotonic()
            if detail is not None:
                yield number, 0.0, Failure(number, "raised an error", str(detail))
            elif not math.isfinite(value):
                yield number, 0.0, Failure(number, "returned no finite number", str(value))
            else:
                yield number, value, None
        disturbed |= len(self._rest) > LINE_BYTES
        self.ended |= disturbed
        if self.ended and self.queued:
            number, code = self.queued.popleft(), self.close()
            reason, detail = "ended its process", f"exit code {code}"
            if disturbed:
                reason, detail = DISTURBED, "the process is replaced"
            yield number, 0.0, Failure(number, reason, detail)

    def _answers(self) -> Iterator[dict[str, Any]]:
        """The lines that are there; {} for something else. At the end of the output, `ended` is set."""
        received = os.read(self.output.fileno(), 2**16)
        self.ended = not received
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            try:
                yield dict(json.loads(line))
            except (ValueError, TypeError, RecursionError):
                yield {}

    def stop(self) -> None:
        """Ask for the end."""
        self._process.send_signal(END)

    def close(self) -> int:
        """End the process, and what its functions have started -> exit code."""
        if self._process.returncode is None:
            self.stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self.input, self.output):
            pipe.close()
        return self._process.wait()


def ready(workers: Iterable[RewardProcess]) -> Iterator[RewardProcess]:
    """The workers with a result, after a wait of at most CHECK_SECONDS for the first of them."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.output, selectors.EVENT_READ, worker)
            if worker.unsent:
                selector.register(worker.input, selectors.EVENT_WRITE, worker)
        for key, events in selector.select(CHECK_SECONDS):
            if events & selectors.EVENT_WRITE:
                key.data.send()
            else:
                yield key.data
