"""A step boundary at which all processes retry a failed save.

A failed save is retried some seconds later, by all processes after the same step. Their main threads are up to two
steps apart and must not wait for each other, because a step of one process may need the same step of another. So
background threads agree, through the coordination service, on the first boundary that no main thread has reached.
"""

import threading

from megajax.processes.peers import Peers


class StepBoundary:
    """The last boundary that this process's main thread has reached, and the agreed one."""

    def __init__(self, peers: Peers, step: int):
        """step: the last boundary that the main thread has reached."""
        self._peers = peers
        self._changed = threading.Condition()
        self._agreeing = False
        self._reached = step
        self._agreed: int | None = None

    def reached(self, step: int) -> bool:
        """Called by the main thread after each step. Returns whether this is the agreed boundary."""
        with self._changed:
            # Takes milliseconds: the background threads exchange messages, and wait for no main thread.
            self._changed.wait_for(lambda: not self._agreeing)
            self._reached = step
            return step == self._agreed

    def cancel(self) -> None:
        """Called by the main thread when the agreed boundary is no longer needed."""
        with self._changed:
            self._agreed = None

    def agree(self) -> None:
        """Called by a background thread of each process. Then `reached` is true at the same boundary in all of them."""
        # A main thread that waits at its boundary may delay the step of another process. So no main thread may wait
        # before the background threads of all processes are here.
        self._peers.agree()
        with self._changed:
            self._agreeing, following = True, self._reached + 1
        agreed = None
        try:
            agreed = max(self._peers.gather(following))
        finally:
            with self._changed:
                self._agreeing, self._agreed = False, agreed
                self._changed.notify_all()


class DelayedAgreement:
    """An agreement on a boundary, made in a background thread after a delay."""

    def __init__(self, boundary: StepBoundary, seconds: float):
        self.error: Exception | None = None
        self._boundary, self._seconds = boundary, seconds
        self._skip_delay = threading.Event()
        # A daemon, so that the program can end without waiting for it.
        self._thread = threading.Thread(target=self._agree, name="megajax save retry", daemon=True)
        self._thread.start()

    def _agree(self) -> None:
        self._skip_delay.wait(self._seconds)
        try:
            self._boundary.agree()
        except Exception as error:
            self.error = error

    def wait(self, *, skip_delay: bool) -> None:
        """Waits for the delay, unless `skip_delay`, and for the agreement. Raises the error of the agreement.

        Called by the main threads of all processes at the same boundary.
        """
        if skip_delay:
            self._skip_delay.set()
        self._thread.join()
        if self.error is not None:
            raise self.error
