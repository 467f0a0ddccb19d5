"""Settings of what a run does when it is told to stop, when it is to end early, and when its numbers go bad."""

from dataclasses import dataclass
from typing import Literal

from megajax.config.errors import Problem
from megajax.resilience.drills import Drill


@dataclass(frozen=True, kw_only=True, slots=True)
class ResilienceConfig:
    """What a run does when it is told to stop or when its numbers go bad."""

    save_on_signal: bool = True
    """Save a checkpoint when stopped by SIGTERM, SIGINT (Ctrl-C) or SIGUSR1, then end with exit code 0."""
    exit_after_steps: int | None = None
    """Save and end with exit code 0 after this many steps of this attempt; none: go on to the end."""
    exit_after_minutes: float | None = None
    """Save and end with exit code 0 at the first step that ends this many minutes after the start; none: go on."""
    stop_on_nonfinite: bool = True
    """Stop with exit code 17, and save nothing, at a step whose loss or gradient norm is not finite and whose update
    was not skipped by dynamic loss scaling. false goes on without the updates of such steps."""
    rerun: bool = True
    """Run a step whose numbers are not finite, or a spike, a second time from the same state and the same rows: numbers
    that are good then were a passing fault, and training goes on as if it had not been."""
    spike_factor: float | None = None
    """A loss above this multiple of `spike_reference` is a spike; none: there are no spikes."""
    spike_reference: Literal["largest", "median"] = "largest"
    """largest: the largest loss so far (with spike_factor=10 Megatron-LM's rule); median: of the last spike_window."""
    spike_window: int = 100
    """Steps before anything is called a spike, and those the median is taken of."""
    spike_action: Literal["accept", "skip", "stop"] = "accept"
    """What becomes of a spike that comes again when the step is run again. accept: training goes on with it; skip:
    without its update; stop: the run ends with exit code 17."""
    largest_norm: float | None = None
    """Updates whose gradient norm, before clipping, is above this are not made; none: no limit."""
    skip_steps: tuple[int, ...] = ()
    """Steps whose rows are read and whose update is not made."""
    inject: tuple[str, ...] = ()
    """Faults made on purpose, for drills: KIND:step=N the first time an attempt runs it, KIND:step=N:always every time;
    KIND is nan, inf, spike (1000 times the loss and the gradients) or nan_gradients."""

    def drills(self) -> tuple[Drill, ...]:
        """Raises ValueError for what `problems` lists."""
        return tuple(Drill.parse(text) for text in self.inject)

    def problems(self) -> list[Problem]:
        found = [
            Problem(name, f"must be above 0, got {value:g}", "none sets no limit")
            for name in ("exit_after_steps", "exit_after_minutes", "largest_norm")
            if (value := getattr(self, name)) is not None and not value > 0
        ]
        if self.spike_factor is not None and not self.spike_factor > 1:
            found.append(Problem("spike_factor", f"must be above 1, got {self.spike_factor:g}", "none turns it off"))
        if self.spike_window < 1:
            found.append(Problem("spike_window", f"must be at least 1, got {self.spike_window}"))
        if self.spike_factor is not None and self.spike_action == "accept" and not self.rerun:
            found.append(
                Problem(
                    "spike_action",
                    "accept with rerun=false would do nothing about a spike",
                    "set rerun=true, spike_action=skip or stop, or spike_factor=none",
                )
            )
        found += [Problem("skip_steps", f"steps count from 1, got {step}") for step in self.skip_steps if step < 1]
        for text in self.inject:
            try:
                if Drill.parse(text).step < 1:
                    found.append(Problem("inject", f"steps count from 1, got {text!r}"))
            except ValueError as error:
                found.append(Problem("inject", f"{error}; got {text!r}"))
        return found
