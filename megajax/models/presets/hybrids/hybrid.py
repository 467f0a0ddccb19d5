"""Hybrid models from Megatron-LM's patterns, with a letter for each layer: "M-M*M-|M-M*M-/*-".

"|" separates the layers of pipeline chunks, in the order of the model: chunk 0 of all stages, then chunk 1. Each "/"
starts the layers of a head that predicts one token further; all such heads are alike.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from megajax.config.errors import UserError
from megajax.layers.block.config import BlockConfig
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.models.decoder.config import PredictionConfig

CHUNK, AHEAD = "|", "/"

SYMBOLS: Mapping[str, str] = MappingProxyType(
    {
        "M": "Mamba-2",
        "*": "attention",
        "-": "MLP",
        "E": "mixture of experts",
        "+": "latent attention",
        "G": "gated delta net",
        "D": "sparse attention",
    }
)
"""Megatron-LM's letters -> layers."""


class HybridPattern(NamedTuple):
    """A parsed pattern."""

    text: str
    chunks: tuple[str, ...]
    """Layers of each pipeline chunk; a single chunk for a pattern without "|"."""
    ahead: str
    """Layers of each further prediction head; "" without such heads."""
    depth: int
    """Number of further prediction heads."""

    @classmethod
    def parse(cls, text: str) -> "HybridPattern":
        """Raises UserError for a pattern or a chunk without layers, and for heads that differ."""
        main, *ahead = text.split(AHEAD)
        chunks = tuple(main.split(CHUNK))
        if not main:
            raise UserError(f"the hybrid pattern {text!r} has no layers: write one letter for each, such as M-M*")
        if "" in chunks:
            raise UserError(f"the hybrid pattern {text!r}: chunk {chunks.index('') + 1} of {len(chunks)} has no layers")
        if ahead and (len(set(ahead)) > 1 or not ahead[0] or CHUNK in ahead[0]):
            message = "each / starts the layers of one head, without |, and all heads must have the same layers"
            raise UserError(
                f"the hybrid pattern {text!r}: {message}; got {' and '.join(map(repr, dict.fromkeys(ahead)))}"
            )
        return cls(text, chunks, ahead[0] if ahead else "", len(ahead))

    @property
    def layers(self) -> str:
        """All layers of the stack."""
        return "".join(self.chunks)

    def demand_known(self, blocks: Mapping[str, Any]) -> None:
        """Raises UserError for a letter that is not among the blocks."""
        for place, letter in enumerate(self.text, start=1):
            if letter not in blocks and letter not in (CHUNK, AHEAD):
                meaning = f" ({SYMBOLS[letter]})" if letter in SYMBOLS else ""
                legal = ", ".join(f"{symbol} ({SYMBOLS[symbol]})" if symbol in SYMBOLS else symbol for symbol in blocks)
                raise UserError(
                    f"the hybrid pattern {self.text!r}: there is no block for {letter!r}{meaning} at position {place}; "
                    f"known letters: {legal}; | ends a pipeline chunk, / starts a head that predicts further"
                )


def hybrid_stack(pattern: str, blocks: Mapping[str, BlockConfig]) -> StackConfig | SegmentsConfig:
    """The stack of a pattern: repeats of a shorter pattern if possible, otherwise segments.

    blocks: letter -> block, usually of one sub-layer. Raises UserError for an invalid pattern, see `HybridPattern`.

    Example: `mj.hybrid_stack("MMM", {"M": mj.BlockConfig(mixer=mj.Mamba2Config(heads=24))})`
    """
    parsed = HybridPattern.parse(pattern)
    parsed.demand_known(blocks)
    layers = [blocks[letter] for letter in parsed.layers]
    stack, segments = StackConfig.of(layers), SegmentsConfig.of(layers)
    chunks_fit = all(len(chunk) % len(stack.pattern) == 0 for chunk in parsed.chunks)
    compiled = sum(len(part.pattern) for part in segments.parts())
    return stack if chunks_fit and stack.repeats > 1 and len(stack.pattern) <= compiled else segments


def hybrid_pipeline(pattern: str, stack: StackConfig | SegmentsConfig, stages: int) -> dict[str, Any]:
    """Settings of ParallelConfig that cut the layers at "|": `pipeline`, `virtual_stages`, `layers`, `schedule`.

    stack: from `hybrid_stack`; stages: number of pipeline stages. Only `pipeline` for a pattern without "|".
    Raises UserError if the chunks cannot be distributed evenly over the stages.

    Example: `mj.hybrid_pipeline("MMMM", stack, stages=2)`
    """
    chunks = HybridPattern.parse(pattern).chunks
    if len(chunks) == 1:
        return {"pipeline": stages}
    if stages < 2 or len(chunks) % stages:
        legal = [count for count in range(2, len(chunks) + 1) if len(chunks) % count == 0]
        raise UserError(
            f"the hybrid pattern {pattern!r} has {len(chunks)} chunks, separated by |, and parallel.pipeline={stages} "
            f"does not divide them: use {' or '.join(map(str, legal))}, or leave out | for chunks of nearly equal size"
        )
    unit, virtual = stack.cut_unit(), len(chunks) // stages
    settings = {"pipeline": stages, "virtual_stages": virtual, "layers": tuple(len(chunk) // unit for chunk in chunks)}
    return settings if virtual == 1 else settings | {"schedule": "interleaved"}


def hybrid_prediction(pattern: str, blocks: Mapping[str, BlockConfig], **settings: Any) -> PredictionConfig | None:
    """Heads that predict further tokens, from the layers after "/"; None for a pattern without "/".

    settings: of PredictionConfig. Raises UserError unless a head is a single block: one letter, or a mixer followed by
    a feed-forward with the same norm and dropout.
    """
    parsed = HybridPattern.parse(pattern)
    parsed.demand_known(blocks)
    if not parsed.depth:
        return None
    block, *more = [blocks[letter] for letter in parsed.ahead]
    if len(more) == 1 and block.mlp is None and more[0].mixer is None:
        mlp = more[0]
        if replace(mlp, norm=block.norm, dropout=block.dropout) == mlp:
            block, more = BlockConfig(mixer=block.mixer, mlp=mlp.mlp, norm=block.norm, dropout=block.dropout), []
    if more:
        raise UserError(
            f"the hybrid pattern {pattern!r}: a head that predicts further must be one block: one letter, or a mixer "
            f"and a feed-forward with the same norm and dropout; got {parsed.ahead!r}"
        )
    return PredictionConfig(depth=parsed.depth, block=block, **settings)
