"""Stacks of several patterns; importing this imports neither jax nor flax."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

from megajax.config.builds import Builds
from megajax.config.errors import Problem
from megajax.layers.block.config import AnyBlockConfig, StackConfig, table_problems, table_weights
from megajax.layers.facts import Weight
from megajax.layers.stack.runs import split_patterns


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentsConfig(Builds):
    """Consecutive stacks, each scanned: hybrids whose layers are not one repeated pattern.

    Layers are numbered across segments. The weights of equal blocks are stacked together, so the arrays do not depend
    on how layers are divided into segments and pipeline stages.
    """

    target: ClassVar[str] = "megajax.layers.stack.stack:Stack"
    segments: tuple[StackConfig, ...]
    """From the first layer to the last."""

    def problems(self) -> list[Problem]:
        if not self.segments:
            return [Problem("segments", "needs at least one")]
        return table_problems("segments", self.pattern)

    def parts(self) -> tuple[StackConfig, ...]:
        return self.segments

    def with_pattern(self, blocks: Sequence[AnyBlockConfig]) -> "SegmentsConfig":
        """A copy with these blocks, one per layer. Equal blocks must be replaced by equal blocks."""
        starts = accumulate((part.layers() for part in self.segments), initial=0)
        parts = [
            part.with_pattern(blocks[start : start + len(part.pattern)])
            for start, part in zip(starts, self.segments, strict=False)
        ]
        return replace(self, segments=tuple(parts))

    @property
    def pattern(self) -> tuple[AnyBlockConfig, ...]:
        """The blocks of all layers, as a pattern that occurs once."""
        return tuple(block for part in self.segments for block in part.pattern * part.repeats)

    @property
    def repeats(self) -> int:
        return 1

    @classmethod
    def of(cls, blocks: Sequence[AnyBlockConfig]) -> "SegmentsConfig":
        """Segments of these blocks with the fewest blocks to compile: the smallest total length of patterns."""
        runs = split_patterns([blocks.index(block) for block in blocks])
        stacks = (StackConfig(pattern=tuple(blocks[n] for n in pattern), repeats=repeats) for pattern, repeats in runs)
        return cls(segments=tuple(stacks))

    def stored(self) -> tuple[tuple[AnyBlockConfig, tuple[int, ...]], ...]:
        """Each block with stacked weights, and the numbers of its layers."""
        layers: dict[AnyBlockConfig, list[int]] = {}
        for number, block in enumerate(self.pattern):
            layers.setdefault(block, []).append(number)
        return tuple((block, tuple(numbers)) for block, numbers in layers.items())

    def named_blocks(self) -> dict[str, AnyBlockConfig]:
        """Setting -> block, for each block of the config."""
        parts = enumerate(self.segments)
        return {f"segments.{n}.{setting}": block for n, part in parts for setting, block in part.named_blocks().items()}

    def cut_unit(self) -> int:
        """Layers that stay on one pipeline stage: one."""
        return 1

    def layers(self) -> int:
        """Number of blocks a token passes."""
        return sum(part.layers() for part in self.segments)

    def sub_layers(self) -> int:
        """Outputs that are added to the residual stream, from the first block to the last."""
        return sum(part.sub_layers() for part in self.segments)

    def repeated_blocks(self) -> tuple[tuple[AnyBlockConfig, int], ...]:
        """Each block of the config and how often it is applied."""
        return tuple(pair for part in self.segments for pair in part.repeated_blocks())

    def shared_weights(self) -> tuple[Weight, ...]:
        """Weights that all layers of the stack share."""
        return table_weights(self.pattern)


def stack_of(blocks: Sequence[AnyBlockConfig]) -> StackConfig | SegmentsConfig:
    """A stack of these layers: one repeated pattern if possible, otherwise segments."""
    single = StackConfig.of(blocks)
    return single if single.repeats > 1 or len(blocks) == 1 else SegmentsConfig.of(blocks)


def blocks_of(stack: StackConfig | SegmentsConfig) -> tuple[AnyBlockConfig, ...]:
    """The block of each layer."""
    return tuple(block for part in stack.parts() for block in part.pattern * part.repeats)
