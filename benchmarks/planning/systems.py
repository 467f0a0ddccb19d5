"""Training programs of others as the cost model sees them, and a published run of one."""

from dataclasses import dataclass, replace

from megajax.layers.recompute import PARTS, Recompute
from megajax.mesh.config import ContextStrategy, ParallelConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.planning.compiled.devices import GPUS, Device
from megajax.planning.cost.description import OPERANDS, Description, System

UNTUNED = 1.23
"""Overhead of programs outside of NVIDIA's tuned stack; fitted, see benchmarks/planning/held_out.py."""

MEGATRON = System(
    name="Megatron-LM with TransformerEngine", tuned=True, tensor_hidden=0.75, experts_hidden=0.9, experts_wait=4e-3
)
"""NVIDIA's own runs from 2024 on: collectives over `tensor` run in pieces, overlapped with their matmul; tokens travel
to their experts beside other work. `experts_wait` is fitted."""
MEGATRON_R08 = replace(MEGATRON, name="Megatron-LM core r0.8", fused_loss=False, overhead=1.087)
"""The README's table of 2024; `overhead` is fitted."""
MAXTEXT = System(name="MaxText", xla=True, fused_loss=False)
"""FSDP in XLA: gathers and scatters overlap with the layers of a loop over stacked weights."""
XLA = replace(MAXTEXT, name="Pax or AXLearn", overhead=UNTUNED)
"""The same in programs that are not tuned for GPUs as MaxText's recipes are."""
PYTORCH_FSDP = System(name="PyTorch FSDP", tensor_hidden=0.0, fused_loss=False, overhead=UNTUNED)
"""Gathers of the next layer and scatters of the one before overlap with a layer."""
DETERMINISTIC = replace(MEGATRON, name="Megatron-LM, deterministic", tensor_hidden=0.0)
"""Megatron-LM's tests of speed, without overlap of collectives over `tensor`."""

MEGATRON_2022 = System(name="Megatron-LM of 2022", tuned=True, tensor_hidden=0.0, data_hidden=False, fused_loss=False)
"""Before fused attention: scores are written to memory and recomputed in the backward pass (selective)."""
MEGATRON_2021 = replace(MEGATRON_2022, name="Megatron-LM of 2021", overhead=UNTUNED)

SAVE_QKV: Recompute = tuple(part for part in PARTS if part not in ("query_key_value", "input"))
"""MaxText's save_qkv_proj."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A run and its speed."""

    name: str
    source: str
    device: str | Device
    """A name of GPUS, or a GPU of a cluster that differs from it."""
    tokens: float
    """Per second and device."""
    model: DecoderConfig
    devices: int
    rows: int
    """Per step."""
    system: System
    micro_size: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    strategy: ContextStrategy = "ring"
    """TransformerEngine's default."""
    virtual_stages: int = 1
    expert: int = 1
    whole_experts: bool = False
    fsdp: bool = False
    shards: int | None = None
    replicated: bool = False
    compute: str = "bfloat16"
    reduce: str | None = None
    """Dtype in which gradients are reduced; None: bfloat16 with a recipe, float32 otherwise."""
    per_node: int | None = None

    def described(self) -> Description:
        """The run as input of the cost model."""
        device = self.device if isinstance(self.device, Device) else GPUS[self.device]
        apart = self.tensor * self.pipeline * self.context * self.expert
        return Description(
            model=self.model,
            parallel=ParallelConfig(
                tensor=self.tensor,
                pipeline=self.pipeline,
                context=self.context,
                context_strategy=self.strategy,
                virtual_stages=self.virtual_stages,
                expert=self.expert,
                expert_tensor="whole" if self.whole_experts else "cut",
                data=self.devices // apart,
                sequence=self.tensor > 1,
                data_sharding="fsdp" if self.fsdp else "replicate" if self.replicated else "zero1",
                shards=self.shards,
            ),
            device=device,
            per_node=self.per_node or min(device.per_node, self.devices),
            global_size=self.rows,
            micro_size=self.micro_size,
            compute=self.compute,  # ty: ignore
            reduce=self.reduce or ("bfloat16" if self.compute in OPERANDS else "float32"),
            system=self.system,
        )
