"""The status of each process of a run, published in jax's coordination service to find the first cause of a failure.

A process that fails or hangs reads the status of the others. The service needs no devices, but it runs in process 0:
calls fail when that process has ended, and block while it is stopped.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import inf
from typing import Any, NamedTuple

import jax
from jax._src import distributed  # the key-value store of the coordination service has no public name

from megajax.config.call_with_timeout import with_time_limit
from megajax.config.errors import UserError, first_line
from megajax.faults.activity import FINISH, SAVE, Position, describe_phase, position
from megajax.faults.attempt_end import PEER_LOST

PERIOD_SECONDS = 1.0
"""Period at which a process publishes its status."""

PROCESSES_A_SECOND = 500
"""Limit of all processes together: with more processes, each publishes less often."""

SERVICE_SECONDS = 4.0
"""How long to wait for the coordination service."""

LAST_CALL_SECONDS = 1.0
"""How long to wait for the coordination service in a process that is about to end."""

SILENT_PERIODS = 2.5
"""A process that publishes nothing for this many periods does not run."""

_KEY, _HANGS, _STOPS = "megajax/status", "megajax/asked/stacks", "megajax/asked/stop"
_REQUESTS = "megajax/asked"

_SAVES = (SAVE, FINISH)
"""Phases of the main thread that wait for background saves."""


class Status(NamedTuple):
    """The last published status of a process."""

    beat: int
    """Counter of the statuses that the process published."""
    phase: str | None = None
    step: int | None = None
    seconds: float = 0.0
    """Seconds in the phase without progress."""
    seconds_left: float = 0.0
    """Seconds until the limit of the phase; 0: the watchdog is off."""
    failure: str | None = None
    """Why the process ends; None: it runs."""
    stage: str | None = None
    waits: bool = False
    """Whether it waits for other processes."""
    cause: int | None = None
    """The process that it waited for, if it ends because of a hang."""
    background: "Status | None" = None
    """The phase of another thread, such as a background save; None: there is none."""

    completed: int = 0
    """The last step whose numbers have arrived."""

    def position(self) -> Position:
        """How far the process is."""
        return position(self.phase, self.step, self.stage, waits=self.waits, completed=self.completed)

    def description(self) -> str:
        """The phase in words: waiting for the rows of step 7."""
        return "between phases" if self.phase is None else describe_phase(self.phase, self.step, self.stage)

    @classmethod
    def parse(cls, text: str) -> "Status":
        """The status whose JSON is `text`."""
        status = cls(*json.loads(text))
        return status if status.background is None else status._replace(background=cls(*status.background))


class Verdict(NamedTuple):
    """The process that keeps this one waiting."""

    process: int | None
    """The first cause; None: unknown."""
    explanation: str
    """A sentence about the cause; "" if unknown."""
    patience: float = 0.0
    """Seconds until that process reaches its own limit."""
    reported: bool = False
    """Whether the process reported its failure itself."""


def find_cause(
    local_process: int,
    before: Mapping[int, Status],
    after: Mapping[int, Status],
    count: int,
    *,
    background: bool = False,
) -> Verdict:
    """The process that keeps `local_process` waiting, from two readings some periods apart: one that failed, does not
    run, or is behind the others.

    background: a background thread waits, not the main thread.
    """
    if (failed := first_failure(local_process, after)) is not None:
        return failed
    peers = [process for process in range(count) if process != local_process]
    beats = {index: status.beat for index, status in before.items()}
    silent = [index for index in peers if index not in after or _is_silent(after[index], beats.get(index))]
    if silent:
        first = min(silent, key=lambda index: after[index].position() if index in after else (-inf, 0, 0, False))
        more = "" if len(silent) == 1 else f" (nor do {len(silent) - 1} others)"
        last = f"; it was {after[first].description()}" if first in after else ""
        return Verdict(first, f"process {first} no longer runs{more}{last}")
    main = {local_process: Status(0), **after}
    verdict = None if background else _last(local_process, main)
    if verdict is None and (background or main[local_process].phase in _SAVES):
        # A process without a background save has finished it.
        threads = {index: status.background or Status(0, FINISH) for index, status in main.items()}
        verdict = _last(local_process, threads)
    return verdict or Verdict(None, "all processes are equally far: a collective or a device does not answer")


def _is_silent(status: Status, beat: int | None) -> bool:
    """Whether a process publishes nothing; one that has waited in vain ends, and its last status counts."""
    return status.beat == beat and not (status.failure is not None and status.cause is not None)


def _last(local_process: int, states: Mapping[int, Status]) -> Verdict | None:
    """The process that is behind the others; None if several are."""
    local = states[local_process]
    first = min((index for index in states if index != local_process), key=lambda index: states[index].position())
    status = states[first]
    if status.position() < local.position():
        ahead = local.step is not None and (status.step, status.phase) != (local.step, local.phase)
        entered = f" has not entered step {local.step}: it" * ahead
        text = f"process {first}{entered} has been {status.description()} for {status.seconds:.0f} s"
        return Verdict(first, text, max(status.seconds_left, 0.0))
    if local.position() < status.position():
        return Verdict(local_process, "the other processes wait for this one")
    return None


def first_failure(local_process: int, states: Mapping[int, Status]) -> Verdict | None:
    """The first other process that reported a failure of its own, not of a lost or late process; None if none did."""
    for process, status in sorted(states.items()):
        failure, follows = status.failure, status.cause not in (None, process)
        if process != local_process and failure is not None and not (follows or PEER_LOST.search(failure)):
            return Verdict(process, f"process {process} failed: {status.failure}", reported=True)
    return None


class PeerStatus:
    """Publishes the status of this process, and reads the status of the others.

    Calls to the service run in separate threads, because they may block.

    Attributes:
        on_stop_request: called with the name of the signal if another process was asked to stop.
    """

    def __init__(self, status: Callable[[int], Status], dump: Callable[[str], None]):
        """status: returns the status of this process with the given beat. dump: writes the stacks of this process;
        called with the reason if another process hangs."""
        self.index, self.count, self.period = 0, 1, PERIOD_SECONDS
        self._client: Any = None
        self._status, self._dump, self._beat = status, dump, 0
        self._stopped = threading.Event()
        self.on_stop_request: Callable[[str], None] = lambda name: None

    @property
    def single_process(self) -> bool:
        """Whether this is the only process."""
        return self._client is None or self.count < 2

    def join(self) -> None:
        """Start to publish, if there are other processes; they are connected now."""
        state = distributed.global_state
        self.index, self.count, self._client = state.process_id, state.num_processes, state.client
        self.period = max(PERIOD_SECONDS, self.count / PROCESSES_A_SECOND)
        self.start()

    def start(self) -> None:
        """Start to publish."""
        if not self.single_process:
            threading.Thread(target=self._run, name="peer status", daemon=True).start()

    def stop(self) -> None:
        """Stop publishing."""
        self._stopped.set()

    def publish_failure(self, failure: str, cause: int | None = None) -> None:
        """Publish why this process ends, within LAST_CALL_SECONDS. cause: the process that it waited for."""
        self.stop()
        if not self.single_process:
            with_time_limit(lambda: self._publish(failure, cause), LAST_CALL_SECONDS)

    def ask_for_stacks(self) -> None:
        """Make the others write their stacks, because this process hangs, and give them time to."""
        if not self.single_process:
            call = partial(self._client.key_value_set, f"{_HANGS}/{self.index}", "", allow_overwrite=True)
            with_time_limit(call, LAST_CALL_SECONDS)
            time.sleep(SILENT_PERIODS * self.period)

    def await_failures(self, seconds: float) -> None:
        """In process 0, whose exit ends the others: wait until all of them have published why they end."""
        deadline = time.monotonic() + seconds
        while self.index == 0 and not self.single_process and time.monotonic() < deadline:
            states = with_time_limit(self._read, LAST_CALL_SECONDS) or {}
            if all(index in states and states[index].failure for index in range(1, self.count)):
                return
            time.sleep(0.2)

    def share_stop(self, name: str) -> None:
        """Make the other processes stop too, as after signal `name`."""
        if not self.single_process:
            share = partial(self._client.key_value_set, f"{_STOPS}/{self.index}", name, allow_overwrite=True)
            with_time_limit(share, LAST_CALL_SECONDS)

    def barrier(self, name: str, seconds: float) -> bool:
        """Wait for all other processes at the barrier `name` -> whether all reached it."""
        if self.single_process:
            return True
        meeting = partial(self._client.wait_at_barrier, f"megajax/{name}", max(int(1000 * seconds), 1))
        return with_time_limit(lambda: self._succeeds(meeting), seconds + SERVICE_SECONDS) is True

    def verdict(self, *, background: bool = False) -> Verdict:
        """The process that caused a failure or a hang of this one. Takes several periods.

        background: a background thread hangs, not the main thread.
        """
        if self.single_process:
            return Verdict(None, "")
        before = with_time_limit(self._read, SERVICE_SECONDS)
        if before is not None:
            time.sleep(SILENT_PERIODS * self.period)
        after = None if before is None else with_time_limit(self._read, SERVICE_SECONDS)
        if before is None or after is None:
            if self.index == 0:
                return Verdict(None, "the coordination service does not answer")
            return Verdict(0, "process 0, which holds the coordination service, does not answer")
        return find_cause(self.index, before, after, self.count, background=background)

    def failed(self) -> Verdict | None:
        """The process that reported a failure; None if no process has. Returns without waiting."""
        states = None if self.single_process else with_time_limit(self._read, LAST_CALL_SECONDS)
        return None if states is None else first_failure(self.index, states)

    def _run(self) -> None:
        handled: set[str] = set()
        while not self._stopped.is_set() and self._publish(None) is not None:
            with contextlib.suppress(Exception):  # as in _publish
                for key, value in self._client.key_value_dir_get(_REQUESTS):
                    if key not in handled:
                        handled.add(key)
                        self._handle_request(key, value)
            self._stopped.wait(self.period)

    def _handle_request(self, key: str, value: str) -> None:
        if key.startswith(_STOPS):
            self.on_stop_request(value)
        else:
            self._dump(f"process {key.rpartition('/')[2]} hangs")

    def _succeeds(self, call: Callable[[], Any]) -> bool:
        try:
            call()
        except Exception:
            return False
        return True

    def _publish(self, failure: str | None, cause: int | None = None) -> bool | None:
        self._beat += 1
        text = json.dumps(self._status(self._beat)._replace(failure=failure, cause=cause))
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
        return {int(key.rpartition("/")[2]): Status.parse(text) for key, text in pairs}


class LostPeer(UserError):
    """Another process ended or does not run, and this one can't continue without it."""

    code = 1


def lost_peer(error: BaseException, peers: PeerStatus) -> tuple[LostPeer, Verdict] | None:
    """An explained error and its cause; None if no other process is known to be the cause.

    Takes seconds: a process counts as killed when it has published nothing for some periods.
    """
    runtime_error = runtime_error_of(error)
    if runtime_error is None or peers.single_process or not PEER_LOST.search(str(runtime_error)):
        return None
    verdict = peers.failed() or peers.verdict()
    if verdict.process is None or verdict.process == peers.index or verdict.patience > 0:
        return None
    text = f"lost the connection to process {verdict.process}: {verdict.explanation} ({first_line(runtime_error)})"
    return LostPeer(text), verdict


def runtime_error_of(error: BaseException) -> BaseException | None:
    """The error of a program or of a collective that caused `error`; None if there is none.

    jax raises some errors of collectives as ValueError, where it dispatches a compiled program.
    """
    return next(
        (
            cause
            for cause in causes(error)
            if isinstance(cause, jax.errors.JaxRuntimeError)
            or (isinstance(cause, ValueError) and PEER_LOST.search(str(cause)))
        ),
        None,
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its chain of causes."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
