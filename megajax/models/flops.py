"""Parameters and floating-point operations of a decoder, from its config alone.

Counting rule of Megatron-LM's throughput line: a multiply-add is two operations, the backward pass costs twice the
forward; matmuls of attention, MLP and head count, norms, softmax and recomputation do not. A window is counted as if
there were none.
"""

from dataclasses import dataclass
from functools import singledispatch

from megajax.layers.config import (
    AttentionConfig,
    BlockConfig,
    GatedMLPConfig,
    LatentAttentionConfig,
    LayerNormConfig,
    MixerConfig,
    MLPConfig,
    NormConfig,
    RMSNormConfig,
)
from megajax.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of one training step per token, by how core attention is counted."""

    causal: float
    """Half the square: what a causal model needs."""
    full: float
    """The whole square: the older convention."""


def flops_per_token(cfg: DecoderConfig) -> Flops:
    """Forward and backward, for rows of cfg.sequence_length tokens.

    Where heads predict further ahead, their blocks, their two matrices, their three norms and their logits count.
    """
    hidden, further = cfg.hidden, cfg.predicting_blocks()
    blocks = [*cfg.stack.pattern] * cfg.stack.repeats + [*further]
    matmuls = sum(mixer_matmuls(block.mixer, hidden) + mlp_matmuls(block.mlp, hidden) for block in blocks)
    merging = len(further) * (3 * hidden + 2 * hidden**2)
    heads = (1 + len(further)) * hidden * cfg.padded_vocabulary()
    once = 2 * (matmuls + merging + heads)
    # Two operations for each of the row's keys.
    full = 2 * sum(core_matmuls(block.mixer, hidden) for block in blocks) * cfg.sequence_length
    return Flops(causal=3 * (once + full / 2), full=3 * (once + full))


@singledispatch
def mixer_matmuls(cfg: MixerConfig, hidden: int) -> int:
    """Multiply-adds for each token in all but core attention."""
    raise TypeError(f"no count for {type(cfg).__name__}")


@mixer_matmuls.register
def _(cfg: AttentionConfig, hidden: int) -> int:
    return hidden * cfg.size(hidden) * ((2 + cfg.gate) * cfg.heads + 2 * cfg.groups())


@mixer_matmuls.register
def _(cfg: LatentAttentionConfig, hidden: int) -> int:
    """Norms of latents count, as Megatron-LM has it."""
    query, size = cfg.query_rank, cfg.content_dim + cfg.position_dim
    queries = hidden * cfg.heads * size if query is None else query * (hidden + cfg.heads * size + 1)
    latents = cfg.key_value_rank * (hidden + cfg.heads * (cfg.content_dim + cfg.value_dim) + 1)
    return queries + latents + hidden * cfg.position_dim + cfg.heads * cfg.value_dim * hidden


@singledispatch
def core_matmuls(cfg: MixerConfig, hidden: int) -> int:
    """Multiply-adds for each pair of a query's and a key's token: one score and one value of each head."""
    raise TypeError(f"no count for {type(cfg).__name__}")


@core_matmuls.register
def _(cfg: AttentionConfig, hidden: int) -> int:
    return 2 * cfg.heads * cfg.size(hidden)


@core_matmuls.register
def _(cfg: LatentAttentionConfig, hidden: int) -> int:
    return cfg.heads * (cfg.size(hidden) + cfg.value_dim)


def mlp_matmuls(cfg: MLPConfig, hidden: int) -> int:
    """Multiply-adds for each token."""
    return (3 if isinstance(cfg, GatedMLPConfig) else 2) * hidden * cfg.ffn


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Weights of a model; the table counts its vocabulary_size rows, not the padding."""

    layers: int
    """In the blocks, the final norm, and what predicts further ahead."""
    embedding: int
    """Token and position tables."""
    head: int
    """0 when tied."""

    @property
    def total(self) -> int:
        return self.layers + self.embedding + self.head


def parameter_count(cfg: DecoderConfig) -> ParameterCount:
    """By the formulas of the layers; tests compare it with the arrays."""
    hidden, norm = cfg.hidden, norm_parameters(cfg.norm, cfg.hidden)
    table = hidden * cfg.vocabulary_size
    layers = sum(block_parameters(block, hidden) for block in cfg.stack.pattern) * cfg.stack.repeats
    further = sum(block_parameters(block, hidden) + 3 * norm + 2 * hidden**2 for block in cfg.predicting_blocks())
    positions = hidden * cfg.sequence_length if cfg.learned_positions else 0
    return ParameterCount(layers + further + norm, table + positions, 0 if cfg.tied else table)


def norm_parameters(cfg: NormConfig | None, size: int) -> int:
    """Of a norm over this many dimensions."""
    match cfg:
        case LayerNormConfig():
            return 2 * size
        case RMSNormConfig():
            return size
    return 0


def block_parameters(block: BlockConfig, hidden: int) -> int:
    """Of a block."""
    mlp, inner = block.mlp, 2 if isinstance(block.mlp, GatedMLPConfig) else 1
    biases = inner * mlp.ffn + hidden if mlp.bias else 0
    norms = 2 * norm_parameters(block.norm, hidden)
    return mixer_parameters(block.mixer, hidden) + mlp_matmuls(mlp, hidden) + biases + norms


@singledispatch
def mixer_parameters(cfg: MixerConfig, hidden: int) -> int:
    """Of attention, its biases, norms and sinks."""
    raise TypeError(f"no count for {type(cfg).__name__}")


@mixer_parameters.register
def _(cfg: AttentionConfig, hidden: int) -> int:
    size = cfg.size(hidden)
    biases = size * ((1 + cfg.gate) * cfg.heads + 2 * cfg.groups()) if cfg.has_qkv_bias() else 0
    relative = cfg.relative.buckets * cfg.heads if cfg.relative is not None else 0
    norms = 2 * norm_parameters(cfg.qk_norm, size)
    return mixer_matmuls(cfg, hidden) + biases + cfg.bias * hidden + norms + relative + _sinks(cfg)


@mixer_parameters.register
def _(cfg: LatentAttentionConfig, hidden: int) -> int:
    ranks = cfg.key_value_rank + (cfg.query_rank or 0)
    norms = norm_parameters(cfg.norm, cfg.key_value_rank) + norm_parameters(cfg.norm, cfg.query_rank or 0)
    return mixer_matmuls(cfg, hidden) - ranks + norms + cfg.bias * hidden + _sinks(cfg)


def _sinks(cfg: MixerConfig) -> int:
    return cfg.heads if cfg.sink == "learned" else 0
