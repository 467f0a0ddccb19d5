"""The counts of an engine."""

from dataclasses import dataclass


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
