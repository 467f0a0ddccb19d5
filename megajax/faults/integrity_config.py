"""Settings of the checks for silent data corruption, slow processes and failing devices."""

from dataclasses import dataclass

from megajax.config.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicasConfig:
    """Comparison of hashes of the state on all devices: devices with the same shard must have the same bytes.

    Example: `mj.ResilienceConfig(replicas=mj.ReplicasConfig(every=500))`
    """

    every: int | None = None
    """Compare copies of weights and optimizer state every this many steps, and before every checkpoint; end with exit
    code 17, without saving, if they differ. none: never."""
    log_hash: bool = False
    """Write the hash of the state by parts into events.jsonl (state_hash) each time, to compare two runs."""

    def problems(self) -> list[Problem]:
        problems = _at_least_one(self, "every")
        if self.log_hash and self.every is None:
            problems.append(Problem("log_hash", "nothing is hashed with every=none", "set every, for example to 100"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeConfig:
    """Recomputation of the gradients of a step, with every device in the place of another.

    Example: `mj.ResilienceConfig(recompute=mj.RecomputeConfig(every=1000))`
    """

    every: int | None = None
    """Compute the gradients of the next step twice every this many steps, and end with exit code 17 if the results of
    two devices differ reproducibly. none: never. Costs about two steps, and two compilations the first time."""
    tolerance: float = 0.0
    """Largest relative difference between loss and gradient norm of a data-parallel group; 0: all bits of its gradients
    are equal. Kernels that are not deterministic need about 1e-3."""

    def problems(self) -> list[Problem]:
        problems = _at_least_one(self, "every")
        if not 0 <= self.tolerance < 1:
            problems.append(Problem("tolerance", f"must be in [0, 1), got {self.tolerance:g}", "1e-3 is a usual value"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglersConfig:
    """Detection of slow processes, from times that processes exchange every logging.every steps.

    Example: `mj.ResilienceConfig(stragglers=mj.StragglersConfig(factor=1.5))`
    """

    factor: float | None = 2.0
    """A process is a straggler if one of its phases takes more than this multiple of the median of the other
    processes; none: stragglers are not detected."""
    share: float = 0.1
    """The phase must also be longer than that median by at least this share of the time of a step."""

    def problems(self) -> list[Problem]:
        problems = []
        if self.factor is not None and not self.factor > 1:
            problems.append(Problem("factor", f"must be above 1, got {self.factor:g}", "none turns the rule off"))
        if not self.share > 0:
            problems.append(Problem("share", f"must be above 0, got {self.share:g}"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthConfig:
    """Health of devices and hosts.

    Example: `mj.ResilienceConfig(health=mj.HealthConfig())`
    """

    before_run: bool = False
    """Test devices, links, disk and clocks of every process before anything else; refuse to start, with exit code 1, if
    a test fails."""
    every_seconds: float | None = 60.0
    """Interval of querying the driver for memory errors, slowdowns, temperature and power of the GPUs, if nvidia-ml-py
    is installed. none: never."""

    def problems(self) -> list[Problem]:
        seconds = self.every_seconds
        if seconds is not None and not seconds >= 1:
            return [Problem("every_seconds", f"must be at least 1, got {seconds:g}", "none turns it off")]
        return []


def _at_least_one(cfg: object, name: str) -> list[Problem]:
    value = getattr(cfg, name)
    if value is None or value >= 1:
        return []
    return [Problem(name, f"must be at least 1, got {value}", "none turns it off")]
