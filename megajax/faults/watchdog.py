"""Detects a hanging process, by comparing the current phases of its threads with limits.

The watchdog is a Python thread, so it can't detect that C code holds the interpreter's lock. Instead, it keeps
resetting a timer of the operating system, the backstop.
"""

import ctypes
import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from types import FrameType
from typing import Annotated, NamedTuple, Self

from megajax.config.bounds import Bounds
from megajax.faults.activity import BACKGROUND_SAVE, COMPILE, SETUP, START, ActivePhase, Activity, describe_phase

ASLEEP_SECONDS = 5.0
"""If checks are this much further apart than intended, the process itself was stopped or not scheduled."""

GRACE_SECONDS = 10
"""Time from the end of the backstop's timer to SIGALRM."""

LONGEST_SECONDS = 1e9
"""A longer timer may not fit into the system's numbers."""

_BARRIERS = ("megajax/processes/peers.py",)
_COLLECTIVES = ("jax/experimental/multihost_utils.py",)
_COMPILING = tuple(f"jax/_src/{name}.py" for name in ("compiler", "interpreters/partial_eval", "interpreters/mlir"))

MAX_SECONDS = 1e8
"""Seconds (three years). Timers of the operating system and of XLA have a maximum."""
_OFF = f"{MAX_SECONDS:g} means never in practice, and resilience.watchdog=none turns the watchdog off"
type Seconds = Annotated[float, Bounds(above=0, at_most=MAX_SECONDS, hint=_OFF)]


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """Limits in seconds. A process in which a phase takes longer ends with exit code 124. The limit of a phase is
    `factor` times its median in this run, and at least the value below.

    Example: `mj.ResilienceConfig(watchdog=mj.WatchdogConfig(step=600))`
    """

    factor: Annotated[float, Bounds(at_least=1, at_most=MAX_SECONDS)] = 10.0
    """A phase may take this many times the median of the last 64."""
    step: Seconds = 600.0
    """A train step: computation, and collectives with other processes."""
    data_wait: Seconds = 600.0
    """Waiting for the rows of a step."""
    evaluation: Seconds = 1800.0
    """A batch or an answer of an evaluation."""
    save: Seconds = 7200.0
    """The part of a save that blocks training, including the wait for the save before it."""
    background_save: Seconds = 7200.0
    """Writing and committing a checkpoint while training goes on."""
    compile: Seconds = 7200.0
    """Compiling a program. Also the minimum for the first of each phase but start, setup and background_save, because
    another process may compile then."""
    start: Seconds = 900.0
    """Each stage of the start: connecting the processes (--init-timeout is added), finding devices, the first
    collective of all devices, and opening the compile cache."""
    setup: Seconds = 7200.0
    """Each stage between the start and the first step: index files, weights, reading a checkpoint."""
    finish: Seconds = 7200.0
    """After the last step: the last save, evaluations, report."""
    other: Seconds = 1800.0
    """Any other phase."""

    def floor(self, phase: str) -> tuple[str, float]:
        """The setting for a phase, and its value."""
        name = phase if phase in PHASES else "other"
        return name, getattr(self, name)


PHASES = tuple(field.name for field in fields(WatchdogConfig) if field.name not in ("factor", "other"))
"""Phases with their own limit."""


class Hang(NamedTuple):
    """A phase that takes longer than its limit."""

    phase: str
    step: int | None
    seconds: float
    """Seconds since it began, or since its last progress."""
    limit: float
    setting: str
    """The setting of `WatchdogConfig` that the limit comes from."""
    stage: str | None = None
    background: bool = False
    """Whether another thread than the main thread is in it."""

    def sentence(self) -> str:
        """waiting for the rows of step 7 for 21 s, limit 20 s (resilience.watchdog.data_wait)."""
        setting = f"resilience.watchdog.{self.setting}"
        doing = describe_phase(self.phase, self.step, self.stage)
        return f"{doing} for {self.seconds:.0f} s, limit {self.limit:.0f} s ({setting})"


class Watchdog:
    """Compares the phases of an activity with their limits, not counting time in which the process was stopped."""

    def __init__(
        self,
        cfg: WatchdogConfig,
        activity: Activity,
        *,
        clock: Callable[[], float] = time.monotonic,
        compiles: Callable[[int], bool] | None = None,
    ):
        """compiles: whether a thread is tracing or compiling a program."""
        self._cfg, self._activity, self._clock = cfg, activity, clock
        self._compiles = compiles or is_compiling
        self._checked: float | None = None
        self._asleep: list[tuple[float, float]] = []

    def check(self, period: float) -> Hang | None:
        """The first hang found, or None. period: seconds between checks."""
        now = self._clock()
        if self._checked is not None and now - self._checked > period + ASLEEP_SECONDS:
            self._asleep.append((self._checked, now - self._checked - period))
        self._checked, doing = now, self._activity.now()
        oldest = min((phase.last_progress for phase in doing), default=now)
        self._asleep = [(begin, seconds) for begin, seconds in self._asleep if begin + seconds > oldest]
        return next((hang for phase in doing if (hang := self._hang(phase, now))), None)

    def longest(self) -> float:
        """Seconds until the last of the current limits; without a phase, a default."""
        now = self._clock()
        remaining = [self.limit(phase)[1] - (now - phase.last_progress) for phase in self._activity.now()]
        return max(remaining, default=self._cfg.other)

    def limit(self, doing: ActivePhase) -> tuple[str, float]:
        """The setting that limits a phase, and the limit in seconds."""
        (name, floor), typical = self._cfg.floor(doing.phase), self._activity.median_seconds(doing.phase)
        if doing.phase in (START, SETUP):
            return name, floor + doing.allowance
        waits_for_compiler = doing.first or (typical is None and doing.phase != BACKGROUND_SAVE)
        if waits_for_compiler and floor < self._cfg.compile:
            return COMPILE, self._cfg.compile
        return name, max(floor, self._cfg.factor * (typical or 0.0))

    def awake(self, doing: ActivePhase, now: float) -> float:
        """Seconds since the last progress of a phase, without those in which the process was stopped."""
        stopped = sum(min(seconds, begin + seconds - doing.last_progress) for begin, seconds in self._asleep)
        return now - doing.last_progress - stopped

    def _hang(self, doing: ActivePhase, now: float) -> Hang | None:
        seconds, (name, limit) = self.awake(doing, now), self.limit(doing)
        if seconds <= limit:
            return None
        if name != COMPILE and self._compiles(doing.thread):
            doing = doing._replace(phase=COMPILE, stage=None)
            name, limit = self.limit(doing)
        background = doing.thread != threading.main_thread().ident
        return Hang(doing.phase, doing.step, seconds, limit, name, doing.stage, background) if seconds > limit else None


def is_compiling(thread: int) -> bool:
    """Whether a thread is tracing, lowering or compiling a program, by its stack."""
    return any(frame.f_code.co_filename.endswith(_COMPILING) for frame in _frames(sys._current_frames().get(thread)))


def waits_for_peers(thread: int) -> bool:
    """Whether a thread waits for other processes, by its stack: in a barrier or a collective of the host."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return False
    # Work that all processes do together is called from the same file, so there the innermost frame decides.
    return frame.f_code.co_filename.endswith(_BARRIERS) or any(
        outer.f_code.co_filename.endswith(_COLLECTIVES) for outer in _frames(frame)
    )


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


_MONOTONIC, _CALL_IN_THREAD = 1, 2


class _Event(ctypes.Structure):
    """struct sigevent of Linux."""

    _fields_ = (
        ("value", ctypes.c_int64),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("reserved", ctypes.c_char * 32),
    )


class _Times(ctypes.Structure):
    """struct itimerspec: interval, then remaining time."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "left_s", "left_ns"))


class Backstop:
    """Within its `with` block, SIGALRM ends the process unless `reset` is called in time. Only on Linux.

    When the timer expires, a thread of the C library calls alarm(GRACE_SECONDS); then SIGALRM writes the stacks of all
    threads and ends the process. A process that was stopped by SIGSTOP for longer than the timer cancels the alarm as
    soon as it continues.
    """

    def __init__(self) -> None:
        self._c = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._timer: ctypes.c_void_p | None = None

    def __enter__(self) -> Self:
        # If SIGALRM has a handler, of pytest for example, do nothing.
        free = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and sys.__stderr__ is not None
        if self._c is None or not free or not hasattr(self._c, "timer_create"):
            return self
        function = ctypes.cast(self._c.alarm, ctypes.c_void_p)
        event, timer = _Event(value=GRACE_SECONDS, notify=_CALL_IN_THREAD, function=function), ctypes.c_void_p()
        if self._c.timer_create(_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0:
            self._timer = timer
            faulthandler.register(signal.SIGALRM, file=2, all_threads=True, chain=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._c is not None and self._timer is not None:
            self.reset(0.0)
            self._c.timer_delete(self._timer)
            faulthandler.unregister(signal.SIGALRM)
            self._timer = None

    def reset(self, seconds: float) -> None:
        """Reset the timer; 0 turns it off.

        Call it more often than every GRACE_SECONDS: a timer that expired while the process was stopped may set the
        alarm just after a call.
        """
        if self._c is None or self._timer is None:
            return
        times = _Times(left_s=int(min(seconds, LONGEST_SECONDS)))
        self._c.timer_settime(self._timer, 0, ctypes.byref(times), None)
        signal.alarm(0)
