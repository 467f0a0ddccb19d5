"""Checks that configs of layers and models share; imports neither jax nor flax."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from megajax.config.errors import Problem
from megajax.config.hints import divisors_of
from megajax.layers.facts import LayerFacts, Side


class HeadGroups(NamedTuple):
    """Heads that `tensor` shards, and groups of them that share a tensor, such as query heads and key-value heads."""

    heads: int
    size: int
    """Size of a head; 0 if unknown."""
    groups: int
    group_size: int
    setting: str = "heads"
    """Name of the number of groups."""

    def devices(self) -> list[int]:
        """Legal sizes of `tensor`: it divides the groups of heads too, or is a multiple of them and copies each."""
        heads, groups = max(self.heads, 1), max(self.groups, 1)
        return [n for n in divisors_of(heads) if groups % n == 0 or n % groups == 0]

    def problems(self, tensor: int) -> Iterator[Problem]:
        """`tensor` must divide heads, and must divide groups or be a multiple of them."""
        if self.heads % tensor:
            yield Problem("heads", f"heads={self.heads} is not divisible by parallel.tensor={tensor}")
        elif tensor not in self.devices():
            message = f"{self.setting}={self.groups} and parallel.tensor={tensor}: one must be a multiple of the other"
            yield Problem(self.setting, message)

    def sides(self, tensor: int) -> Iterator[Side]:
        """Sides of the heads and groups of a device."""
        copied = tensor in self.devices()
        sides = {"heads": (self.heads, self.size), self.setting: (self.groups, self.group_size)}
        for name, (count, size) in sides.items():
            on_all = max(count, tensor) if copied else count
            if on_all % tensor == 0:
                yield Side(name, f"{count} of {size} over parallel.tensor={tensor} are", on_all * size // tensor)


class HeadSharded(LayerFacts):
    """Base of the configs of layers whose heads `tensor` shards."""

    def head_groups(self, hidden: int = 0) -> HeadGroups:
        """The heads; sizes are needed for `HeadGroups.sides` only. hidden: width of the residual stream."""
        raise NotImplementedError

    def tensor_sizes(self) -> list[int]:
        """Legal sizes of `tensor`."""
        return self.head_groups().devices()

    def problems(self) -> list[Problem]:
        """The groups must divide the heads."""
        problems, heads = super().problems(), self.head_groups()
        if heads.heads % heads.groups:
            message = f"heads={heads.heads} is not a multiple of {heads.setting}={heads.groups}"
            legal = ", ".join(map(str, divisors_of(heads.heads)))
            problems.append(Problem(heads.setting, message, f"{heads.setting} can be {legal}"))
        return problems

    def mesh_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """`tensor` must divide heads, and must divide groups or be a multiple of them."""
        return self.head_groups().problems(sizes["tensor"])

    def matmul_sides(self, hidden: int, tensor: int) -> Iterator[Side]:
        """The heads and groups of a device. Inputs of one number per head are never in 8 bits."""
        return self.head_groups(hidden).sides(tensor)


class ChannelSharded(LayerFacts):
    """Base of the configs of layers whose channels `tensor` shards."""

    def sharded_channels(self) -> tuple[str, int]:
        """Setting and number of the channels."""
        raise NotImplementedError

    def tensor_sizes(self) -> list[int]:
        """Legal sizes of `tensor`."""
        return divisors_of(max(self.sharded_channels()[1], 1))

    def mesh_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """`tensor` must divide the channels."""
        (setting, count), tensor = self.sharded_channels(), sizes["tensor"]
        if count % tensor:
            below = count // tensor * tensor
            widths = " or ".join(str(width) for width in (below, below + tensor) if width)
            message = f"{setting}={count} is not divisible by parallel.tensor={tensor}"
            yield Problem(setting, message, f"use {setting}={widths}")

    def matmul_sides(self, hidden: int, tensor: int) -> Iterator[Side]:
        """The channels of a device."""
        del hidden
        setting, count = self.sharded_channels()
        if count % tensor == 0:
            yield Side(setting, f"{count} over parallel.tensor={tensor} is", count // tensor)


def missing_members(config: object, protocol: type) -> list[str]:
    """Members of the protocol that the config lacks."""
    return [name for name in _members(protocol) if not hasattr(config, name)]


@cache
def _members(protocol: type) -> tuple[str, ...]:
    """Names of the public members of a protocol."""
    protocols = [cls for cls in protocol.__mro__ if cls.__module__ not in ("typing", "builtins")]
    names = {name: None for cls in protocols for name in (*vars(cls), *cls.__annotations__) if not name.startswith("_")}
    return tuple(names)
