"""The current phases of this process's threads, for the watchdog, the launcher, and messages about failures."""

import contextlib
import os
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import NamedTuple

from megajax.storage.disk import open_regular

START, SETUP, COMPILE, STEP = "start", "setup", "compile", "step"
BACKGROUND_SAVE, FINISH, LOGGING = "background_save", "finish", "logging"
DATA_WAIT, EVALUATION, SAVE = "data_wait", "evaluation", "save"
"""Phases; the last three are timed, see `megajax.training.guarded.phase_timers`."""


STACKS_FOLDER = "hangs"
"""Folder in the run folder where processes write their stacks."""


class Stage(StrEnum):
    """A stage of the start or of the set-up, with its description, in the order in which processes reach them."""

    CONNECT = "connecting the processes"
    DEVICES = "finding the devices"
    FIRST_COLLECTIVE = "connecting the devices of all processes"
    COMPILE_CACHE = "opening the compile cache"
    RUN_FOLDER = "opening the run folder"
    CHECKPOINTS = "opening the checkpoints"
    CHECKPOINT = "choosing the checkpoint to start from"
    HEALTH = "testing devices and hosts"
    DATA = "opening the data"
    STATE = "setting up the state"
    REFERENCE = "computing the log-probabilities of the reference model"
    LOGS = "opening the files of the run"


WINDOW = 64
"""Number of recorded durations of each phase."""


_DESCRIPTIONS = {
    START: ("starting", ""),
    SETUP: ("setting up", ""),
    COMPILE: ("compiling", " for step {}"),
    STEP: ("in step", " {}"),
    FINISH: ("finishing", ""),
    LOGGING: ("logging", " step {}"),
    BACKGROUND_SAVE: ("writing the checkpoint", " of step {}"),
    DATA_WAIT: ("waiting for the rows", " of step {}"),
    EVALUATION: ("evaluating", " after step {}"),
    SAVE: ("saving", " step {}"),
}
"""Phase -> its description, and what is appended for a step."""


def describe_phase(phase: str, step: int | None, stage: str | None = None) -> str:
    """A phase, or its stage, as part of a sentence: "waiting for the rows of step 7", "opening the data"."""
    if stage is not None:
        return stage
    text, of_step = _DESCRIPTIONS.get(phase, (f"in {phase}", " of step {}"))
    return text if step is None else text + of_step.format(step)


type Position = tuple[float, int, int, bool]
"""The step of a process, the place in the step, the stage of the set-up, and whether it waits for others."""

_PLACES = {START: -2, SETUP: -1, DATA_WAIT: 0, COMPILE: 1, STEP: 2}
"""Phases in their order; others follow the step."""


def position(phase: str | None, step: int | None, stage: str | None, *, waits: bool, completed: int) -> Position:
    """How far a process is: of two at one place, one that waits for others is ahead.

    completed: its last step whose numbers have arrived. A process between phases is in the step after it.
    """
    if phase == FINISH:
        return inf, 0, 0, waits
    if phase is None or step is None:
        return completed + 1, _PLACES.get(phase or STEP, 2), list(Stage).index(Stage(stage)) if stage else 0, waits
    return step, _PLACES.get(phase, 3), 0, waits


class ActivePhase(NamedTuple):
    """A phase that a thread is in."""

    phase: str
    step: int | None
    """The step that it belongs to, or None."""
    since: float
    """When it began, by the monotonic clock."""
    thread: int
    """Identifier of the thread."""
    last_progress: float
    """When it last made progress: at `since`, or at the end of its last part."""
    first: bool = False
    """Whether this process or another may compile a program in it."""
    allowance: float = 0.0
    """Seconds that it may take in addition to its limit."""
    stage: Stage | None = None

    def description(self) -> str:
        """Part of a sentence."""
        return describe_phase(self.phase, self.step, self.stage)


class Activity:
    """The nested phases of threads. Each thread enters and leaves its own; any thread can read all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._threads: dict[int, tuple[ActivePhase, ...]] = {}
        self._lock = threading.Lock()
        self._seconds: dict[str, deque[tuple[int | None, float]]] = {}
        self.step = 0
        """The last step whose numbers have arrived."""
        self.committed: int | None = None
        """The last step with a complete checkpoint; None if no checkpoint has been saved yet."""

    @contextmanager
    def phase(self, name: str, step: int | None = None, *, first: bool = False) -> Generator[None]:
        """Within the block, this thread is in phase `name`; an error that leaves it has the phase as its `doing`.

        first: a program is run for the first time.
        """
        thread, now = threading.get_ident(), self._clock()
        before = self._threads.get(thread, ())
        self._set(thread, (*before, ActivePhase(name, step, now, thread, now, first)))
        try:
            yield
        except BaseException as error:
            error.__dict__.setdefault("doing", self._threads[thread][-1])  # the innermost phase comes first
            raise
        finally:
            finished = self._threads[thread][-1]
            self._record_duration(finished)
            self._set(thread, before)

    def progress(self) -> None:
        """Note that this thread has finished a part of its phase, such as a batch of an evaluation."""
        thread = threading.get_ident()
        if phases := self._threads.get(thread, ()):
            self._record_duration(phases[-1], part=True)
            self._set(thread, (*phases[:-1], phases[-1]._replace(last_progress=self._clock())))

    def stage(self, stage: Stage, *, allowance: float = 0.0) -> None:
        """The phase of this thread goes on with a stage of it, which has the limit of the phase.

        allowance: seconds that the stage may take in addition, because it waits with a limit of its own.
        """
        self.progress()
        thread = threading.get_ident()
        if phases := self._threads.get(thread, ()):
            self._set(
                thread, (*phases[:-1], phases[-1]._replace(stage=stage, since=self._clock(), allowance=allowance))
            )

    def now(self) -> tuple[ActivePhase, ...]:
        """The innermost phase of each thread that is in one."""
        with self._lock:
            return tuple(phases[-1] for phases in self._threads.values())

    def of_main_thread(self) -> ActivePhase | None:
        """The innermost phase of the main thread."""
        with self._lock:
            phases = self._threads.get(threading.main_thread().ident or 0, ())
        return phases[-1] if phases else None

    def median_seconds(self, phase: str) -> float | None:
        """Median duration of the phase, or of its parts; None if none has finished yet."""
        with self._lock:
            seconds = [duration for _, duration in self._seconds.get(phase, ())]
        return statistics.median(seconds) if seconds else None

    def _record_duration(self, finished: ActivePhase, *, part: bool = False) -> None:
        """Record the duration of a phase or a part. Dispatching a step and fetching its results are added up."""
        seconds, step = self._clock() - finished.last_progress, None if part else finished.step
        with self._lock:
            durations = self._seconds.setdefault(finished.phase, deque(maxlen=WINDOW))
            # Later steps may have been dispatched in between.
            for place in range(len(durations) - 1, max(len(durations) - 4, -1), -1):
                if step is not None and durations[place][0] == step:
                    durations[place] = step, durations[place][1] + seconds
                    return
            durations.append((step, seconds))

    def _set(self, thread: int, phases: tuple[ActivePhase, ...]) -> None:
        with self._lock:
            if phases:
                self._threads[thread] = phases
            else:
                self._threads.pop(thread, None)


def stacks(activity: Activity) -> str:
    """The stack of each thread, most recent call last, with the phase it is in; the main thread comes first."""
    now, doing = time.monotonic(), {phase.thread: phase for phase in activity.now()}
    names: Mapping[int | None, str] = {thread.ident: thread.name for thread in threading.enumerate()}
    main, lines = threading.main_thread().ident, []
    frames = sys._current_frames()
    for thread in sorted(frames, key=lambda thread: (thread != main, thread not in doing)):
        if thread == threading.get_ident():
            continue
        head = f"thread {names.get(thread, 'without a name')} ({thread})"
        if (phase := doing.get(thread)) is not None:
            head += f", {phase.description()} for {now - phase.since:.1f} s"
        lines += [f"{head}:\n", *traceback.format_stack(frames[thread]), "\n"]
    return "".join(lines)


def write_stacks(run_dir: Path, process: int, why: str, text: str) -> Path | None:
    """Append stacks to RUN_DIR/hangs/process_K.txt -> its path; None if it can't be written."""
    path = run_dir / STACKS_FOLDER / f"process_{process}.txt"
    head = f"{time.strftime('%Y-%m-%d %H:%M:%S')}, process {process}, pid {os.getpid()}: {why}\n\n"
    with contextlib.suppress(OSError):
        # A process that hangs in the start has no run folder yet.
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(open_regular(path, append=True), "a", encoding="utf-8") as file:
            file.write(head + text)
        return path
    return None
