"""Explains errors of a process that lost another one: which process it lost, and why."""

import re

import jax

from megajax.config.errors import UserError, first_line
from megajax.job.faults.failure import causes
from megajax.job.faults.peer_status import LOST, PeerStatus, Verdict

CONNECTION = re.compile(
    r"Gloo \w+ (failed|timed out)|Connection (closed|reset) by peer|Socket closed|Broken pipe|NCCL|ncclComm"
    r"|[Cc]oordination ?service|[Bb]arrier .*(timed out|failed|aborted)|heartbeat|unhealthy",
)
"""Runtime errors of collectives or the coordination service that could not reach another process."""


class LostPeer(UserError):
    """Another process ended or does not run, and this one can't continue without it."""

    code = 1


def lost_peer(error: BaseException, peers: PeerStatus) -> tuple[LostPeer, Verdict] | None:
    """An explained error and its cause; None if no other process is known to be the cause.

    Takes seconds: a process counts as killed when it has published nothing for some periods.
    """
    runtime_error = runtime_error_of(error)
    if runtime_error is None or peers.single_process or not CONNECTION.search(str(runtime_error)):
        return None
    verdict = peers.failed() or peers.verdict()
    if verdict.process is None or verdict.process == peers.index or verdict.patience > 0:
        return None
    return LostPeer(f"{LOST} process {verdict.process}: {verdict.explanation} ({first_line(runtime_error)})"), verdict


def runtime_error_of(error: BaseException) -> BaseException | None:
    """The error of a program or of a collective that caused `error`; None if there is none.

    jax raises some errors of collectives as ValueError, where it dispatches a compiled program.
    """
    return next(
        (
            cause
            for cause in causes(error)
            if isinstance(cause, jax.errors.JaxRuntimeError)
            or (isinstance(cause, ValueError) and CONNECTION.search(str(cause)))
        ),
        None,
    )
