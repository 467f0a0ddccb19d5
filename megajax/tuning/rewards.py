"""Rewards of answers by the user's functions, in processes with a time limit."""

import contextlib
import json
import math
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import megajax
from megajax.config.errors import UserError

LOAD_SECONDS = 120.0
"""Limit of the time in which a process loads the functions."""
QUEUED, QUEUED_BYTES = 8, 2**14
"""Tasks that a process has at a time, and their bytes without the last one: its pipe holds 64 KiB."""
CHECK_SECONDS = 0.2
"""Time between looks at the limits."""


class Task(NamedTuple):
    """An answer to judge."""

    function: int
    answer: str
    row: Any


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
        self._command = [sys.executable, "-m", "megajax.tuning.reward_worker", str(seconds), *functions]
        self._closed = False
        self._seconds, self._workers = seconds, [Worker(self._command) for _ in range(workers)]
        for worker in self._workers:
            if problem := worker.problem():
                self.close()
                raise UserError(f"data.rewards: {problem}")

    def __call__(self, tasks: Sequence[Task]) -> tuple[list[float], list[Failure]]:
        """The reward of each task, 0 where it failed. Another thread may `close` meanwhile."""
        values, failures, waiting = [0.0] * len(tasks), list[Failure](), deque(range(len(tasks)))
        while not self._closed and (waiting or any(worker.queued for worker in self._workers)):
            for _, worker in product(range(QUEUED), self._workers):
                if waiting and worker.takes_more:
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
                    number, _ = worker.queued.popleft()
                    failures.append(Failure(number, "took too long", f"longer than {self._seconds:g} s"))
                    self._restart(worker, waiting)
        return values, sorted(failures)

    def _restart(self, worker: "Worker", waiting: deque[int]) -> None:
        """Replace a process, whose other tasks wait again. Raises UserError if functions can no longer be loaded."""
        waiting.extendleft(number for number, _ in reversed(worker.queued))
        worker.close()
        new = self._workers[self._workers.index(worker)] = Worker(self._command)
        if problem := new.problem():
            raise UserError(f"data.rewards: {problem}")

    def close(self) -> None:
        """End the processes."""
        self._closed = True
        for worker in self._workers:
            worker.close()


class Worker:
    """A process."""

    def __init__(self, command: Sequence[str]):
        root = str(Path(megajax.__file__).parents[1])
        path = os.pathsep.join([root, os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
        # In a session of its own: Ctrl-C is the business of the run.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        self.ended, self._rest = False, b""
        self.queued = deque[tuple[int, int]]()
        """Numbers and bytes of the tasks without a result. They are queued here, because a round trip for each would
        take longer than most functions."""
        self.since = 0.0
        """When the first of them began."""

    @property
    def takes_more(self) -> bool:
        """Whether `ask` cannot block: the pipe has room, or the process waits for a task."""
        return len(self.queued) < QUEUED and sum(size for _, size in self.queued) < QUEUED_BYTES

    def fileno(self) -> int:
        """Readable when a result is there."""
        return self._pipes[1].fileno()

    @property
    def _pipes(self) -> tuple[Any, Any]:
        return cast(tuple[Any, Any], (self._process.stdin, self._process.stdout))

    def problem(self) -> str:
        """Why the functions can't be loaded; "" if they are. Waits."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            if not selector.select(LOAD_SECONDS):
                self.close()
                return f"loading the functions takes more than {LOAD_SECONDS:g} s"
        answers = self._answers()
        return answers[0]["problem"] if answers else "the process that loads the functions ended"

    def ask(self, number: int, task: Task) -> None:
        """Queue a task."""
        line = json.dumps(task._asdict()).encode() + b"\n"
        self.since = self.since if self.queued else time.monotonic()
        self.queued.append((number, len(line)))
        with contextlib.suppress(BrokenPipeError):  # `result` will tell
            self._pipes[0].write(line)
            self._pipes[0].flush()

    def results(self) -> Iterator[tuple[int, float, Failure | None]]:
        """(number, reward, why it is 0) of the tasks that have a result. Call it when there is one."""
        for answer in self._answers():
            number, _ = self.queued.popleft()
            self.since, value = time.monotonic(), float(answer.get("value", 0.0))
            if (detail := answer.get("failure")) is not None:
                yield number, 0.0, Failure(number, "raised an error", detail)
            elif not math.isfinite(value):
                yield number, 0.0, Failure(number, "returned no finite number", str(value))
            else:
                yield number, value, None
        if self.ended:
            number, _ = self.queued.popleft()
            yield number, 0.0, Failure(number, "ended its process", f"exit code {self._process.wait()}")

    def _answers(self) -> list[dict[str, Any]]:
        """The lines that are there. At the end of the output, `ended` is set."""
        received = os.read(self.fileno(), 2**16)
        self.ended = not received
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def ready(workers: Any) -> Iterator[Worker]:
    """The workers with a result, after a wait of at most CHECK_SECONDS for the first of them."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker, selectors.EVENT_READ)
        for key, _ in selector.select(CHECK_SECONDS):
            yield cast(Worker, key.fileobj)
