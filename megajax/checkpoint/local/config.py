"""Settings of checkpoints on local disks or in host memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megajax.config.builds import Builds
from megajax.config.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalConfig(Builds):
    """Checkpoints that each process writes to a folder of its machine, between those in the shared folder.

    `build(folder)` gives the `LocalCheckpoints` of the run whose shared checkpoints folder is given.
    """

    target: ClassVar[str] = "megajax.checkpoint.local.manager:LocalCheckpoints"

    every: int
    """Steps between local checkpoints. A step that is saved to the shared folder is not saved locally."""
    folder: Path
    """A folder of the machine: on a local disk, or below /dev/shm for host memory. Processes of a machine share it."""
    replicas: int = 0
    """How many other processes keep a copy of a process's shards, so that they survive the loss of its machine."""
    jump: int | None = None
    """Process k keeps copies of the shards of process k + jump; none: the number of processes of a machine, so that
    the copies are on another machine."""
    keep: int = 2
    """How many of the newest local checkpoints to keep. Writing one needs space for one more."""
    failures: int = 3
    """After this many failed local checkpoints in a row, the attempt saves no more of them; training continues."""

    def problems(self) -> list[Problem]:
        """Problems of the settings themselves; `LocalCheckpoints` checks the folder."""
        minimums = {"every": 1, "replicas": 0, "keep": 1, "failures": 1, "jump": 1}
        return [
            Problem(name, f"is {value}, but must be at least {minimum}")
            for name, minimum in minimums.items()
            if (value := getattr(self, name)) is not None and value < minimum
        ]
