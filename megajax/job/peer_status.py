"""The status of each process of a run, published in jax's coordination service: to name the first cause of a failure.

A process that fails or hangs reads the status of the others. The service does not need the devices, but it is in
process 0: calls fail when that process has ended, and block while it is stopped.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from jax._src import distributed  # the key-value store of the coordination service has no public name

from megajax.resilience.activity import describe_phase

PERIOD_SECONDS = 1.0
"""How often a process publishes its status."""

PROCESSES_A_SECOND = 500
"""With more processes, each publishes less often."""

SERVICE_SECONDS = 4.0
"""How long to wait for the coordination service."""

LAST_CALL_SECONDS = 1.0
"""The same, in a process that is about to end."""

SILENT_PERIODS = 2.5
"""A process that publishes nothing new for so many periods does not run."""

_KEY, _HANGS, _STOPS = "megajax/status", "megajax/asked/stacks", "megajax/asked/stop"
_ASKED = "megajax/asked"
_ORDER = {"data_wait": 0, "step": 1, "compile": 1}
"""Phases of a step in their order; others follow."""


class Status(NamedTuple):
    """The status that a process published last."""

    beat: int
    """Counts up."""
    phase: str | None = None
    step: int | None = None
    seconds: float = 0.0
    """How long it has been in the phase without progress."""
    seconds_left: float = 0.0
    """Seconds until the limit of the phase; 0: the watchdog is off."""
    failure: str | None = None
    """Why it ends; None: it does not."""

    def position(self) -> tuple[float, int]:
        """Its progress: the step, and the phase of the step."""
        if self.step is None:
            return (float("inf") if self.phase == "finish" else -1.0), 0
        return self.step, _ORDER.get(self.phase or "", 2)

    def description(self) -> str:
        """waiting for the rows of step 7."""
        return "between phases" if self.phase is None else describe_phase(self.phase, self.step)


class Verdict(NamedTuple):
    """The process that keeps this one waiting."""

    process: int | None
    """The first cause; None: unknown."""
    sentence: str
    """What it does; "" if unknown."""
    patience: float = 0.0
    """Seconds to wait for it, because its own limit has not passed."""
    reported: bool = False
    """Whether the process reported its failure itself."""


def find_cause(own: int, before: Mapping[int, Status], after: Mapping[int, Status], count: int) -> Verdict:
    """The process that keeps `own` waiting, from two readings some periods apart: one that failed, does not run, or is
    behind the others."""
    if (failed := first_failure(own, after)) is not None:
        return failed
    others = [process for process in range(count) if process != own]
    silent = [each for each in others if each not in after or after[each].beat == getattr(before.get(each), "beat", -1)]
    if silent:
        first = min(silent, key=lambda each: after[each].position() if each in after else (-2.0, 0))
        more = "" if len(silent) == 1 else f" (nor do {len(silent) - 1} others)"
        last = f"; it was {after[first].description()}" if first in after else ""
        return Verdict(first, f"process {first} does not run any more{more}{last}")
    here = after.get(own, Status(0)).position()
    first = min(others, key=lambda each: after[each].position())
    if after[first].position() < here:
        status = after[first]
        step = after[own].step if own in after else None
        entered = "" if step is None else f" has not entered step {step}: it"
        sentence = f"process {first}{entered} has been {status.description()} for {status.seconds:.0f} s"
        return Verdict(first, sentence, max(status.seconds_left, 0.0))
    if here < min(after[each].position() for each in others):
        return Verdict(own, "the other processes wait for this one")
    return Verdict(None, "all processes are equally far: a collective or a device does not answer")


def first_failure(own: int, states: Mapping[int, Status]) -> Verdict | None:
    """Another process that reported a failure which does not follow from a lost process; None if no process did."""
    for process, status in sorted(states.items()):
        if process != own and status.failure is not None and not secondary(status.failure):
            return Verdict(process, f"process {process} failed: {status.failure}", reported=True)
    return None


LOST = "lost the connection to"


def secondary(failure: str) -> bool:
    """Whether a failure follows from that of another process."""
    return failure.startswith(LOST)


class PeerStatus:
    """Publishes the status of this process, and reads that of the others.

    Its calls to the service run in threads of their own, for they may block.

    Attributes:
        asked_to_stop: called with the name of the signal if another process was asked to stop.
    """

    def __init__(self, status: Callable[[int], Status], dump: Callable[[str], None]):
        """status: what this process does now, numbered as given. dump: writes the stacks of this process; called with
        the reason if another one hangs."""
        state = distributed.global_state
        self.index, self.count = state.process_id, state.num_processes
        self.period = max(PERIOD_SECONDS, self.count / PROCESSES_A_SECOND)
        self._client: Any = state.client
        self._status, self._dump, self._beat = status, dump, 0
        self._over = threading.Event()
        self.asked_to_stop: Callable[[str], None] = lambda name: None

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self._client is None or self.count < 2

    def start(self) -> None:
        """Publish from now on."""
        if not self.alone:
            threading.Thread(target=self._run, name="peer status", daemon=True).start()

    def stop(self) -> None:
        """Publish no more."""
        self._over.set()

    def publish_failure(self, failure: str) -> None:
        """Publish why this process ends; gives up after a while."""
        self.stop()
        if not self.alone:
            self._answered(lambda: self._publish(failure), LAST_CALL_SECONDS)

    def ask_for_stacks(self) -> None:
        """Make the others write their stacks, because this process hangs; waits until they should have."""
        if not self.alone:
            ask = partial(self._client.key_value_set, f"{_HANGS}/{self.index}", "", allow_overwrite=True)
            self._answered(ask, LAST_CALL_SECONDS)
            time.sleep(SILENT_PERIODS * self.period)

    def await_failures(self, seconds: float) -> None:
        """In process 0, whose end ends the others: wait until all of them have published why they end."""
        deadline = time.monotonic() + seconds
        while self.index == 0 and not self.alone and time.monotonic() < deadline:
            states = self._answered(self._read, LAST_CALL_SECONDS) or {}
            if all(index in states and states[index].failure for index in range(1, self.count)):
                return
            time.sleep(0.2)

    def share_stop(self, name: str) -> None:
        """Make the others stop as well, as after signal `name`."""
        if not self.alone:
            share = partial(self._client.key_value_set, f"{_STOPS}/{self.index}", name, allow_overwrite=True)
            self._answered(share, LAST_CALL_SECONDS)

    def barrier(self, where: str, seconds: float) -> bool:
        """Wait for all other processes at a barrier of this name. -> whether all came."""
        if self.alone:
            return True
        meeting = partial(self._client.wait_at_barrier, f"megajax/{where}", max(int(1000 * seconds), 1))
        return self._answered(lambda: self._tried(meeting), seconds + SERVICE_SECONDS) is True

    def verdict(self) -> Verdict:
        """The process that caused a failure or a hang of this one. Takes some periods."""
        if self.alone:
            return Verdict(None, "")
        before = self._answered(self._read, SERVICE_SECONDS)
        if before is not None:
            time.sleep(SILENT_PERIODS * self.period)
        after = None if before is None else self._answered(self._read, SERVICE_SECONDS)
        if before is None or after is None:
            if self.index == 0:
                return Verdict(None, "the coordination service does not answer")
            return Verdict(0, "process 0, which holds the coordination service, does not answer")
        return find_cause(self.index, before, after, self.count)

    def failed(self) -> Verdict | None:
        """The process that reported a failure; None if no process has. Returns without waiting."""
        states = None if self.alone else self._answered(self._read, LAST_CALL_SECONDS)
        return None if states is None else first_failure(self.index, states)

    def _run(self) -> None:
        asked: set[str] = set()
        while not self._over.is_set() and self._publish(None) is not None:
            with contextlib.suppress(Exception):  # as in _publish
                for key, value in self._client.key_value_dir_get(_ASKED):
                    if key not in asked:
                        asked.add(key)
                        self._answer(key, value)
            self._over.wait(self.period)

    def _answer(self, key: str, value: str) -> None:
        if key.startswith(_STOPS):
            self.asked_to_stop(value)
        else:
            self._dump(f"process {key.rpartition('/')[2]} hangs")

    def _tried(self, call: Callable[[], Any]) -> bool:
        try:
            call()
        except Exception:
            return False
        return True

    def _publish(self, failure: str | None) -> bool | None:
        self._beat += 1
        text = json.dumps(self._status(self._beat)._replace(failure=failure))
        try:
            self._client.key_value_set(f"{_KEY}/{self.index}", text, allow_overwrite=True)
        except Exception:  # the service is gone: jax ends this process
            return None
        return True

    def _read(self) -> dict[int, Status] | None:
        try:
            pairs = self._client.key_value_dir_get(_KEY)
        except Exception:
            return None
        return {int(key.rpartition("/")[2]): Status(*json.loads(text)) for key, text in pairs}

    def _answered[T](self, ask: Callable[[], T], seconds: float) -> T | None:
        """The result of `ask`; None if it takes too long."""
        answers: list[T] = []
        asking = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
        asking.start()
        asking.join(seconds)
        return answers[0] if answers else None
