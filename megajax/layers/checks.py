"""Checks that configs of layers and models share; imports neither jax nor flax."""

from collections.abc import Iterator
from functools import cache
from math import inf

from megajax.config.errors import Problem
from megajax.config.hints import divisors_of
from megajax.layers.facts import Side

LARGEST = 2**31 - 1
"""The largest integer that fits the int32 indices of arrays on a device."""


def above_zero(**settings: float | None) -> list[Problem]:
    """A problem for each setting that is not None and not a finite number above 0, or an integer above LARGEST."""
    problems = []
    for name, value in settings.items():
        if value is not None and not 0 < value < inf:
            problems.append(Problem(name, f"must be a number above 0, got {value}"))
        elif isinstance(value, int) and value > LARGEST:
            problems.append(Problem(name, f"must be at most {LARGEST}, got {value}"))
    return problems


def below_one(**settings: float) -> list[Problem]:
    """A problem for each setting that is not a share: at least 0 and below 1."""
    illegal = {name: value for name, value in settings.items() if not 0 <= value < 1}
    return [Problem(name, f"must be at least 0 and below 1, got {value}") for name, value in illegal.items()]


def head_devices(heads: int, groups: int) -> list[int]:
    """Legal sizes of `tensor` for these heads.

    It divides the groups of heads too, or is a multiple of them and each group is copied.
    """
    heads, groups = max(heads, 1), max(groups, 1)
    return [n for n in divisors_of(heads) if groups % n == 0 or n % groups == 0]


def head_problems(heads: int, groups: int, tensor: int, setting: str) -> Iterator[Problem]:
    """`tensor` must divide heads, and must divide groups or be a multiple of them. setting: name of the groups."""
    if heads % tensor:
        yield Problem("heads", f"heads={heads} is not divisible by parallel.tensor={tensor}")
    elif tensor not in head_devices(heads, groups):
        message = f"{setting}={groups} and parallel.tensor={tensor}: one must be a multiple of the other"
        yield Problem(setting, message)


def head_sides(heads: tuple[int, int], groups: tuple[int, int], tensor: int, setting: str) -> Iterator[Side]:
    """Sides of the heads and groups of a device: (number, size) of both. setting: name of the groups."""
    copied = tensor in head_devices(heads[0], groups[0])
    for name, (count, size) in {"heads": heads, setting: groups}.items():
        on_all = max(count, tensor) if copied else count
        if on_all % tensor == 0:
            yield Side(name, f"{count} of {size} over parallel.tensor={tensor} are", on_all * size // tensor)


def missing_members(config: object, protocol: type) -> list[str]:
    """Members of the protocol that the config lacks."""
    return [name for name in _members(protocol) if not hasattr(config, name)]


@cache
def _members(protocol: type) -> tuple[str, ...]:
    """Names of the public members of a protocol."""
    protocols = [cls for cls in protocol.__mro__ if cls.__module__ not in ("typing", "builtins")]
    names = {name: None for cls in protocols for name in (*vars(cls), *cls.__annotations__) if not name.startswith("_")}
    return tuple(names)
