"""Settings for signals, early ends, and losses or gradients that are not finite or spike."""

from dataclasses import dataclass, field
from typing import Literal

from megajax.config.errors import Problem
from megajax.faults.drills import CORRUPTION, NUMERIC, PROCESS, Drill
from megajax.faults.exit_codes import EXIT_CODES, STOP_ASKED
from megajax.faults.integrity_config import HealthConfig, RecomputeConfig, ReplicasConfig, StragglersConfig
from megajax.faults.watchdog import MAX_SECONDS, WatchdogConfig

FAILURE_CODES = tuple(code for code in sorted(EXIT_CODES.keys() - STOP_ASKED) if code < 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResilienceConfig:
    """Signals, early ends, and losses or gradients that are not finite or spike.

    Example: `mj.ResilienceConfig(exit_after_minutes=230, spike_factor=10)`
    """

    save_on_signal: bool = True
    """On SIGTERM, SIGINT (Ctrl-C), SIGUSR1 or SIGHUP, save a checkpoint and end with exit_code_on_signal."""
    exit_code_on_signal: int = 0
    """Exit code of a run that was asked to stop by a signal and has saved, e.g. 75 to have a scheduler requeue it."""
    stop_grace: float = 60.0
    """Seconds from a signal after which a run whose step, rows or compilation do not end stops without saving; at least
    two steps."""
    exit_after_steps: int | None = None
    """Save and end with exit code 0 after this many steps of the current attempt; none: no limit."""
    exit_after_minutes: float | None = None
    """Save and end with exit code 0 at the first step that ends this many minutes after the start; none: no limit."""
    stop_on_nonfinite: bool = True
    """Stop with exit code 17, without saving, at a step whose loss or gradient norm is not finite, unless dynamic loss
    scaling skipped its update. false: skip the updates of such steps and continue."""
    rerun: bool = True
    """Repeat a step that is not finite or spikes, from the same state and the same rows. If the second result is good,
    the fault was transient, and training continues with that result."""
    spike_factor: float | None = None
    """A loss above this multiple of `spike_reference` is a spike; none: spikes are not detected."""
    spike_reference: Literal["largest", "median"] = "largest"
    """largest: the largest loss so far (Megatron-LM's rule, with spike_factor=10). median: of spike_window steps."""
    spike_window: int = 100
    """Steps before spikes are detected, and window of the median."""
    spike_action: Literal["accept", "skip", "stop"] = "accept"
    """What to do about a spike that the repeated step confirms. accept: apply the update; skip: skip the update; stop:
    end with exit code 17."""
    largest_norm: float | None = None
    """Skip updates whose gradient norm, before clipping, is above this; none: no limit."""
    skip_steps: tuple[int, ...] = ()
    """Steps whose update is skipped; their rows are consumed."""
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)
    """Comparison of copies of the state."""
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    """Computing gradients again on other devices."""
    stragglers: StragglersConfig = field(default_factory=StragglersConfig)
    """Slow processes."""
    health: HealthConfig = field(default_factory=HealthConfig)
    """Health of devices and hosts, before and during a run."""
    watchdog: WatchdogConfig | None = field(default_factory=WatchdogConfig)
    """Limits of the phases of a process: one that takes longer ends it with exit code 124; none: no limits."""
    inject: tuple[str, ...] = ()
    """Faults to inject, for drills. KIND:step=N: the first time that step is run; KIND:step=N:always: every time,
    also after a restart by the launcher; KIND:step=N:attempt=M: in its M-th start. KIND is nan, inf, spike (loss and
    gradients times 1000) or nan_gradients; or a fault of all processes (of process K: KIND:step=N:process=K): kill
    (SIGKILL), frozen (SIGSTOP), crash (an exception), stuck (its rows never arrive), locked (the same, in C code), or
    slow (0.3 s late from that step on); or wrong numbers on the first device of process K: bitflip (a bit of a weight,
    after the step) or wrong_gradients (in the results of resilience.recompute)."""

    def drills(self) -> tuple[Drill, ...]:
        """The faults in the numbers of steps. Raises ValueError for an invalid one, which `problems` reports."""
        return tuple(drill for drill in map(Drill.parse, self.inject) if drill.kind in NUMERIC)

    def process_drills(self) -> tuple[Drill, ...]:
        """The faults of processes. Raises ValueError like `drills`."""
        return tuple(drill for drill in map(Drill.parse, self.inject) if drill.kind in PROCESS)

    def corruption_drills(self) -> tuple[Drill, ...]:
        """The wrong numbers on one device. Raises ValueError like `drills`."""
        return tuple(drill for drill in map(Drill.parse, self.inject) if drill.kind in CORRUPTION)

    def problems(self) -> list[Problem]:
        problems = [
            Problem(name, f"must be above 0, got {value:g}", "none sets no limit")
            for name in ("exit_after_steps", "exit_after_minutes", "largest_norm")
            if (value := getattr(self, name)) is not None and not value > 0
        ]
        if not 0 < self.stop_grace <= MAX_SECONDS:
            message = f"must be above 0 and at most {MAX_SECONDS:g} seconds, got {self.stop_grace:g}"
            problems.append(Problem("stop_grace", message))
        if not 0 <= self.exit_code_on_signal < 128 or self.exit_code_on_signal in FAILURE_CODES:
            message = f"must be 0 to 127 and not {', '.join(map(str, FAILURE_CODES))}, which mean failures"
            problems.append(Problem("exit_code_on_signal", f"{message}; got {self.exit_code_on_signal}", "75 is usual"))
        if self.spike_factor is not None and not self.spike_factor > 1:
            problems.append(Problem("spike_factor", f"must be above 1, got {self.spike_factor:g}", "none turns it off"))
        if self.spike_window < 1:
            problems.append(Problem("spike_window", f"must be at least 1, got {self.spike_window}"))
        if self.spike_factor is not None and self.spike_action == "accept" and not self.rerun:
            problems.append(
                Problem(
                    "spike_action",
                    "accept with rerun=false would do nothing about a spike",
                    "set rerun=true, spike_action=skip or stop, or spike_factor=none",
                )
            )
        problems += [Problem("skip_steps", f"steps count from 1, got {step}") for step in self.skip_steps if step < 1]
        for text in self.inject:
            try:
                if Drill.parse(text).step < 1:
                    problems.append(Problem("inject", f"steps count from 1, got {text!r}"))
            except ValueError as error:
                problems.append(Problem("inject", f"{error}; got {text!r}"))
        return problems
