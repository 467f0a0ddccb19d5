"""Faults of versions of NVIDIA's and jax's packages, one row each, which `megajax.doctor` looks for.

Whether jax can use the GPUs at all (driver, plugin, libraries) is in `megajax.processes.installation`; faults of single
kernels, which are then not chosen, are in `megajax.kernels.attention.capability`.
"""

import re
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from megajax.machine.check import Check, Finding, Machine, ok, warn

type Version = tuple[int, ...]


class KnownFault(NamedTuple):
    """A fault of a package that was reported or documented."""

    packages: tuple[str, ...]
    """Names of the package, one for each version of CUDA."""
    versions: tuple[Version, Version | None]
    """First affected version, and first one with a fix; None: no such version is known."""
    effect: str
    advice: str
    report: str
    """Where it is described."""
    applies: Callable[[Machine], bool] = lambda machine: True
    """Whether runs on the machine meet it."""

    def affected(self, machine: Machine) -> str:
        """The installed package that is affected, with its version; "" if there is none."""
        first, fixed = self.versions
        for name in self.packages:
            installed = installed_version(name)
            numbers = tuple(map(int, re.findall(r"\d+", installed)))
            if installed and first <= numbers and (fixed is None or numbers < fixed) and self.applies(machine):
                return f"{name} {installed}"
        return ""


KNOWN_FAULTS = (
    KnownFault(
        packages=("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
        versions=((), (2, 26)),
        effect="ignores NCCL_LAUNCH_ORDER_IMPLICIT: collectives of processes with one GPU each may wait for each other",
        advice="install NCCL 2.26 or newer",
        report="NCCL's release notes, 2.26",
        applies=lambda machine: len(machine.visible_gpus) > 1,
    ),
)


def installed_version(package: str) -> str:
    """The version of an installed package; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def known_faults(machine: Machine, faults: Iterable[KnownFault] = KNOWN_FAULTS) -> Finding | None:
    """No installed version has a fault that runs on this machine would meet."""
    if not machine.gpu_files:
        return None
    affected = {fault: name for fault in faults if (name := fault.affected(machine))}
    if not affected:
        return ok("none of the installed versions has one")
    text = "; ".join(f"{name} {fault.effect} ({fault.report})" for fault, name in affected.items())
    return warn(text, "; ".join(fault.advice for fault in affected))


CHECKS: tuple[Check, ...] = (("known faults", known_faults),)
