"""The counts of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from megajax.inference.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Counts over all replicas. Counts that end in `_total` only grow."""

    running: int
    """Running rows."""
    waiting: int
    """Rows that wait for a slot or for blocks."""
    requests: int
    """Unfinished requests."""
    blocks_used: int
    """Blocks of the cache in use."""
    blocks: int
    """Blocks of the cache."""
    steps_total: int
    """Steps of the device."""
    tokens_total: int
    """Tokens of answers."""
    prompt_tokens_total: int
    """Computed tokens of prompts; those of preempted rows count each time."""
    shared_tokens_total: int
    """Tokens of prompts found in the cache."""
    drafted_tokens_total: int
    """Tokens of drafts that steps verified."""
    accepted_tokens_total: int
    """Those among them that became tokens of answers."""
    drafts_total: int
    """Drafts that steps verified."""
    accepted_at_total: tuple[int, ...]
    """Accepted tokens by their position in the draft, from 0."""
    preemptions_total: int
    """Preempted rows, which are computed again."""
    errors_total: int
    """Faults that ended a single answer or request."""
    scheduler_seconds_total: float
    """Time in which the engine's thread worked: scheduling, dispatch, text and delivery."""
    device_seconds_total: float
    """Time in which the engine's thread waited for the device."""
    last_step_seconds: float
    """Both times of the last step."""

    def used_share(self) -> float:
        """Share of the cache's blocks in use, 0 to 1."""
        return self.blocks_used / self.blocks


class EngineCounts:
    """The counts of an engine that its schedulers do not have, as in `Statistics`."""

    def __init__(self, drafts: int):
        """drafts: maximum number of tokens of a draft."""
        self.steps = self.tokens = self.errors = self.drafts = self.drafted = 0
        self.accepted = [0] * drafts
        self.host_seconds = self.device_seconds = self.last_seconds = 0.0

    def present(self, schedulers: Sequence[Scheduler], *, requests: int) -> Statistics:
        """All counts, with those of the schedulers. requests: unfinished ones."""
        return Statistics(
            running=sum(len(scheduler.running) for scheduler in schedulers),
            waiting=sum(len(scheduler.waiting) for scheduler in schedulers),
            requests=requests,
            blocks_used=sum(scheduler.pool.used for scheduler in schedulers),
            blocks=sum(scheduler.pool.blocks for scheduler in schedulers),
            steps_total=self.steps,
            tokens_total=self.tokens,
            prompt_tokens_total=sum(scheduler.prompt_tokens for scheduler in schedulers),
            shared_tokens_total=sum(scheduler.shared_tokens for scheduler in schedulers),
            drafted_tokens_total=self.drafted,
            accepted_tokens_total=sum(self.accepted),
            drafts_total=self.drafts,
            accepted_at_total=tuple(self.accepted),
            preemptions_total=sum(scheduler.preemptions for scheduler in schedulers),
            errors_total=self.errors,
            scheduler_seconds_total=self.host_seconds,
            device_seconds_total=self.device_seconds,
            last_step_seconds=self.last_seconds,
        )
