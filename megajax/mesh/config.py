"""Settings of the mesh: the size of each axis and the kind of data parallelism. Does not import jax."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, Self

from megajax.config.bounds import Count
from megajax.config.errors import Problem, TooFewDevices
from megajax.config.hints import divisors_of, either

MESH_AXES = ("pipeline", "replica", "data", "expert", "context", "tensor")
"""Outermost first: devices along `tensor` communicate most, so they are the closest ones.

`replica` x `data` have parallel.data devices: parallel.shards of them are along `data`, by default all."""
SIZED_AXES = tuple(axis for axis in MESH_AXES if axis != "replica")
"""Settings of ParallelConfig that are numbers of devices."""
DATA_AXES = ("replica", "data")
"""Mesh axes of data parallelism; each index has rows of its own, on the devices of `expert`, `context` and `tensor`."""
BATCH_AXES = (*DATA_AXES, "expert")
"""Mesh axes that the rows of a batch are sharded over; for dense layers `expert` is like `data`."""
TOKEN_AXES = (*BATCH_AXES, "context")
"""Mesh axes that the positions of all rows are sharded over."""
SHARDS = ("data", "expert", "context")
"""Mesh axes that ZeRO and FSDP shard dense weights over. Over `replica` weights are always replicated."""

type ContextStrategy = Literal["all_gather", "ring", "all_to_all", "ring+all_to_all"]


def devices_over(sizes: Mapping[str, int], axes: Iterable[str]) -> int:
    """Number of devices along these mesh axes together. sizes: mesh axis -> size."""
    return prod(sizes[axis] for axis in axes)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Size of each mesh axis, the sharding of weights and optimizer state over the data axis, and the pipeline.

    Example: `mj.ParallelConfig(pipeline=4, tensor=8, sequence=True, data_sharding="zero1")`
    """

    pipeline: Count = 1
    """Pipeline stages; each has virtual_stages chunks of the layers."""
    data: Count | None = None
    """Data-parallel replicas of the model; none: all devices that the other axes leave."""
    expert: Count = 1
    """Devices that the experts of a mixture are sharded over; for all other layers they are like those of `data`."""
    expert_tensor: Literal["cut", "whole"] = "cut"
    """What `tensor` does with experts. cut: shards the matrices of each along its ffn; whole: shards the list of
    experts further, over expert x tensor devices, which needs sequence parallelism."""
    context: Count = 1
    """Devices that each row is cut over along the sequence, for long rows: see docs/attention.md."""
    context_strategy: ContextStrategy = "all_gather"
    """How attention reaches the keys and values of the other devices of `context`. all_gather: gathers them; ring:
    passes them on from device to device while it computes; all_to_all: exchanges heads for positions, so that each
    device has whole rows of some heads; ring+all_to_all: neighbours exchange heads, and their groups form a ring."""
    context_heads: Count = 2
    """With ring+all_to_all, the neighbouring devices that exchange heads, such as those of a node."""
    context_rounds: Count = 1
    """Rounds in which causal rows are dealt out over `context`, two chunks a device and round. More rounds balance rows
    of packed documents better, with smaller chunks."""
    tensor: Count = 1
    """Devices that each matrix is sharded over; must divide heads, kv heads, ffn and the padded vocabulary."""
    sequence: bool = False
    """Sequence parallelism: between matmuls, activations are sharded over `tensor` along the sequence."""
    data_sharding: Literal["replicate", "zero1", "fsdp"] = "zero1"
    """Sharding over the data axis. replicate: none; zero1: master weights and optimizer state; fsdp: weights during the
    step as well."""
    shards: Count | None = None
    """Devices of `data` in a group, for hybrid sharding (HSDP): each group has a copy of what data_sharding shards, and
    a step sums gradients over the groups once. none: one group of all."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """Pipeline schedule. gpipe: all forwards, then all backwards; 1f1b: each backward as early as possible;
    interleaved: 1f1b over several virtual stages."""
    virtual_stages: Count = 1
    """Chunks of layers per stage: divides the pipeline bubble and multiplies the communication by this number."""
    layers: tuple[Count, ...] | None = None
    """Repeats of the stack's pattern, or layers of a segmented stack, of each of the pipeline * virtual_stages chunks,
    first to last; none: as even as possible, with one more in the first chunks."""
    elastic: bool = False
    """Fit the layout to the devices that are present, with the same rows per step: see docs/launch.md. Then `data` may
    be any size, and other axes change where they have to."""
    loss_wait: Literal[0, 1] = 1
    """1: the output is sent to the loss, and its gradient back, while other microbatches compute, which takes memory
    for one more activation; 0: all stages wait for both. For 1f1b and interleaved."""

    def problems(self) -> list[Problem]:
        problems = []
        if self.shards is not None and self.data_sharding == "replicate":
            message = f"groups of {self.shards} devices shard nothing with parallel.data_sharding=replicate"
            problems.append(Problem("shards", message, "set data_sharding=zero1 or fsdp, or shards=none"))
        if self.data is not None:
            problems += self._group_problems(self.data)
        if self.expert_tensor == "whole" and self.tensor > 1 and not self.sequence:
            message = "whole experts over `tensor` take each device's own positions, and parallel.sequence is false"
            problems.append(Problem("expert_tensor", message, "set parallel.sequence=true, or expert_tensor=cut"))
        if self.sequence and self.tensor == 1:
            message = "sequence parallelism needs parallel.tensor > 1, which is 1"
            hint = "set parallel.tensor=2 or more, or parallel.sequence=false"
            problems.append(Problem("sequence", message, hint))
        return problems + self._context_problems() + self._pipeline_problems()

    def chunks(self) -> int:
        """Number of chunks that the layers are divided into."""
        return self.pipeline * self.virtual_stages

    def exchanging(self) -> int:
        """Neighbouring devices of `context` that exchange heads for positions."""
        if self.context == 1:
            return 1
        return {"all_to_all": self.context, "ring+all_to_all": self.context_heads}.get(self.context_strategy, 1)

    def _group_problems(self, data: int) -> list[Problem]:
        """Problems of groups of `shards` among this many devices of `data`."""
        if self.shards is None or data % self.shards == 0:
            return []
        sizes = either([str(size) for size in divisors_of(data)[:-1]])
        message = f"groups of {self.shards} devices do not divide parallel.data={data}"
        return [Problem("shards", message, f"use {sizes}, or none for one group" if data > 1 else "use none")]

    def _context_problems(self) -> list[Problem]:
        if self.context % self.exchanging() == 0:
            return []
        message = f"groups of {self.context_heads} devices that exchange heads do not divide parallel.context="
        sizes = [str(size) for size in divisors_of(self.context)[1:-1]]
        hint = f"use {either(sizes)}" if sizes else "use context_strategy=ring or all_to_all"
        return [Problem("context_heads", f"{message}{self.context}", hint)]

    def _pipeline_problems(self) -> list[Problem]:
        virtual, problems = self.virtual_stages, []
        if virtual > 1 and self.pipeline == 1:
            message = f"{virtual} virtual stages need a pipeline, parallel.pipeline is 1"
            hint = "set parallel.pipeline=2 or more, or parallel.virtual_stages=1"
            problems.append(Problem("virtual_stages", message, hint))
        if self.schedule == "interleaved" and virtual == 1:
            message = "interleaved needs parallel.virtual_stages > 1, which is 1"
            hint = "parallel.virtual_stages=2 or more, or parallel.schedule=1f1b"
            if self.pipeline == 1:
                message += ", and a pipeline, parallel.pipeline is 1"
                hint = f"parallel.pipeline=2 or more and {hint}"
            problems.append(Problem("schedule", message, f"set {hint}"))
        if self.layers is not None and len(self.layers) != self.chunks():
            message = (
                f"{','.join(map(str, self.layers)) or '()'} must be {self.chunks()} numbers above 0, one for each "
                f"of parallel.pipeline={self.pipeline} stages x parallel.virtual_stages={virtual}"
            )
            problems.append(Problem("layers", message, "none divides the layers as evenly as possible"))
        return problems

    def without_data(self) -> int:
        """Devices per replica of the model: the product of all axes but `data`."""
        return prod((self.pipeline, self.expert, self.context, self.tensor))

    def data_size(self, devices: int) -> int:
        """Size of the data axis on this number of devices."""
        return self.data if self.data is not None else max(1, devices // self.without_data())

    def replicas(self, devices: int) -> int:
        """Data-parallel devices, which have different rows."""
        return self.data_size(devices) * self.expert

    def sharding_devices(self, devices: int) -> int:
        """Devices that ZeRO and FSDP shard a dense weight over: a group's, those of `expert` and `context` included."""
        return (self.shards or self.data_size(devices)) * self.expert * self.context

    def sizes(self, devices: int) -> dict[str, int]:
        """Mesh axis -> size, of all axes, outermost first."""
        data = self.data_size(devices)
        shards = self.shards or data
        split = {"replica": data // shards, "data": shards}
        return {name: split[name] if name in split else getattr(self, name) for name in MESH_AXES}

    def device_problems(self, devices: int) -> list[Problem]:
        """Problems of this layout on `devices` devices."""
        needed = self.without_data() * (self.data or 1)
        if needed > devices:
            replicas = devices // self.without_data()
            axes = [(name, size) for name in SIZED_AXES if (size := getattr(self, name) or 1) > 1]
            product = " x ".join(f"{name} {size}" for name, size in axes)
            smaller = " or ".join(f"parallel.{name}" for name, _ in axes)
            hint = f"parallel.data can be at most {replicas}" if replicas else f"make {smaller} smaller"
            available = f"there {'is' if devices == 1 else 'are'} {devices}"
            message = f"the axes multiply to {needed} devices ({product}), {available}"
            return [TooFewDevices("", message, f"{hint}, or give more devices", needed)]
        if self.data is None and devices % self.without_data():
            replicas = devices // self.without_data()
            setting = next((name for name in SIZED_AXES[::-1] if devices % (getattr(self, name) or 1)), "tensor")
            message = (
                f"{devices} devices are not divisible by {self.without_data()}, the devices of one copy of the model"
            )
            return [
                Problem(setting, message, f"parallel.data={replicas} uses {replicas * self.without_data()} of them")
            ]
        return self._group_problems(self.data_size(devices))


@dataclass(frozen=True, slots=True)
class ContextSharding:
    """The part of each row on a device, and how attention reaches the other parts. Hashable.

    `megajax.mesh.zigzag_order.SequenceSharding` arranges arrays accordingly.
    """

    devices: int = 1
    """Devices that hold different positions of a row, C."""
    rounds: int = 0
    """Zigzag rounds: a device holds two chunks per round. 0: one chunk per device, in order."""
    strategy: ContextStrategy = "all_gather"
    """How attention reaches the keys of other devices."""
    exchanging: int = 1
    """Neighbouring devices that first exchange heads for positions."""

    @classmethod
    def of(cls, cfg: ParallelConfig, *, causal: bool) -> Self:
        """The sharding of a layout. causal: whether no position of the model sees a later one."""
        rounds = cfg.context_rounds if causal and cfg.context > 1 else 0
        return cls(cfg.context, rounds, cfg.context_strategy, cfg.exchanging())

    @property
    def chunks(self) -> int:
        """Number of chunks of each row on a device."""
        return max(1, 2 * self.rounds)

    @property
    def unit(self) -> int:
        """The length of a row must be a multiple of this."""
        return self.devices * self.chunks

    def between(self) -> Literal["all_gather", "ring"] | None:
        """How queries reach keys of devices with the same heads; None if a device has all positions of its heads."""
        if self.exchanging == self.devices:
            return None
        return "ring" if "ring" in self.strategy else "all_gather"

    def label(self) -> str:
        """Description for the banner; "" for unsharded rows."""
        if self.devices == 1:
            return ""
        groups = f" in groups of {self.exchanging}" if 1 < self.exchanging < self.devices else ""
        return f"over context {self.devices} by {self.strategy}{groups}"


UNSHARDED = ContextSharding()
"""Each device has whole rows."""
