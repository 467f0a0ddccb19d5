"""Sizes from the tables of papers, and the decoder of a size and its blocks."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from megajax.config.errors import UserError
from megajax.layers.block.config import BlockConfig
from megajax.layers.stack.config import StackConfig, stack_of
from megajax.models.decoder.config import DecoderConfig


class Size(NamedTuple):
    """Dimensions of a model size; 0 where they do not apply to a family."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0
    ffn: int = 0
    tied: bool = False
    vocabulary: int = 0
    head_dim: int = 0
    experts: int = 0
    top_k: int = 0


def pick[Row](family: str, sizes: Mapping[str, Row], size: str) -> Row:
    """The row of this size. Raises UserError for an unknown size."""
    if size not in sizes:
        raise UserError(f"{family} has no size {size!r}; sizes: {', '.join(sizes)}")
    return sizes[size]


def decoder(
    size: Size, *blocks: BlockConfig, family: str, sequence_length: int, vocabulary_size: int, **more: Any
) -> DecoderConfig:
    """A decoder that repeats these blocks, the last time perhaps only the first of them.

    Their norm is also the final norm. more: other settings of the model.
    """
    repeats, rest = divmod(size.layers, len(blocks))
    whole = StackConfig(pattern=blocks, repeats=repeats)
    return DecoderConfig(
        hidden=size.hidden,
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
        stack=stack_of([*blocks * repeats, *blocks[:rest]]) if rest else whole,
        norm=blocks[0].norm,
        family=family,
        **more,
    )
