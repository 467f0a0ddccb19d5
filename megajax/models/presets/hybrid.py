"""Hybrids by Megatron-LM's patterns: a letter for each layer, "M-M*M-|M-M*M-/*-".

Between "|" are the layers of a chunk of a pipeline, in the order of the model: chunk 0 of all stages, then chunk 1.
After each "/" are the layers of a head that predicts one token further; all such heads are alike.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from megajax.config.errors import UserError
from megajax.layers.config import AnyBlockConfig, BlockConfig, FeedForwardBlockConfig, MixerBlockConfig, StackConfig
from megajax.layers.segments import SegmentsConfig
from megajax.models.config.decoder import PredictionConfig

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
"""What Megatron-LM's letters mean."""


class HybridPattern(NamedTuple):
    """A pattern apart."""

    text: str
    chunks: tuple[str, ...]
    """Layers of each chunk; one where the pattern says nothing of a pipeline."""
    ahead: str
    """Layers of a head that predicts one token further; "" for none."""
    depth: int
    """Such heads."""

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
            message = "the layers after each / are those of one head, without |, and all heads have the same"
            raise UserError(
                f"the hybrid pattern {text!r}: {message}; got {' and '.join(map(repr, dict.fromkeys(ahead)))}"
            )
        return cls(text, chunks, ahead[0] if ahead else "", len(ahead))

    @property
    def layers(self) -> str:
        """All of the stack."""
        return "".join(self.chunks)

    def demand_known(self, blocks: Mapping[str, Any]) -> None:
        """Raises UserError for a letter that is not among the blocks."""
        for place, letter in enumerate(self.text, start=1):
            if letter not in blocks and letter not in (CHUNK, AHEAD):
                meaning = f" ({SYMBOLS[letter]})" if letter in SYMBOLS else ""
                legal = ", ".join(f"{symbol} ({SYMBOLS[symbol]})" if symbol in SYMBOLS else symbol for symbol in blocks)
                raise UserError(
                    f"the hybrid pattern {self.text!r}: there is no block for {letter!r}{meaning} at position {place}; "
                    f"letters with one: {legal}; | ends a chunk of a pipeline, / begins a head that predicts further"
                )


def hybrid_stack(pattern: str, blocks: Mapping[str, AnyBlockConfig]) -> StackConfig | SegmentsConfig:
    """The layers of a pattern: repeats of a shorter one where there is such a one, segments otherwise.

    blocks: letter -> block, usually of one sub-layer. Raises UserError for a pattern that is none, see `HybridPattern`.
    """
    parsed = HybridPattern.parse(pattern)
    parsed.demand_known(blocks)
    layers = [blocks[letter] for letter in parsed.layers]
    stack, segments = StackConfig.of(layers), SegmentsConfig.of(layers)
    chunks_fit = all(len(chunk) % len(stack.pattern) == 0 for chunk in parsed.chunks)
    compiled = sum(len(part.pattern) for part in segments.parts())
    return stack if chunks_fit and stack.repeats > 1 and len(stack.pattern) <= compiled else segments


def hybrid_pipeline(pattern: str, stack: StackConfig | SegmentsConfig, stages: int) -> dict[str, Any]:
    """Settings of ParallelConfig that cut the layers where the pattern has "|": `pipeline`, `virtual_stages`, `layers`.

    stack: of `hybrid_stack`; stages: of the pipeline. Only the stages for a pattern without "|".
    Raises UserError where the chunks cannot be distributed evenly over the stages.
    """
    chunks = HybridPattern.parse(pattern).chunks
    if len(chunks) == 1:
        return {"pipeline": stages}
    if stages < 2 or len(chunks) % stages:
        legal = [count for count in range(2, len(chunks) + 1) if len(chunks) % count == 0]
        raise UserError(
            f"the hybrid pattern {pattern!r} has {len(chunks)} chunks, separated by |, and parallel.pipeline={stages} "
            f"does not divide them: use {' or '.join(map(str, legal))}, or leave out | for chunks as even as can be"
        )
    unit, virtual = stack.cut_unit(), len(chunks) // stages
    settings = {"pipeline": stages, "virtual_stages": virtual, "layers": tuple(len(chunk) // unit for chunk in chunks)}
    return settings if virtual == 1 else settings | {"schedule": "interleaved"}


def hybrid_prediction(pattern: str, blocks: Mapping[str, AnyBlockConfig], **settings: Any) -> PredictionConfig | None:
    """Heads that predict further tokens, of the layers after "/"; None where there are none.

    settings: of PredictionConfig. Raises UserError for heads that are no single block: one letter, or a mixer and then
    a feed-forward with the same norm and dropout.
    """
    parsed = HybridPattern.parse(pattern)
    parsed.demand_known(blocks)
    if not parsed.depth:
        return None
    block, *more = [blocks[letter] for letter in parsed.ahead]
    if len(more) == 1 and isinstance(block, MixerBlockConfig) and isinstance(more[0], FeedForwardBlockConfig):
        mlp = more[0]
        if replace(mlp, norm=block.norm, dropout=block.dropout) == mlp:
            block, more = BlockConfig(mixer=block.mixer, mlp=mlp.mlp, norm=block.norm, dropout=block.dropout), []
    if more:
        raise UserError(
            f"the hybrid pattern {pattern!r}: a head that predicts further has one block here, one letter or a mixer "
            f"and a feed-forward with the same norm and dropout; got {parsed.ahead!r}"
        )
    return PredictionConfig(depth=parsed.depth, block=block, **settings)
