"""The row of a fault that others reported: its effect, the versions that have it, and what to do.

`megajax.machine.known_faults` has the table. Imports neither jax nor numpy, so that configs and commands may read it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

type Version = tuple[int, ...]

EVERY_GPU: tuple[Version, Version] = ((), (100,))


class VersionRange(NamedTuple):
    """The affected versions of something that is installed."""

    packages: tuple[str, ...]
    """Its names, one for each version of CUDA; `driver`, `jaxlib` and `cuDNN` too."""
    first: Version = ()
    """First affected version."""
    fixed: Version | None = None
    """First version with a fix; None: no such version is known."""

    def affected(self, installed: Mapping[str, Version]) -> str:
        """The installed package in the range, with its version; "" if there is none."""
        for name in self.packages:
            version = installed.get(name)
            if version and version >= self.first and (self.fixed is None or version < self.fixed):
                return f"{name} {dotted(version)}"
        return ""

    def text(self) -> str:
        """The range in words."""
        since = f"from {dotted(self.first)} on" if self.first else "of any version"
        until = "without a known fix" if self.fixed is None else f"fixed in {dotted(self.fixed)}"
        return f"{since}, {until}"


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownFault:
    """A fault that was reported or documented."""

    name: str
    effect: str
    """What goes wrong."""
    cure: str
    """What avoids it."""
    report: str
    """Where it is described."""
    versions: tuple[VersionRange, ...] = ()
    """What must be installed for it, all of them; (): which versions have it is not known."""
    capability: tuple[Version, Version] = EVERY_GPU
    """First affected compute capability, and the first one after it that is not."""
    symptom: str = ""
    """Regular expression of the error that it causes; "": it causes none, or one without a text of its own."""

    def among(self, capability: Version | None) -> bool:
        """Whether a GPU of this compute capability has it."""
        oldest, newer = self.capability
        return self.capability == EVERY_GPU or (capability is not None and oldest <= capability < newer)

    def shows(self, text: str) -> bool:
        """Whether the text of an error has its symptom."""
        return bool(self.symptom) and re.search(self.symptom, text, re.IGNORECASE) is not None


def dotted(version: Version) -> str:
    """2.26.2 for (2, 26, 2)."""
    return ".".join(map(str, version))


def version_of(text: str) -> Version:
    """The numbers of a version: (2, 26, 2) for 2.26.2.post1."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
