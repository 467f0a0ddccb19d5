"""What the threads of this process are doing: for the watchdog, the launcher, and messages about failures."""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

SETUP, COMPILE, STEP, BACKGROUND_SAVE, FINISH = "setup", "compile", "step", "background_save", "finish"
LOGGING = "logging"
"""Phases beside those of `megajax.training.timing`, which are also timed: data_wait, evaluation, save."""

REMEMBERED = 64
"""Durations kept of each phase."""


_WORDS = {
    SETUP: "setting up",
    COMPILE: "compiling for step {}",
    STEP: "in step {}",
    FINISH: "finishing",
    LOGGING: "logging step {}",
    BACKGROUND_SAVE: "writing the checkpoint of step {}",
    "data_wait": "waiting for the rows of step {}",
    "evaluation": "evaluating after step {}",
    "save": "saving step {}",
}


def words(phase: str, step: int | None) -> str:
    """A phase as part of a sentence: "waiting for the rows of step 7"."""
    if step is None:
        return _WORDS.get(phase, f"in {phase}").removesuffix(" {}").removesuffix(" of step").removesuffix(" for step")
    return _WORDS.get(phase, f"in {phase} of step {{}}").format(step)


class Doing(NamedTuple):
    """A phase that a thread is in."""

    phase: str
    step: int | None
    """The step that it belongs to; None: no step."""
    since: float
    """When it began, by the monotonic clock."""
    thread: int
    """Identifier of the thread."""
    moved: float
    """When it last made progress: at `since`, or later in a phase of many parts."""
    first: bool = False
    """Whether this process or another may compile a program in it."""


class Activity:
    """The phases that threads are in, nested: each thread enters and leaves its own, any thread reads all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._threads: dict[int, tuple[Doing, ...]] = {}
        self._lock = threading.Lock()
        self._seconds: dict[str, deque[tuple[int | None, float]]] = {}
        self.step = 0
        """The last step whose numbers have arrived."""
        self.committed: int | None = None
        """The last step with a whole checkpoint; None if no checkpoint has been saved yet."""

    @contextmanager
    def phase(self, name: str, step: int | None = None, *, first: bool = False) -> Generator[None]:
        """Within the block, this thread is in phase `name`; an error that leaves it says so as its `doing`.

        first: a program is run for the first time.
        """
        thread, now = threading.get_ident(), self._clock()
        before = self._threads.get(thread, ())
        doing = Doing(name, step, now, thread, now, first)
        self._set(thread, (*before, doing))
        try:
            yield
        except BaseException as error:
            error.__dict__.setdefault("doing", doing)  # the innermost phase comes first
            raise
        finally:
            done = self._threads[thread][-1]
            self._lasted(done)
            self._set(thread, before)

    def progress(self) -> None:
        """The phase that this thread is in has finished a part of its work, such as a batch of an evaluation."""
        thread = threading.get_ident()
        if phases := self._threads.get(thread, ()):
            self._lasted(phases[-1], part=True)
            self._set(thread, (*phases[:-1], phases[-1]._replace(moved=self._clock())))

    def now(self) -> tuple[Doing, ...]:
        """The innermost phase of each thread that is in one."""
        with self._lock:
            return tuple(phases[-1] for phases in self._threads.values())

    def of_main_thread(self) -> Doing | None:
        """The innermost phase of the main thread."""
        with self._lock:
            phases = self._threads.get(threading.main_thread().ident or 0, ())
        return phases[-1] if phases else None

    def typical(self, phase: str) -> float | None:
        """Median of the seconds that the phase has taken, or its parts, step by step; None: it has not finished yet."""
        with self._lock:
            seconds = [each for _, each in self._seconds.get(phase, ())]
        return statistics.median(seconds) if seconds else None

    def _lasted(self, done: Doing, *, part: bool = False) -> None:
        """Remember how long a phase or a part of it took. A step is dispatched first and fetched later: both count."""
        seconds, step = self._clock() - done.moved, None if part else done.step
        with self._lock:
            known = self._seconds.setdefault(done.phase, deque(maxlen=REMEMBERED))
            # Later steps may have been dispatched in between.
            for place in range(len(known) - 1, max(len(known) - 4, -1), -1):
                if step is not None and known[place][0] == step:
                    known[place] = step, known[place][1] + seconds
                    return
            known.append((step, seconds))

    def _set(self, thread: int, phases: tuple[Doing, ...]) -> None:
        with self._lock:
            if phases:
                self._threads[thread] = phases
            else:
                self._threads.pop(thread, None)
