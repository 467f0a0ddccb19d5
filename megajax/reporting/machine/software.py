"""Checks of what is installed."""

import platform
import re

from packaging.requirements import Requirement

from megajax.reporting.machine.check import Check, Finding, fail, ok, warn
from megajax.reporting.machine.machine import Machine

SHOWN = ("jax", "jaxlib", "flax", "orbax-checkpoint", "grain", "numpy")


def packages(machine: Machine) -> Finding:
    """The requirements of the library and of jax are met."""
    installed, problems = machine.packages, []
    for package in ("megajax", *(name for name in installed if re.match(r"jax(lib)?$|jax-cuda", name))):
        for requirement in map(Requirement, machine.requires(package)):
            version = installed.get(requirement.name.lower().replace("_", "-"))
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                bounds = f"{requirement.name}{requirement.specifier}"
                problems.append(f"{package} requires {bounds}, installed is {version or 'none'}")
    if problems:
        return fail("; ".join(dict.fromkeys(problems)), "uv sync, or pip install --upgrade megajax")
    if not machine.requires("megajax"):
        return warn("megajax is not installed, so its requirements are unknown", "uv sync, or pip install -e .")
    shown = [f"{name} {installed[name]}" for name in SHOWN if name in installed]
    return ok(f"Python {platform.python_version()}, {', '.join(shown)}")


def cuda_plugin(machine: Machine) -> Finding:
    """One whole CUDA plugin, of jaxlib's version."""
    parts = {name: v for name, v in machine.packages.items() if re.fullmatch(r"jax-cuda\d+-(plugin|pjrt)", name)}
    cudas = sorted({name.split("-")[1] for name in parts})
    if not parts:
        return ok("none: jax uses the CPU")
    if len(cudas) > 1:
        return fail(f"plugins for {' and '.join(cudas)} are both installed", "pip uninstall those of one of them")
    listed = ", ".join(f"{name} {version}" for name, version in sorted(parts.items()))
    jaxlib = machine.packages.get("jaxlib")
    if len(parts) < 2 or set(parts.values()) != {jaxlib}:
        return fail(f"jaxlib {jaxlib} with {listed}", f"pip install 'jax[{cudas[0]}]=={machine.packages.get('jax')}'")
    return ok(f"jaxlib and the {cudas[0]} plugin are both {jaxlib}")


CHECKS: tuple[Check, ...] = (
    ("packages", packages),
    ("CUDA plugin", cuda_plugin),
)
