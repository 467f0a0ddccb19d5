"""Checks of what is installed."""

import platform
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import NamedTuple

from megajax.reporting.machine.check import Check, Finding, fail, ok, warn
from megajax.reporting.machine.machine import Machine, Stages

PYTHON = (3, 12)
CORE = ("jax", "jaxlib", "flax", "orbax-checkpoint", "grain", "numpy")
"""Packages whose versions are told."""

DRIVERS = {"12": (525, 60, 13), "13": (580,)}
"""CUDA of a jax plugin -> the oldest driver it runs on, as jax's installation guide says."""

PLUGIN = re.compile(r"jax-cuda(\d+)-(plugin|pjrt)")


class Needs(NamedTuple):
    """What the library asks for, and what is installed."""

    core: tuple[str, ...]
    """Requirements such as "orbax-checkpoint>=0.12.4,<0.13"."""
    extras: Mapping[str, tuple[str, ...]]
    """Extra -> its packages."""
    packages: Mapping[str, str]


def needs(machine: Machine) -> Needs:
    """Of the source tree this runs from, or as it was installed."""
    source = Path(__file__).resolve().parents[3] / "pyproject.toml"
    if source.is_file():
        project = tomllib.loads(source.read_text(encoding="utf-8"))["project"]
        core, optional = tuple(project["dependencies"]), project["optional-dependencies"]
        extras = {name: tuple(_name(text) for text in listed) for name, listed in optional.items()}
        return Needs(core, extras, machine.packages)
    try:
        listed = requires("megajax") or []
    except PackageNotFoundError:
        listed = []
    extras: dict[str, tuple[str, ...]] = {}
    for text in listed:
        if found := re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", text):
            extras[found[1]] = (*extras.get(found[1], ()), _name(text))
    return Needs(tuple(text for text in listed if "extra" not in text), extras, machine.packages)


def _name(requirement: str) -> str:
    """tokamax ; sys_platform == 'linux' -> tokamax; jax[cuda12] -> jax-cuda12-plugin, the package it stands for."""
    text = requirement.partition(";")[0].strip()
    if found := re.fullmatch(r"jax\[(cuda\d+)(-local)?\]", text):
        return f"jax-{found[1]}-plugin"
    return re.split(r"[\s<>=!~\[]", text)[0].lower().replace("_", "-")


def numbers(version: str) -> tuple[int, ...]:
    """0.12.0.1 -> (0, 12, 0, 1); letters end it."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def satisfies(version: str, requirement: str) -> bool:
    """Whether a version is within the bounds of `name>=A,<B`; other bounds than >=, <=, <, > and == are not held."""
    mine = numbers(version)
    for operator, bound in re.findall(r"(>=|<=|==|<|>)\s*([\d.]+)", requirement.partition(";")[0]):
        theirs = numbers(bound)
        size = max(len(mine), len(theirs))
        a, b = (each + (0,) * (size - len(each)) for each in (mine, theirs))
        if not {">=": a >= b, "<=": a <= b, "==": a == b, "<": a < b, ">": a > b}[operator]:
            return False
    return True


def judge_python(version: tuple[int, ...]) -> Finding:
    """The interpreter."""
    text = ".".join(map(str, version))
    if version[:2] < PYTHON:
        return fail(text, f"install Python {'.'.join(map(str, PYTHON))} or newer")
    return ok(f"{text}, {platform.system()} {platform.machine()}")


def judge_packages(found: Needs) -> Finding:
    """Packages no run goes without."""
    missing = [text for text in found.core if _name(text) not in found.packages]
    if missing:
        return fail(f"not installed: {', '.join(missing)}", "uv sync, or pip install megajax")
    wrong = [
        f"{_name(text)} {found.packages[_name(text)]} is not {text.removeprefix(_name(text))}"
        for text in found.core
        if not satisfies(found.packages[_name(text)], text)
    ]
    if wrong:
        return fail("; ".join(wrong), "uv sync, or pip install --upgrade megajax")
    return ok(", ".join(f"{name} {found.packages[name]}" for name in CORE if name in found.packages))


def judge_plugin(packages: Mapping[str, str]) -> Finding | None:
    """jax, jaxlib and the parts of the CUDA plugin are of one version."""
    jax, jaxlib = packages.get("jax"), packages.get("jaxlib")
    if jax is None or jaxlib is None:
        return fail("jax or jaxlib is missing", "uv sync, or pip install jax")
    if numbers(jax)[:3] != numbers(jaxlib)[:3]:
        return fail(f"jax {jax} with jaxlib {jaxlib}", f"pip install jaxlib=={jax}")
    parts = {name: version for name, version in packages.items() if PLUGIN.fullmatch(name)}
    cuda = sorted({match[1] for name in parts if (match := PLUGIN.fullmatch(name))})
    if len(cuda) > 1:
        listed = " and ".join(f"CUDA {number}" for number in cuda)
        return fail(f"plugins for {listed} side by side", "uninstall those of one of them: pip uninstall jax-cuda…")
    if not parts:
        return ok("jax and jaxlib match; no CUDA plugin")
    listed = ", ".join(f"{name} {version}" for name, version in sorted(parts.items()))
    if any(version != jaxlib for version in parts.values()):
        return fail(f"jaxlib {jaxlib} with {listed}", f"pip install 'jax[cuda{cuda[0]}]=={jax}'")
    lone = f"jax-cuda{cuda[0]}-plugin" not in parts or f"jax-cuda{cuda[0]}-pjrt" not in parts
    if lone:
        return fail(f"only half of the CUDA plugin: {listed}", f"pip install 'jax[cuda{cuda[0]}]=={jax}'")
    return ok(f"jax, jaxlib and the plugin for CUDA {cuda[0]} are all {jaxlib}")


def judge_imported(found: tuple[Stages, Mapping[str, str]]) -> Finding | None:
    """What Python imports is what is installed, not a copy before it on the path."""
    stages, packages = found
    imported = stages.done.get("versions")
    if not isinstance(imported, dict) or "error" in imported:
        return None
    odd = [
        f"{name} {version} where {packages.get(name)} is installed"
        for name, version in imported.items()
        if version != packages.get(name)
    ]
    if odd:
        return fail(f"imported is {', '.join(odd)}", "look at PYTHONPATH and the folder this was started in")
    return ok("the installed ones")


def judge_extras(found: Needs) -> Finding:
    """Which extras are there, whole."""
    whole = [name for name, listed in found.extras.items() if all(part in found.packages for part in listed)]
    partly = {
        name: [part for part in listed if part not in found.packages]
        for name, listed in found.extras.items()
        if name not in whole and any(part in found.packages for part in listed)
    }
    text = ", ".join(whole) or "none"
    absent = [name for name in found.extras if name not in whole]
    return ok(f"{text}; not there: {', '.join(absent) or 'none'}" + _in_part(partly))


def _in_part(partly: Mapping[str, Iterable[str]]) -> str:
    listed = "; ".join(f"{name} lacks {', '.join(parts)}" for name, parts in partly.items())
    return f" ({listed})" if listed else ""


def judge_driver(found: tuple[str | None, Mapping[str, str]]) -> Finding | None:
    """The NVIDIA driver is new enough for the plugin. (driver version or None, packages)."""
    driver, packages = found
    cuda = next((match[1] for name in packages if (match := PLUGIN.fullmatch(name))), None)
    if driver is None:
        return None
    if cuda is None:
        return warn(f"driver {driver}, but no CUDA plugin for jax", "uv sync --extra cuda12 (or cuda13)")
    least = DRIVERS.get(cuda)
    if least is not None and numbers(driver) < least:
        text = ".".join(map(str, least))
        return fail(
            f"driver {driver} is too old for CUDA {cuda}", f"update it to {text} or newer, or use an older CUDA"
        )
    return ok(f"{driver}, new enough for CUDA {cuda}")


CHECKS = (
    Check("python", lambda machine: sys.version_info[:3], judge_python),
    Check("packages", needs, judge_packages),
    Check("jax versions", lambda machine: machine.packages, judge_plugin),
    Check("extras", needs, judge_extras),
)
CHECKS_OF_IMPORTS = (Check("jax imported", lambda machine: (machine.stages, machine.packages), judge_imported),)
