"""A step boundary that the main threads of all processes agree on at a time of day.

A failed save is retried some seconds later, by all processes after the same step. Their main threads are up to two
steps apart and may not wait for each other, because a step of the one may need a step of the other. So threads agree,
through the coordination service, on the first boundary that no main thread has reached.
"""

import threading

from megajax.checkpoint.peers import Peers


class StepBoundary:
    """The boundary of this process's main thread, and the one that was agreed on."""

    def __init__(self, peers: Peers, step: int):
        """step: the last boundary that the main thread has reached."""
        self._peers = peers
        self._changed = threading.Condition()
        self._agreeing = False
        self._reached = step
        self._agreed: int | None = None

    def reached(self, step: int) -> bool:
        """Called by the main thread after each step. Whether this is the agreed boundary."""
        with self._changed:
            # For milliseconds: the threads of all processes exchange messages and wait for no main thread.
            self._changed.wait_for(lambda: not self._agreeing)
            self._reached = step
            return step == self._agreed

    def cancel(self) -> None:
        """Called by the main thread when the agreed boundary is not needed any more."""
        with self._changed:
            self._agreed = None

    def agree(self) -> None:
        """Called by a thread of each process; afterwards, `reached` is true at one boundary, the same for all."""
        # A main thread that waits at its boundary may hold up the step of another process, which must not yet have to
        # do something for this agreement: so all threads are here before the first main thread waits.
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


class Appointment:
    """An agreement on a boundary after some seconds, made in a thread."""

    def __init__(self, boundary: StepBoundary, seconds: float):
        self.error: Exception | None = None
        self._boundary, self._seconds = boundary, seconds
        self._hurry = threading.Event()
        # A daemon: a program that ends does not wait for it.
        self._thread = threading.Thread(target=self._keep, name="megajax save retry", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        self._hurry.wait(self._seconds)
        try:
            self._boundary.agree()
        except Exception as error:
            self.error = error

    def over(self, *, hurry: bool) -> None:
        """Waits for the agreement, and before that for the seconds unless `hurry`. Raises its error.

        Called by the main threads of all processes at the same boundary.
        """
        if hurry:
            self._hurry.set()
        self._thread.join()
        if self.error is not None:
            raise self.error
