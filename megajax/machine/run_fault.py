"""A fault of a run as a row of `megajax.machine.known_faults`, and the conditions that it is compared with. No jax."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megajax.processes.known_fault import KnownFault, Version
from megajax.processes.xla_options import Option

type Answer = Literal["refuse", "set", "warn", "explain", "elsewhere"]
"""refuse: no such run begins. set: the run sets options that avoid it. warn: the run begins, and says so. explain: its
signs are not known before, and the cure is printed under the error. elsewhere: avoided where `KnownFault.cure` says."""

TRUE = ("1", "true", "True")


def running_programs(folder: Path = Path("/proc")) -> set[str]:
    """Names of the programs that this machine runs, as far as this process sees them."""
    names = set()
    for path in folder.glob("[0-9]*/comm"):
        try:
            names.add(path.read_text().strip())
        except OSError:  # it has ended
            continue
    return names


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What decides which faults a run can meet."""

    versions: Mapping[str, Version] = field(default_factory=dict)
    """Of what is installed, by the names of `VersionRange`."""
    gpus: int = 0
    """GPUs of this process."""
    devices: int = 0
    """GPUs of the run."""
    processes: int = 1
    capability: Version | None = None
    names: tuple[str, ...] = ()
    """Of the GPUs."""
    cpus: int = 0
    """Processors that this process may use; 0: not known."""
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Options of XLA that the user has set."""
    ragged: int = 0
    """Devices of a ragged exchange; 0: there is none."""
    programs: Callable[[], Collection[str]] = running_programs

    def is_set(self, variable: str) -> bool:
        return self.environment.get(variable, "") in TRUE

    def has_flag(self, name: str, value: str = "") -> bool:
        """Whether the user has switched an option on, or to a value that contains this one."""
        text = str(self.flags.get(name, ""))
        return value in text if value else text in TRUE


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFault(KnownFault):
    """A fault of a run. Its effect and cure are sentences without a subject and a full stop."""

    answer: Answer
    applies: Callable[[Conditions], bool] = lambda conditions: True
    """Whether a run on affected versions and GPUs meets it."""
    options: tuple[Option, ...] = ()
    """Compiler options that avoid it; the user's own come first."""

    def met(self, conditions: Conditions) -> bool:
        """Whether this run would meet the fault."""
        affected = all(versions.affected(conditions.versions) for versions in self.versions)
        return affected and self.among(conditions.capability) and self.applies(conditions)

    def text(self, conditions: Conditions) -> str:
        """One sentence: what is affected, and how."""
        affected = ", ".join(versions.affected(conditions.versions) for versions in self.versions)
        facts = {"share": conditions.cpus // max(conditions.gpus, 1), "ragged": conditions.ragged}
        return f"{f'{affected}: ' if affected else ''}{self.effect.format_map(facts)} ({self.report})"


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))
