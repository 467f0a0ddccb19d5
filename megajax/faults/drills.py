"""Fault injection, to test how a run handles faults: see docs/reliability.md."""

import ctypes
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from megajax.faults.beats import attempt_number
from megajax.processes.world import process_index

NUMERIC = ("nan", "inf", "spike", "nan_gradients")
"""nan, inf: loss and gradients are multiplied by it; spike: by 1000; nan_gradients: only the gradients, by NaN."""

PROCESS = ("kill", "stuck", "frozen", "locked", "crash", "slow")
"""Faults of a process, before its next rows. kill: SIGKILL; frozen: SIGSTOP; stuck: the rows never arrive; locked: like
stuck, in C code that holds the interpreter's lock; crash: an exception; slow: the rows arrive 0.3 s late from that step
on."""

CORRUPTION = ("bitflip", "wrong_gradients")
"""Wrong numbers on the first device of one process. bitflip: one bit of a copy of a weight, after the step;
wrong_gradients: the results for `resilience.recompute`."""

KINDS = NUMERIC + PROCESS + CORRUPTION
SLOW_SECONDS = 0.3

_FORM = re.compile(
    r"(?P<kind>\w+):step=(?P<step>[0-9]+)(?::process=(?P<process>[0-9]+))?(?::attempt=(?P<attempt>[0-9]+))?"
    r"(?P<always>:always)?"
)


class DrillFault(Exception):
    """The fault of a drill of kind crash."""


class Drill(NamedTuple):
    """A fault: KIND:step=N for the first run of step N, KIND:step=N:always for every run.

    Kinds of PROCESS may name the process: KIND:step=N:process=K; kinds of CORRUPTION must. KIND:step=N:attempt=M is
    for the M-th start by the launcher.
    """

    kind: str
    step: int
    always: bool
    process: int | None = None
    """Process that has the fault; None: all processes."""
    attempt: int = 1
    """The start by the launcher in which the fault happens, unless `always`."""

    @classmethod
    def parse(cls, text: str) -> "Drill":
        """Raises ValueError with the expected form."""
        match = _FORM.fullmatch(text)
        if match is None or match["kind"] not in KINDS:
            raise ValueError(f"expected KIND:step=N or KIND:step=N:always with KIND one of {', '.join(KINDS)}")
        kind, process = match["kind"], match["process"]
        if process is not None and kind in NUMERIC:
            raise ValueError(
                f"process={process} is for {', '.join(PROCESS + CORRUPTION)}; {kind} affects all processes"
            )
        if process is None and kind in CORRUPTION:
            raise ValueError(f"{kind} needs :process=K after the step")
        number = None if process is None else int(process)
        return cls(kind, int(match["step"]), match["always"] is not None, number, int(match["attempt"] or 1))

    def factors(self) -> tuple[float, float]:
        """Factors of the loss and of the gradients."""
        match self.kind:
            case "nan_gradients":
                return 1.0, float("nan")
            case "spike":
                return 1000.0, 1000.0
        return float(self.kind), float(self.kind)

    def inject(self) -> None:
        """Inflict the fault on this process."""
        match self.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "frozen":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "crash":
                raise DrillFault(f"resilience.inject asked for a crash at step {self.step}")
            case "slow":
                time.sleep(SLOW_SECONDS)
            case "locked":
                ctypes.PyDLL(None).sleep(1 << 30)
            case "stuck":
                while True:
                    time.sleep(1.0)


def for_this_attempt(drills: Iterable[Drill]) -> tuple[Drill, ...]:
    """The faults of this start. Restarts by the launcher repeat steps without the faults of the first start."""
    return tuple(drill for drill in drills if drill.always or attempt_number() == drill.attempt)


def factors(drills: tuple[Drill, ...], step: int, *, repeated: bool) -> tuple[float, float]:
    """Factors of the loss and of the gradients of a step. repeated: whether this is a repetition of the step."""
    for drill in drills:
        if drill.kind in KINDS and drill.step == step and (drill.always or not repeated):
            return drill.factors()
    return 1.0, 1.0


def with_process_faults(batches: Any, drills: Sequence[Drill], step: int) -> Any:
    """Batches from step `step` + 1 on, with the faults of this process before the batches of their steps."""
    return _FaultyBatches(batches, drills, step) if drills else batches


class _FaultyBatches:
    def __init__(self, batches: Any, drills: Iterable[Drill], step: int):
        self._batches, self._step, process = batches, step, process_index()
        self._drills = [drill for drill in for_this_attempt(drills) if drill.process in (None, process)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._step += 1
        for drill in self._drills:
            if drill.step == self._step or (drill.kind == "slow" and drill.step < self._step):
                drill.inject()
        return next(self._batches)
