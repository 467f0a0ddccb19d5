"""Errors of a process that lost another one, explained: which, and why."""

import re

import jax

from megajax.config.errors import UserError
from megajax.job.failure import causes
from megajax.job.peer_status import LOST, PeerStatus, Verdict
from megajax.resilience.beats import first_line

CONNECTION = re.compile(
    r"Gloo \w+ (failed|timed out)|Connection (closed|reset) by peer|Socket closed|Broken pipe|NCCL|ncclComm"
    r"|[Cc]oordination ?service|[Bb]arrier .*(timed out|failed|aborted)|heartbeat|unhealthy",
)
"""In errors of the runtime: a collective or the coordination service could not reach another process."""


class LostPeer(UserError):
    """Another process ended, or does not run; this one can't go on without it."""

    code = 1


def lost_peer(error: BaseException, peers: PeerStatus) -> tuple[LostPeer, Verdict] | None:
    """The error explained, and who is the cause; None if it has nothing to do with other processes, or nobody knows.

    Takes seconds: a process that was killed is one that publishes nothing any more.
    """
    said = next((each for each in causes(error) if isinstance(each, jax.errors.JaxRuntimeError)), None)
    if said is None or peers.alone or not CONNECTION.search(str(said)):
        return None
    verdict = peers.failed() or peers.verdict()
    if verdict.process is None or verdict.process == peers.index or verdict.patience > 0:
        return None
    return LostPeer(f"{LOST} process {verdict.process}: {verdict.sentence} ({first_line(said)})"), verdict
