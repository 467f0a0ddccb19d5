"""The time of one collective on the links of its devices.

Times are ring (bandwidth) and tree (latency) costs as in NCCL's own model: of n devices, a ring all-gather or
reduce-scatter sends (n-1)/n of the whole from each, an all-reduce twice that. A ring that crosses nodes leaves and
enters each node once, and all devices of the group in that node carry parts of it in parallel over their own network
links.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2, prod

from megajax.planning.compiled.devices import Device


@dataclass(frozen=True, slots=True)
class AxisSpan:
    """The devices of one group along a mesh axis."""

    size: int
    inside: int
    """Devices of the group in one node."""

    @classmethod
    def of(cls, size: int, stride: int, per_node: int) -> "AxisSpan":
        """size: devices of the group; stride: places in the mesh from one to the next."""
        return cls(size, min(size, max(1, per_node // stride)))

    @classmethod
    def along(cls, axes: Sequence[str], mesh: Mapping[str, int], per_node: int) -> "AxisSpan":
        """The span of groups along mesh axes; mesh: axis -> size, outermost first."""
        names = list(mesh)
        strides = (prod(mesh[name] for name in names[names.index(axis) + 1 :]) for axis in axes)
        spans = [cls.of(mesh[axis], stride, per_node) for axis, stride in zip(axes, strides, strict=True)]
        return cls(prod(span.size for span in spans), prod(span.inside for span in spans))

    @property
    def nodes(self) -> int:
        return ceil(self.size / self.inside)


def ring_rate(device: Device, span: AxisSpan) -> float:
    """Bytes per second that each device of a group sends in a ring."""
    nvlink = device.nvlink * device.nvlink_share
    if span.nodes == 1:
        return nvlink
    return min(nvlink, span.inside * device.network * device.network_share)


def seconds(kind: str, size: float, span: AxisSpan, device: Device) -> float:
    """Seconds of one collective. size: bytes of the full side (gathered, unreduced; of a permute, per device)."""
    if span.size < 2:
        return 0.0
    if kind == "collective-permute":
        # The slowest pair is that between nodes, if there is one; each device has a network link of its own.
        between = span.nodes > 1
        speed = device.network * device.network_share if between else device.nvlink * device.nvlink_share
        return device.launch + size / speed + (device.network_latency if between else device.nvlink_latency)
    if kind.endswith("all-to-all"):
        # Each pair of devices has a part of its own; between nodes each device has its own network link.
        within, far = ((span.inside - 1) / span.size, 1 - span.inside / span.size)
        inside = size * within / (device.nvlink * device.nvlink_share) + device.nvlink_latency
        outside = size * far / (device.network * device.network_share) + device.network_latency
        return device.launch + max(inside, outside * (far > 0))
    twice = 2 if kind == "all-reduce" else 1
    moved = twice * size * (span.size - 1) / span.size
    hops = (span.inside - 1) * device.nvlink_latency + (span.nodes - 1) * device.network_latency
    ring = moved / ring_rate(device, span) + twice * hops
    # A tree moves as much at the links' rate and has as many hops as the group can be halved.
    steps = ceil(log2(span.inside or 1)) * device.nvlink_latency + ceil(log2(span.nodes)) * device.network_latency
    tree = (twice * size / ring_rate(device, span)) + 2 * steps
    return device.launch + (min(ring, tree) if kind == "all-reduce" else ring)
