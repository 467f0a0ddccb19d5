"""How many devices each kind of parallelism gets, without importing jax."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from megajax.config.errors import Problem, TooFewDevices

MESH_AXES = ("pipeline", "data", "expert", "context", "tensor")
"""Outermost first: neighbours in `tensor` talk most, so they are the closest devices."""

BATCH_AXES = ("data", "expert")
"""Mesh axes that split the rows of a batch; for dense layers `expert` carries rows just as `data` does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Size of each mesh axis and how weights and optimizer state spread over the data axis."""

    pipeline: int = 1
    """Pipeline stages; each holds virtual_stages chunks of the layers."""
    data: int | None = None
    """Copies of the model that work on different rows; none: all devices the other axes leave over."""
    expert: int = 1
    """Devices the experts of a mixture are spread over; this version runs 1."""
    context: int = 1
    """Devices a sequence is cut over in attention; this version runs 1."""
    tensor: int = 1
    """Devices each matrix is cut over; must divide heads, kv heads, ffn and the padded vocabulary."""
    sequence: bool = False
    """Sequence parallelism: between the matrices, activations are cut over `tensor` along the sequence."""
    data_sharding: Literal["replicate", "zero1", "fsdp"] = "zero1"
    """What the data axis shares out: nothing; master weights and optimizer state; weights during the step as well."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """Order of the pipeline's work: all forwards, then all backwards; backwards as early as they can be; that over
    several virtual stages."""
    virtual_stages: int = 1
    """Chunks of layers of each stage: bubbles of 1/virtual_stages, that many times the traffic."""
    layers: tuple[int, ...] | None = None
    """Layers (repeats of the stack's pattern) of each of the pipeline * virtual_stages chunks, first to last; none: as
    even as can be, the first chunks one more."""
    loss_wait: int = 1
    """1: outputs travel to the loss, and its gradient back, while other microbatches compute, for one more activation
    in memory; 0: all stages wait for both. For 1f1b and interleaved."""

    def problems(self) -> list[Problem]:
        found = []
        for name in MESH_AXES:
            size = getattr(self, name)
            if size is not None and size < 1:
                found.append(Problem(name, f"must be at least 1, got {size}"))
        for name in ("expert", "context"):
            if getattr(self, name) > 1:
                found.append(
                    Problem(
                        name,
                        f"{getattr(self, name)} devices asked for, this version runs 1",
                        "use parallel.data, parallel.tensor or parallel.pipeline",
                    )
                )
        if self.sequence and self.tensor == 1:
            found.append(
                Problem(
                    "sequence",
                    "sequence parallelism needs parallel.tensor > 1, which is 1",
                    "set parallel.tensor=2 or more, or parallel.sequence=false",
                )
            )
        return found + self._pipeline_problems()

    def chunks(self) -> int:
        """Pieces the layers are cut into."""
        return self.pipeline * self.virtual_stages

    def _pipeline_problems(self) -> list[Problem]:
        virtual, found = self.virtual_stages, []
        if virtual < 1:
            return [Problem("virtual_stages", f"must be at least 1, got {virtual}")]
        if self.loss_wait not in (0, 1):
            found.append(Problem("loss_wait", f"must be 0 or 1, got {self.loss_wait}"))
        if virtual > 1 and self.pipeline == 1:
            found.append(
                Problem(
                    "virtual_stages",
                    f"{virtual} virtual stages need a pipeline, parallel.pipeline is 1",
                    "set parallel.pipeline=2 or more, or parallel.virtual_stages=1",
                )
            )
        if self.schedule == "interleaved" and virtual == 1:
            also = "parallel.pipeline=2 or more and " if self.pipeline == 1 else ""
            found.append(
                Problem(
                    "schedule",
                    "interleaved needs parallel.virtual_stages > 1, which is 1"
                    + (", and a pipeline, parallel.pipeline is 1" if also else ""),
                    f"set {also}parallel.virtual_stages=2 or more, or parallel.schedule=1f1b",
                )
            )
        if self.layers is not None and (len(self.layers) != self.chunks() or min(self.layers) < 1):
            found.append(
                Problem(
                    "layers",
                    f"{','.join(map(str, self.layers)) or '()'} must be {self.chunks()} numbers above 0, one for each "
                    f"of parallel.pipeline={self.pipeline} stages x parallel.virtual_stages={virtual}",
                    "none cuts the layers as evenly as can be",
                )
            )
        return found

    def without_data(self) -> int:
        """Devices one copy of the model takes: the product of all axes but `data`."""
        return prod((self.pipeline, self.expert, self.context, self.tensor))

    def data_size(self, devices: int) -> int:
        """Size of the data axis on that many devices."""
        return self.data if self.data is not None else max(1, devices // self.without_data())

    def sizes(self, devices: int) -> dict[str, int]:
        """Mesh axis -> size, all five, outermost first."""
        return {name: self.data_size(devices) if name == "data" else getattr(self, name) for name in MESH_AXES}

    def device_problems(self, devices: int) -> list[Problem]:
        """What is wrong with this layout on `devices` devices."""
        wanted = self.without_data() * (self.data or 1)
        if wanted > devices:
            most = devices // self.without_data()
            axes = [(name, size) for name in MESH_AXES if (size := getattr(self, name) or 1) > 1]
            product = " x ".join(f"{name} {size}" for name, size in axes)
            smaller = " or ".join(f"parallel.{name}" for name, _ in axes)
            hint = f"parallel.data can be at most {most}" if most else f"make {smaller} smaller"
            there = f"there {'is' if devices == 1 else 'are'} {devices}"
            what = f"the axes multiply to {wanted} devices ({product}), {there}"
            return [TooFewDevices("", what, f"{hint}, or give more devices", wanted)]
        if self.data is None and devices % self.without_data():
            copies = devices // self.without_data()
            return [
                Problem(
                    next((name for name in MESH_AXES[::-1] if devices % (getattr(self, name) or 1)), "tensor"),
                    f"{devices} devices are not divisible by {self.without_data()}, "
                    "the devices of one copy of the model",
                    f"parallel.data={copies} uses {copies * self.without_data()} of them",
                )
            ]
        return []
