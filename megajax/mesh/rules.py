"""The tables from logical axes to mesh axes, and the plans made of them.

Layers name logical axes only. What data parallelism, ZeRO, FSDP, tensor and sequence parallelism mean is said here and
nowhere else: they are rows of these tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax.sharding import PartitionSpec

from megajax.mesh.config import ParallelConfig

type LogicalAxes = Sequence[str | None]
type MeshAxes = tuple[str, ...]

SHARDS = ("data", "expert", "context")
"""Mesh axes whose devices hold the same dense weights: what ZeRO and FSDP spread them over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Logical axis -> mesh axes it is cut over; () means every device holds all of it. Hashable."""

    batch: MeshAxes = ("data", "expert")
    seq: MeshAxes = ("context",)
    seq_residual: MeshAxes = ("context",)
    """The sequence between the sub-layers of a block; ("context", "tensor") is sequence parallelism."""
    embed: MeshAxes = ()
    mlp: MeshAxes = ("tensor",)
    heads: MeshAxes = ("tensor",)
    kv_heads: MeshAxes = ("tensor",)
    kv_heads_copied: MeshAxes = ()
    """Key-value heads fewer than the devices of `tensor`: whole at rest, a copy on each device that uses one."""
    head_dim: MeshAxes = ()
    vocab: MeshAxes = ("pipeline", "tensor")
    """Every stage does its share of each microbatch's embedding and loss: no stage is special."""
    expert: MeshAxes = ("expert",)
    state: MeshAxes = ()
    layer: MeshAxes = ("pipeline",)
    """Rows of stacked weights; `pipeline.partition` puts the layers of a stage next to each other."""
    copies: MeshAxes = ("tensor",)
    """Of a small weight, one for each device that uses it on its own positions: see Plan.replicated_per_tensor_rank."""

    def mesh_axes(self, name: str | None) -> MeshAxes:
        """Mesh axes of one logical axis; None is never sharded."""
        return () if name is None else getattr(self, name)

    def dimensions(self, axes: LogicalAxes) -> tuple[MeshAxes, ...]:
        """Mesh axes of each dimension of an array with these logical axes.

        `embed`, along which weights are spread at rest, takes only the mesh axes that no other dimension uses: the
        weights of experts, which are sharded over `expert` already, are spread over `data` and `context`.
        """
        used = {axis for name in axes if name != "embed" for axis in self.mesh_axes(name)}
        return tuple(
            tuple(axis for axis in self.mesh_axes(name) if name != "embed" or axis not in used) for name in axes
        )

    def spec(self, axes: LogicalAxes, keep: Sequence[str] | None = None) -> PartitionSpec:
        """("vocab", "embed") -> P("tensor", None); with `keep`, only those mesh axes appear.

        Raises ValueError when two dimensions of one array would be sharded over the same mesh axis.
        """
        mapped = self.dimensions(axes)
        used = [axis for entry in mapped for axis in entry]
        if len(used) != len(set(used)):
            raise ValueError(f"logical axes {tuple(axes)} put a mesh axis on two dimensions: {mapped}")
        kept = [tuple(axis for axis in entry if keep is None or axis in keep) for entry in mapped]
        return PartitionSpec(*[(entry if len(entry) > 1 else entry[0]) if entry else None for entry in kept])


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Where arrays are: in use, during a step before they are used, at rest, and in the optimizer.

    compute: activations, and weights while a layer uses them.
    step_layout: weights in compute dtype during the step, before a layer gathers them.
    params: float32 master weights between steps.
    optimizer: gradients and optimizer state when the update is made.
    tensor: devices of `tensor`; fewer key-value heads are replicated over them.
    """

    compute: Rules
    step_layout: Rules
    params: Rules
    optimizer: Rules
    tensor: int = 1

    @classmethod
    def of(cls, cfg: ParallelConfig) -> "Plan":
        """The plan a ParallelConfig asks for: replicate, zero1 and fsdp differ in three tables and in no code."""
        compute = Rules(seq_residual=("context", "tensor")) if cfg.sequence else Rules()
        spread = replace(compute, embed=SHARDS)
        match cfg.data_sharding:
            case "replicate":
                in_step, at_rest = compute, compute
            case "zero1":
                in_step, at_rest = compute, spread
            case "fsdp":
                in_step, at_rest = spread, spread
        return cls(compute=compute, step_layout=in_step, params=at_rest, optimizer=at_rest, tensor=cfg.tensor)

    def kv_heads(self, heads: int) -> str:
        """Logical axis of a weight's dimension of that many key-value heads."""
        return "kv_heads_copied" if heads < self.tensor else "kv_heads"

    def axes_in_step(self, axes: LogicalAxes) -> LogicalAxes:
        """Logical axes of a weight during the step: replicated key-value heads are sharded like others."""
        return tuple("kv_heads" if name == "kv_heads_copied" else name for name in axes)

    def rules_in_step(self, axes: LogicalAxes) -> Rules:
        """Table of a weight during the step: only stacked matrices are worth gathering layer by layer."""
        return self.step_layout if "layer" in axes and len(axes) > 2 else self.compute

    def replicated_per_tensor_rank(self, axes: LogicalAxes) -> bool:
        """Whether a weight has one copy per device of `tensor` during the step, along an axis `copies`.

        So it is with gains and biases of the residual stream under sequence parallelism, where each device uses them
        on its own positions. With a copy each, their gradients are summed over `tensor` once a step; with a single one
        the compiler would sum them in every layer of every microbatch.
        """
        apart = set(self.compute.mesh_axes("seq_residual")) >= set(self.compute.mesh_axes("copies"))
        return apart and tuple(axes) in (("embed",), ("layer", "embed"))
