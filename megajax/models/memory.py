"""Memory from the facts of a model: saved activations of its layers, and Megatron-LM's memory report.

The report compares layouts with each other and with Megatron-LM's report; `python -m megajax.plan` compiles the real
program and gives its memory. Activations follow Korthikanti et al. 2022, 2 bytes each. A parameter takes 18 bytes: a
weight of 2 bytes, and gradient, master weight and two moments of 4 bytes each. As in the report, activations ignore
grouped queries and gated MLPs, and biases and learned positions are not counted as parameters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megajax.layers.block.config import BlockConfig
from megajax.layers.facts import BlockFacts, Norm, Share, total_size
from megajax.layers.recompute import Recompute, Recomputing
from megajax.mesh.config import ParallelConfig
from megajax.models.facts import Facts, SectionFacts
from megajax.models.protocol import ids_below


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Bytes that a layer saves for the backward pass of a microbatch: the mean over the pattern."""

    layers: float
    """Number of such layers in a chunk of a stage."""
    device: float
    host: float
    recomputed: float


def saved_bytes(
    recomputing: Recomputing, pattern: Sequence[BlockFacts], share: Share, repeats: float
) -> Iterator[SavedBytes]:
    """Saved bytes for each save policy in a chunk. repeats: of the pattern in the chunk."""
    layers = repeats * len(pattern)
    first = layers if recomputing.layers is None else min(recomputing.layers, layers)
    for count, policy in ((first, recomputing.policy()), (layers - first, recomputing.lighter_policy())):
        if count:
            sums = (
                sum(measure(block, policy, share) for block in pattern) / len(pattern)
                for measure in (BlockFacts.saved_bytes, BlockFacts.host_bytes, BlockFacts.recomputed_bytes)
            )
            yield SavedBytes(count, *sums)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySetting:
    """The layout of a model, as far as the report uses it."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    """Data-parallel devices."""
    virtual_stages: int = 1
    experts: int | None = None
    """Devices that shard the experts; None: those of `tensor`."""
    micro_size: int = 1
    """Rows of a microbatch."""
    microbatches: int | None = None
    """Microbatches per step; None: enough to fill the pipeline."""
    zero1: bool = False
    """The optimizer state is sharded over the data-parallel devices."""
    sequence: bool = False
    """Sequence parallelism with selective recomputation; false: the report's other formula."""

    def parameter_bytes(self, replicas: float) -> float:
        """Bytes of a parameter with its gradient and optimizer state. replicas: devices that store it."""
        return 6 + 12 / replicas if self.zero1 else 18

    @classmethod
    def of(
        cls, parallel: ParallelConfig, recompute: Recompute, *, data: int, micro_size: int, microbatches: int
    ) -> "MemorySetting":
        """The setting of a layout. Recomputation of named tensors counts as selective, as in Megatron-LM.

        data: number of devices with the same weights.
        """
        return cls(
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            data=data,
            experts=parallel.expert * parallel.tensor,
            virtual_stages=parallel.virtual_stages,
            micro_size=micro_size,
            microbatches=microbatches,
            zero1=parallel.data_sharding != "replicate",
            sequence=parallel.sequence and recompute not in ("none", "full"),
        )


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of the most loaded device, and parameter counts."""

    weights: float
    """Weights, gradients and optimizer state."""
    activations: float
    layer_parameters: int
    """Parameters of all blocks, including those of multi-token prediction, and of the final norm."""
    embedding_parameters: int
    """Parameters of token tables, with padding."""
    most_loaded: float
    """Parameters of the most loaded device."""

    @property
    def total(self) -> float:
        return self.weights + self.activations


def memory_report(model: Facts, setting: MemorySetting) -> MemoryReport | None:
    """The report; None for models that it does not cover: several sections, no vocabulary, hybrids."""
    (cfg, *more), head = model.section_facts(), model.head_facts()
    if more or ids_below(model) is None or not isinstance(cfg.norm, Norm):
        return None
    if any(len(block.parts()) != 2 for block in cfg.stack.pattern):
        return None
    hidden, table, pipeline = cfg.hidden, cfg.hidden * head.columns, setting.pipeline
    tied = not any("vocab" in weight.axes for weight in head.tables)
    sharded, replicated, experts = (count * cfg.stack.repeats for count in _parameters(cfg.stack.pattern, hidden))
    replicated += total_size(cfg.norm.weights(hidden))
    ahead_sharded, ahead_replicated, ahead_experts = _parameters(head.ahead, hidden)
    expert_devices = setting.experts or setting.tensor
    stage_experts = experts / (pipeline * expert_devices)
    most = (sharded / pipeline + ahead_sharded + table) / setting.tensor + replicated / pipeline + ahead_replicated
    if not tied and pipeline == 1:
        most += table / setting.tensor
    most_experts = stage_experts + ahead_experts / expert_devices
    return MemoryReport(
        weights=most * setting.parameter_bytes(setting.data)
        + most_experts * setting.parameter_bytes(setting.data * setting.tensor / expert_devices),
        activations=activation_bytes(cfg, head.columns, setting),
        layer_parameters=sharded + ahead_sharded + replicated + ahead_replicated + experts + ahead_experts,
        embedding_parameters=table if tied else 2 * table,
        most_loaded=most + most_experts,
    )


def _parameters(blocks: Sequence[BlockConfig], hidden: int) -> tuple[int, int, int]:
    """Parameters of blocks: those that `tensor` shards, those on all its devices, and those of experts."""
    return (
        sum(block.megatron_matrices(hidden) for block in blocks),
        sum(block.megatron_replicated(hidden) for block in blocks),
        sum(block.megatron_experts(hidden) for block in blocks),
    )


def activation_bytes(cfg: SectionFacts, vocabulary: int, setting: MemorySetting) -> float:
    """Activation bytes of the first stage, which holds the most microbatches. vocabulary: scores per token."""
    # The width of layers without experts, if there are any.
    dense = [block for block in cfg.stack.pattern if not block.megatron_experts(cfg.hidden)]
    block, stages = (dense or cfg.stack.pattern)[0], setting.pipeline
    tokens, hidden, layers = cfg.positions * setting.micro_size, cfg.hidden, cfg.stack.layers()
    # For each microbatch in flight: token and position ids of 8 bytes, and the dropout mask of the embedding.
    entering = (8 * tokens + tokens * hidden) * stages
    if setting.sequence:
        per_layer = tokens * hidden * (18 + 4 * block.megatron_ffn(hidden) / hidden)
        head = 4 * tokens * hidden * (1 + vocabulary / hidden) if stages == 1 else 0
        return ((per_layer * layers + entering) * _in_flight(setting) + head) / setting.tensor
    per_layer = tokens * hidden * (10 + 24 / setting.tensor)
    head = 2 * (tokens * vocabulary / setting.tensor + tokens * hidden) if stages == 1 else 0
    return 1.05 * ((per_layer * layers + entering) * _in_flight(setting) + head)


def _in_flight(setting: MemorySetting) -> float:
    """Microbatches that the first stage holds, over the number of stages."""
    stages, virtual = setting.pipeline, setting.virtual_stages
    if virtual > 1:
        return 1 + (stages - 1) / (stages * virtual)
    return 1.0 if setting.microbatches is None else min(1.0, setting.microbatches / stages)
