"""Settings of what a run does when it is told to stop or when its numbers go bad."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ResilienceConfig:
    """What a run does when it is told to stop or when its numbers go bad."""

    save_on_signal: bool = True
    """Save a checkpoint when stopped by SIGTERM, SIGINT (Ctrl-C) or SIGUSR1, then end with exit code 0."""
    stop_on_nonfinite: bool = True
    """Stop with exit code 17, and save nothing, at a step whose loss or gradient norm is not finite and whose update
    was not skipped by dynamic loss scaling."""
