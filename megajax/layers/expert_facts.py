"""Facts of mixtures of experts that are sharded over devices: rows, buffers, collectives.

T tokens of a microbatch on the devices of `tensor` together, k experts of each token; E experts on n devices, D width.
Importing this imports neither jax nor flax.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megajax.layers.recompute import Part
from megajax.mesh.config import ParallelConfig

type Way = Literal["auto", "gather", "ragged", "capacity"]

EXCHANGES: Mapping[str, str] = {"ragged": "ragged-all-to-all", "capacity": "all-to-all"}
"""Way -> the collective that sends rows."""
RAGGED_FAULT = "gradients of ragged exchanges were wrong by XLA's one-shot kernel"
"""Why `auto` is not ragged, until `benchmarks/gpu_check.sh` has compared the gradients of all ways on GPUs.

Compiler options replace the kernel: see `ragged_one_shot` in megajax/machine/known_faults.py."""


class ExpertSharding(NamedTuple):
    """How a layout shards experts over devices."""

    expert: int = 1
    tensor: int = 1
    whole_experts: bool = False
    """`tensor` shards the list of experts; false: it shards their matrices."""
    sequence: bool = False
    """`tensor` shards the tokens too."""

    @classmethod
    def of(cls, parallel: ParallelConfig) -> "ExpertSharding":
        """The sharding of a layout."""
        return cls(parallel.expert, parallel.tensor, parallel.expert_tensor == "whole", parallel.sequence)

    @property
    def devices(self) -> int:
        """Shards of the list of experts."""
        return self.expert * self.tensor_shards

    @property
    def tensor_shards(self) -> int:
        """Devices of `tensor` with different experts."""
        return self.tensor if self.whole_experts else 1


class ExpertCollective(NamedTuple):
    """Calls of one collective in a layer, on one device and for one microbatch."""

    kind: str
    axes: tuple[str, ...]
    elements: float
    """Elements of the unsharded side."""
    forward: int
    backward: int
    recompute: int = 0
    """Calls in the backward pass that recompute the inputs of experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertFacts:
    """A layer of experts, independent of the layout."""

    experts: int
    top_k: int
    width: int
    """Width of the rows that are sent."""
    tensors: Mapping[Part, int]
    """Elements of the tensors that may be saved, per row."""
    way: Way = "auto"
    room: float | None = None
    """Rows of a buffer over the mean; None: room for the worst case."""
    chunks: int = 1
    """Parts of the tokens that are processed in sequence; nothing of them is saved."""
    shared: int = 0
    """Multiply-adds of a token in the shared expert, for all tokens; 0: there is none."""

    def way_on(self, devices: int) -> str:
        """The way of `dispatch.way`; `auto` is gather, which receives (n - 1) T D elements each way.

        The others receive at most k (n - 1) / n T D, but ragged has RAGGED_FAULT, and capacity drops other tokens.
        """
        return "gather" if devices == 1 or self.way == "auto" else self.way

    def mean_rows(self, tokens: float, sharding: ExpertSharding) -> float:
        """Rows of a device with a balanced router."""
        return tokens * self.top_k / sharding.tensor_shards

    def most_rows(self, tokens: float, sharding: ExpertSharding) -> float:
        """Rows of a device if all tokens choose its experts."""
        return tokens * sharding.expert * min(self.top_k, self.experts / sharding.devices)

    def rows(self, tokens: float, sharding: ExpertSharding) -> float:
        """Rows that a device has room for, in all chunks together."""
        return buffer_rows(self.mean_rows(tokens, sharding), self.most_rows(tokens, sharding), self.room)

    def over_mean(self, sharding: ExpertSharding) -> float:
        """Rows of the buffer over the mean."""
        return self.rows(1, sharding) / self.mean_rows(1, sharding)

    def collectives(self, tokens: float, sharding: ExpertSharding) -> Iterator[ExpertCollective]:
        """The collectives of tokens and outputs, without the small ones of counts and weights."""
        way, size = self.way_on(sharding.devices), tokens * self.width
        ffn_sharded = sharding.tensor > 1 and not sharding.whole_experts
        axes = ("expert",) * (sharding.expert > 1) + ("tensor",) * (sharding.whole_experts and sharding.tensor > 1)
        if ffn_sharded and not sharding.sequence:
            yield ExpertCollective("all-reduce", ("tensor",), size, 1, 1)
        if way == "gather":
            axes += ("tensor",) * (ffn_sharded and sharding.sequence)
            yield from _gathered(axes, size * sharding.expert)
            return
        if ffn_sharded and sharding.sequence:
            yield from _gathered(("tensor",), size)
        rows = self.mean_rows(tokens, sharding) if way == "ragged" else self.rows(tokens, sharding)
        yield ExpertCollective(EXCHANGES[way], axes, rows * self.width, 2, 2, 1)

    def way_note(self, sharding: ExpertSharding, *, on_cpu: bool) -> str:
        """Why dispatch.way does not run as its name says, or is not the one with fewest bytes, or is at risk; or ""."""
        way, devices = self.way_on(sharding.devices), sharding.devices
        if self.way not in ("auto", way):
            return f"all experts are on each device: dispatch.way={self.way} sends nothing"
        if self.way == "auto" and self.top_k < devices:
            return "" if on_cpu else f"dispatch.way=auto is not ragged, which sends fewer bytes: {RAGGED_FAULT}"
        if way != "ragged":
            return ""
        if on_cpu:
            return "ragged sends all tokens everywhere on CPUs, which have no ragged all-to-all"
        compare = "PARTS=layers ONLY=experts benchmarks/gpu_check.sh"
        return f"dispatch.way=ragged: {RAGGED_FAULT}. Its replacement sends more than gather; {compare} compares"

    def summary(self, tokens: float, sharding: ExpertSharding) -> str:
        """Text of the way, the rows of the buffer and the worst case."""
        devices, rows, most = sharding.devices, self.rows(tokens, sharding), self.most_rows(tokens, sharding)
        text = f"{self.experts // devices} of {self.experts} experts on a device, {self.way_on(devices)}"
        if self.chunks > 1:
            text += f" in {self.chunks} chunks"
        worst = "the worst case" if rows == most else f"dropped beyond that, the worst case is {most:,.0f}"
        return f"{text}; room for {rows:,.0f} rows, {self.over_mean(sharding):.3g} x the mean: {worst}"


def buffer_rows(mean: float, most: float, room: float | None) -> float:
    """Rows of a buffer. mean: with a balanced router; most: if all tokens choose the same experts.

    room: rows over the mean; None: room for `most`.
    """
    return most if room is None else min(most, room * mean)


def _gathered(axes: tuple[str, ...], elements: float) -> Iterator[ExpertCollective]:
    """An all-gather and its transpose, a reduce-scatter; the gather is repeated for gradients of weights."""
    if axes:
        yield ExpertCollective("all-gather", axes, elements, 1, 1, 1)
        yield ExpertCollective("reduce-scatter", axes, elements, 1, 1)
