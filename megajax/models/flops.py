"""Parameters and floating-point operations of a decoder, from its config alone.

Counting rule of Megatron-LM's throughput line: a multiply-add is two operations, the backward pass costs twice the
forward; matmuls of attention, MLP and head count, norms, softmax and recomputation do not.
"""

from dataclasses import dataclass

from megajax.layers.config import BlockConfig, GatedMLPConfig, LayerNormConfig
from megajax.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of one training step per token, by how core attention is counted."""

    causal: float
    """Half the square: what a causal model needs."""
    full: float
    """The whole square: the older convention."""


def flops_per_token(cfg: DecoderConfig) -> Flops:
    """Forward and backward, for rows of cfg.sequence_length tokens."""
    matmuls = sum(_block_matmuls(cfg.hidden, block) for block in cfg.stack.pattern) * cfg.stack.repeats
    head = 2 * cfg.hidden * cfg.padded_vocabulary()
    core = sum(block.mixer.heads * block.mixer.size(cfg.hidden) for block in cfg.stack.pattern) * cfg.stack.repeats
    # Two matmuls (scores, values) of two operations each over the row.
    full = 4 * core * cfg.sequence_length
    return Flops(causal=3 * (matmuls + head + full / 2), full=3 * (matmuls + head + full))


def _block_matmuls(hidden: int, block: BlockConfig) -> int:
    mixer, matrices = block.mixer, 3 if isinstance(block.mlp, GatedMLPConfig) else 2
    projections = 2 * mixer.heads + 2 * mixer.groups()
    return 2 * hidden * (projections * mixer.size(hidden) + matrices * block.mlp.ffn)


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Weights of a model; the table counts its vocabulary_size rows, not the padding."""

    layers: int
    """In the blocks and the final norm."""
    embedding: int
    """Token and position tables."""
    head: int
    """0 when tied."""

    @property
    def total(self) -> int:
        return self.layers + self.embedding + self.head


def parameter_count(cfg: DecoderConfig) -> ParameterCount:
    """By the formulas of the layers; tests compare it with the arrays."""
    norm = cfg.hidden * (2 if isinstance(cfg.norm, LayerNormConfig) else 1)
    table = cfg.hidden * cfg.vocabulary_size
    layers = sum(_block_parameters(cfg.hidden, block) for block in cfg.stack.pattern) * cfg.stack.repeats
    positions = cfg.hidden * cfg.sequence_length if cfg.learned_positions else 0
    return ParameterCount(layers + norm, table + positions, 0 if cfg.tied else table)


def _block_parameters(hidden: int, block: BlockConfig) -> int:
    mixer, size = block.mixer, block.mixer.size(hidden)
    widths = (mixer.heads + 2 * mixer.groups()) * size
    attention = hidden * (widths + mixer.heads * size) + (widths + hidden if mixer.bias else 0)
    inner = 2 if isinstance(block.mlp, GatedMLPConfig) else 1
    mlp = hidden * block.mlp.ffn * (inner + 1) + (inner * block.mlp.ffn + hidden if block.mlp.bias else 0)
    norms = 2 * hidden * (2 if isinstance(block.norm, LayerNormConfig) else 1)
    return attention + mlp + norms
