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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import megajax
from megajax.config.errors import UserError

LOAD_SECONDS = 120.0
"""Limit of the time in which a process loads the functions."""
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
        self._seconds, self._workers = seconds, [Worker(self._command) for _ in range(workers)]
        for worker in self._workers:
            if problem := worker.problem():
                self.close()
                raise UserError(f"data.rewards: {problem}")

    def __call__(
        self, tasks: Sequence[Task], progress: Callable[[], None] = lambda: None
    ) -> tuple[list[float], list[Failure]]:
        """The reward of each task, 0 where it failed. progress: called several times a second."""
        values, failures = [0.0] * len(tasks), list[Failure]()
        waiting, working = deque(range(len(tasks))), dict[Worker, tuple[int, float]]()
        while waiting or working:
            for worker in self._workers:
                if worker not in working and waiting:
                    number = waiting.popleft()
                    worker.ask(tasks[number])
                    working[worker] = number, time.monotonic() + self._seconds
            for worker in [*ready(working)]:
                number, _ = working.pop(worker)
                values[number], failure = worker.result()
                if failure is not None:
                    failures.append(failure._replace(task=number))
                if worker.ended:
                    self._restart(worker)
            for worker, (number, end) in [*working.items()]:
                if time.monotonic() > end:
                    del working[worker]
                    failures.append(Failure(number, "took too long", f"longer than {self._seconds:g} s"))
                    self._restart(worker)
            progress()
        return values, sorted(failures)

    def _restart(self, worker: "Worker") -> None:
        """Replace a process. Raises UserError if functions can no longer be loaded."""
        worker.close()
        new = self._workers[self._workers.index(worker)] = Worker(self._command)
        if problem := new.problem():
            raise UserError(f"data.rewards: {problem}")

    def close(self) -> None:
        """End the processes."""
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
        self.ended = False

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
        answer = self._answer()
        return "the process that loads the functions ended" if answer is None else answer["problem"]

    def ask(self, task: Task) -> None:
        """Begin a task."""
        with contextlib.suppress(BrokenPipeError):  # `result` will tell
            self._pipes[0].write(json.dumps(task._asdict()).encode() + b"\n")
            self._pipes[0].flush()

    def result(self) -> tuple[float, Failure | None]:
        """The reward, or 0 and a failure."""
        answer = self._answer()
        if answer is None:
            code = self._process.wait()
            return 0.0, Failure(0, "ended its process", f"exit code {code}")
        if (failure := answer.get("failure")) is not None:
            return 0.0, Failure(0, "raised an error", failure)
        value = float(answer["value"])
        if not math.isfinite(value):
            return 0.0, Failure(0, "returned no finite number", str(value))
        return value, None

    def _answer(self) -> dict[str, Any] | None:
        """The next line; None at the end of the output, where `ended` is set."""
        line = self._pipes[1].readline()
        self.ended = not line.endswith(b"\n")
        return None if self.ended else json.loads(line)

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
