"""Rules from logical axes to mesh axes, and plans, which consist of several rules.

Layers name logical axes only. Data parallelism, ZeRO, FSDP, tensor and sequence parallelism are defined here and
nowhere else: each is an entry of these rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from jax.sharding import PartitionSpec

from megajax.config.errors import UserError
from megajax.config.hints import did_you_mean
from megajax.mesh.config import BATCH_AXES, SHARDS, ParallelConfig

type LogicalAxes = Sequence[str | None]
type MeshAxes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Logical axis -> mesh axes that it is sharded over; (): not sharded. Hashable."""

    batch: MeshAxes = BATCH_AXES
    seq: MeshAxes = ("context",)
    seq_residual: MeshAxes = ("context",)
    """The sequence between the sub-layers of a block; ("context", "tensor") is sequence parallelism."""
    embed: MeshAxes = ()
    mlp: MeshAxes = ("tensor",)
    heads: MeshAxes = ("tensor",)
    kv_heads: MeshAxes = ("tensor",)
    kv_heads_copied: MeshAxes = ()
    """For fewer key-value heads than devices of `tensor`: unsharded at rest, copied to the devices during the step."""
    head_dim: MeshAxes = ()
    vocab: MeshAxes = ("pipeline", "tensor")
    """Every pipeline stage computes a part of each microbatch's embedding and loss."""
    expert: MeshAxes = ("expert",)
    """The experts of a mixture; ("expert", "tensor") with expert_tensor=whole."""
    expert_mlp: MeshAxes = ("tensor",)
    """The ffn of an expert; () with expert_tensor=whole."""
    state: MeshAxes = ()
    rank: MeshAxes = ()
    """The inner dimension of a low-rank adapter."""
    layer: MeshAxes = ("pipeline",)
    """Rows of stacked weights; `pipeline.partition` makes the layers of a stage adjacent."""
    copies: MeshAxes = ("tensor",)
    """Copies of a small weight, one per device: see Plan.replicated_per_tensor_rank."""

    def mesh_axes(self, name: str | None) -> MeshAxes:
        """Mesh axes of a logical axis; None is never sharded. Raises UserError for an unknown one."""
        demand_known((name,), "")
        return () if name is None else getattr(self, name)

    def dimensions(self, axes: LogicalAxes) -> tuple[MeshAxes, ...]:
        """Mesh axes of each dimension of an array with these logical axes.

        `embed`, along which weights are sharded at rest, uses only the mesh axes that no other dimension uses: weights
        of experts are sharded over `expert` already, so their `embed` is sharded over `data` and `context`.
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
        entries = [tuple(axis for axis in entry if keep is None or axis in keep) for entry in mapped]
        return PartitionSpec(*[(entry if len(entry) > 1 else entry[0]) if entry else None for entry in entries])


LOGICAL_AXES = tuple(field.name for field in fields(Rules))
"""The logical axes."""


def demand_known(axes: LogicalAxes, whose: str) -> None:
    """Raises UserError for a logical axis that the rules lack. whose: the array that has them, for the message."""
    unknown = [name for name in axes if name is not None and name not in LOGICAL_AXES]
    if unknown:
        prefix = f"{whose} has logical axes {tuple(axes)}: " if whose else ""
        hint = did_you_mean(str(unknown[0]), LOGICAL_AXES)
        hint = f"{hint}\n" if hint else ""
        raise UserError(
            f"{prefix}unknown logical axis {unknown[0]!r}\n{hint}choose one of {', '.join(LOGICAL_AXES)}, or None for "
            "a dimension that is never sharded"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The rules of arrays in computation, during the step, at rest, and in the optimizer.

    compute: activations, and weights while a layer uses them.
    step_layout: weights in compute dtype during the step, before a layer gathers them.
    params: float32 master weights between steps.
    optimizer: gradients and optimizer state during the update.
    tensor: size of `tensor`; key-value heads are copied if there are fewer.
    """

    compute: Rules
    step_layout: Rules
    params: Rules
    optimizer: Rules
    tensor: int = 1

    @classmethod
    def of(cls, cfg: ParallelConfig) -> "Plan":
        """The plan of a ParallelConfig. replicate, zero1 and fsdp differ in their rules only."""
        compute = Rules(seq_residual=("context", "tensor")) if cfg.sequence else Rules()
        if cfg.expert_tensor == "whole":
            compute = replace(compute, expert=("expert", "tensor"), expert_mlp=())
        sharded = replace(compute, embed=SHARDS)
        match cfg.data_sharding:
            case "replicate":
                in_step, at_rest = compute, compute
            case "zero1":
                in_step, at_rest = compute, sharded
            case "fsdp":
                in_step, at_rest = sharded, sharded
        return cls(compute=compute, step_layout=in_step, params=at_rest, optimizer=at_rest, tensor=cfg.tensor)

    def over_batch(self) -> "Plan":
        """The plan of a model that each device has as a whole: only the batch is sharded."""
        whole = dict.fromkeys(
            ("seq_residual", "embed", "mlp", "heads", "kv_heads", "vocab", "expert", "expert_mlp"), ()
        )
        rules = replace(self.compute, **whole)
        return Plan(compute=rules, step_layout=rules, params=rules, optimizer=rules)

    def kv_heads(self, heads: int) -> str:
        """Logical axis of a weight's key-value heads."""
        return "kv_heads_copied" if heads < self.tensor else "kv_heads"

    def axes_in_step(self, axes: LogicalAxes) -> LogicalAxes:
        """Logical axes of a weight during the step: copied key-value heads are sharded like others."""
        return tuple("kv_heads" if name == "kv_heads_copied" else name for name in axes)

    def rules_in_step(self, axes: LogicalAxes) -> Rules:
        """Rules of a weight during the step. Only stacked matrices are gathered layer by layer."""
        return self.step_layout if "layer" in axes and len(axes) > 2 else self.compute

    def replicated_per_tensor_rank(self, axes: LogicalAxes) -> bool:
        """Whether a weight has one copy per device of `tensor` during the step, along an axis `copies`.

        True for gains and biases of the residual stream under sequence parallelism; each device applies them to its own
        positions. With one copy per device, their gradients are summed over `tensor` once per step. With a shared
        weight, the compiler would sum them in every layer of every microbatch.
        """
        sequence_parallel = set(self.compute.mesh_axes("seq_residual")) >= set(self.compute.mesh_axes("copies"))
        return sequence_parallel and tuple(axes) in (("embed",), ("layer", "embed"))
