"""Settings of what a process does about faults: signals, early ends, numbers that are not finite, silent corruption."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megajax.config.bounds import Bounds, Count, Positive
from megajax.config.errors import Problem
from megajax.faults.drills import CORRUPTION, NUMERIC, PROCESS, Drill
from megajax.faults.exit_codes import EXIT_CODES, STOP_ASKED
from megajax.faults.watchdog import MAX_SECONDS, WatchdogConfig

FAILURE_CODES = tuple(code for code in sorted(EXIT_CODES.keys() - STOP_ASKED) if code < 128)

OFF, NO_LIMIT = "none turns it off", "none sets no limit"
type Interval = Annotated[int, Bounds(at_least=1, hint=OFF)]


@dataclass(frozen=True, kw_only=True)
class ReplicasConfig:
    """Comparison of hashes of the state on all devices: devices with the same shard must have the same bytes.

    Example: `mj.ResilienceConfig(replicas=mj.ReplicasConfig(every=500))`
    """

    every: Interval | None = None
    """Compare copies of weights and optimizer state every this many steps, and before every checkpoint; end with exit
    code 17, without saving, if they differ. none: never."""
    log_hash: bool = False
    """Write the hash of the state by parts into events.jsonl (state_hash) each time, to compare two runs."""

    def problems(self) -> list[Problem]:
        if self.log_hash and self.every is None:
            return [Problem("log_hash", "nothing is hashed with every=none", "set every, for example to 100")]
        return []


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Recomputation of the gradients of a step, with every device in the place of another.

    Example: `mj.ResilienceConfig(recompute=mj.RecomputeConfig(every=1000))`
    """

    every: Interval | None = None
    """Compute the gradients of the next step twice every this many steps, and end with exit code 17 if the results of
    two devices differ reproducibly. none: never. Costs about two steps, and two compilations the first time."""
    tolerance: Annotated[float, Bounds(at_least=0, below=1, hint="1e-3 is a usual value")] = 0.0
    """Largest relative difference between loss and gradient norm of a data-parallel group; 0: all bits of its gradients
    are equal. Kernels that are not deterministic need about 1e-3."""


@dataclass(frozen=True, kw_only=True)
class StragglersConfig:
    """Detection of slow processes, from times that processes exchange every logging.every steps.

    Example: `mj.ResilienceConfig(stragglers=mj.StragglersConfig(factor=1.5))`
    """

    factor: Annotated[float, Bounds(above=1, hint="none turns the rule off")] | None = 2.0
    """A process is a straggler if one of its phases takes more than this multiple of the median of the other
    processes; none: stragglers are not detected."""
    share: Positive = 0.1
    """The phase must also be longer than that median by at least this share of the time of a step."""


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Health of devices and hosts.

    Example: `mj.ResilienceConfig(health=mj.HealthConfig())`
    """

    before_run: bool = False
    """Test devices, links, disk and clocks of every process before anything else; refuse to start, with exit code 1, if
    a test fails."""
    every_seconds: Annotated[float, Bounds(at_least=1, hint=OFF)] | None = 60.0
    """Interval of querying the driver for memory errors, slowdowns, temperature and power of the GPUs, if nvidia-ml-py
    is installed. none: never."""


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    """Signals, early ends, and losses or gradients that are not finite or spike.

    Example: `mj.ResilienceConfig(exit_after_minutes=230, spike_factor=10)`
    """

    save_on_signal: bool = True
    """On SIGTERM, SIGINT (Ctrl-C), SIGUSR1 or SIGHUP, save a checkpoint and end with exit_code_on_signal."""
    exit_code_on_signal: Annotated[int, Bounds(at_least=0, at_most=127, hint="75 is usual")] = 0
    """Exit code of a run that was asked to stop by a signal and has saved, e.g. 75 to have a scheduler requeue it."""
    stop_grace: Annotated[float, Bounds(above=0, at_most=MAX_SECONDS, hint="in seconds")] = 60.0
    """Seconds from a signal after which a run whose step, rows or compilation do not end stops without saving; at least
    two steps."""
    exit_after_steps: Annotated[int, Bounds(above=0, hint=NO_LIMIT)] | None = None
    """Save and end with exit code 0 after this many steps of the current attempt; none: no limit."""
    exit_after_minutes: Annotated[float, Bounds(above=0, hint=NO_LIMIT)] | None = None
    """Save and end with exit code 0 at the first step that ends this many minutes after the start; none: no limit."""
    stop_on_nonfinite: bool = True
    """Stop with exit code 17, without saving, at a step whose loss or gradient norm is not finite, unless dynamic loss
    scaling skipped its update. false: skip the updates of such steps and continue."""
    rerun: bool = True
    """Repeat a step that is not finite or spikes, from the same state and the same rows. If the second result is good,
    the fault was transient, and training continues with that result."""
    spike_factor: Annotated[float, Bounds(above=1, hint=OFF)] | None = None
    """A loss above this multiple of `spike_reference` is a spike; none: spikes are not detected."""
    spike_reference: Literal["largest", "median"] = "largest"
    """largest: the largest loss so far (Megatron-LM's rule, with spike_factor=10). median: of spike_window steps."""
    spike_window: Count = 100
    """Steps before spikes are detected, and window of the median."""
    spike_action: Literal["accept", "skip", "stop"] = "accept"
    """What to do about a spike that the repeated step confirms. accept: apply the update; skip: skip the update; stop:
    end with exit code 17."""
    largest_norm: Annotated[float, Bounds(above=0, hint=NO_LIMIT)] | None = None
    """Skip updates whose gradient norm, before clipping, is above this; none: no limit."""
    skip_steps: tuple[Annotated[int, Bounds(at_least=1, hint="steps count from 1")], ...] = ()
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
        problems = []
        if self.exit_code_on_signal in FAILURE_CODES:
            message = f"must not be {', '.join(map(str, FAILURE_CODES))}, which mean failures"
            problems.append(Problem("exit_code_on_signal", f"{message}; got {self.exit_code_on_signal}", "75 is usual"))
        if self.spike_factor is not None and self.spike_action == "accept" and not self.rerun:
            problems.append(
                Problem(
                    "spike_action",
                    "accept with rerun=false would do nothing about a spike",
                    "set rerun=true, spike_action=skip or stop, or spike_factor=none",
                )
            )
        for text in self.inject:
            try:
                if Drill.parse(text).step < 1:
                    problems.append(Problem("inject", f"steps count from 1, got {text!r}"))
            except ValueError as error:
                problems.append(Problem("inject", f"{error}; got {text!r}"))
        return problems
