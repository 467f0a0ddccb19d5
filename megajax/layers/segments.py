"""Stacks of several patterns; importing this imports neither jax nor flax."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

from megajax.config.builds import Builds
from megajax.config.errors import Problem
from megajax.layers.config.block import AnyBlockConfig, StackConfig, table_problems, table_weights
from megajax.layers.facts import Weight
from megajax.layers.runs import split_patterns


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentsConfig(Builds):
    """Stacks one after another, each scanned: hybrids whose layers are not one repeated pattern.

    Layers are numbered through all segments. The weights of equal blocks are stacked together wherever they are, so
    they are the same arrays however layers are cut into segments and over the stages of a pipeline.
    """

    target: ClassVar[str] = "megajax.layers.stack:Stack"
    segments: tuple[StackConfig, ...]
    """From the first layer to the last."""

    def problems(self) -> list[Problem]:
        if not self.segments:
            return [Problem("segments", "needs at least one")]
        return table_problems("segments", self.pattern)

    def parts(self) -> tuple[StackConfig, ...]:
        return self.segments

    def with_pattern(self, blocks: Sequence[AnyBlockConfig]) -> "SegmentsConfig":
        """The same segments of other blocks, one for each layer. Equal layers must become equal ones."""
        starts = accumulate((part.layers() for part in self.segments), initial=0)
        parts = [
            part.with_pattern(blocks[start : start + len(part.pattern)])
            for start, part in zip(starts, self.segments, strict=False)
        ]
        return replace(self, segments=tuple(parts))

    @property
    def pattern(self) -> tuple[AnyBlockConfig, ...]:
        """Every layer's block, as a pattern that occurs once."""
        return tuple(block for part in self.segments for block in part.pattern * part.repeats)

    @property
    def repeats(self) -> int:
        return 1

    @classmethod
    def of(cls, blocks: Sequence[AnyBlockConfig]) -> "SegmentsConfig":
        """These blocks in the segments that have the fewest blocks in their patterns, which is what is compiled."""
        runs = split_patterns([blocks.index(block) for block in blocks])
        stacks = (StackConfig(pattern=tuple(blocks[n] for n in pattern), repeats=repeats) for pattern, repeats in runs)
        return cls(segments=tuple(stacks))

    def stored(self) -> tuple[tuple[AnyBlockConfig, tuple[int, ...]], ...]:
        """Each block whose weights are stacked, and the numbers of the layers they are of."""
        layers: dict[AnyBlockConfig, list[int]] = {}
        for number, block in enumerate(self.pattern):
            layers.setdefault(block, []).append(number)
        return tuple((block, tuple(numbers)) for block, numbers in layers.items())

    def named_blocks(self) -> dict[str, AnyBlockConfig]:
        """Setting -> block, of each that is in the config."""
        parts = enumerate(self.segments)
        return {f"segments.{n}.{setting}": block for n, part in parts for setting, block in part.named_blocks().items()}

    def cut_unit(self) -> int:
        """Layers that a pipeline cannot cut apart: one."""
        return 1

    def layers(self) -> int:
        """Number of blocks a token passes."""
        return sum(part.layers() for part in self.segments)

    def sub_layers(self) -> int:
        """Outputs that are added to the residual stream, from the first block to the last."""
        return sum(part.sub_layers() for part in self.segments)

    def repeated_blocks(self) -> tuple[tuple[AnyBlockConfig, int], ...]:
        """Each block that is written in the config, and how often it is applied."""
        return tuple(pair for part in self.segments for pair in part.repeated_blocks())

    def shared_weights(self) -> tuple[Weight, ...]:
        """Weights of the stack itself."""
        return table_weights(self.pattern)


def stack_of(blocks: Sequence[AnyBlockConfig]) -> StackConfig | SegmentsConfig:
    """These layers: one pattern that repeats, or else several."""
    single = StackConfig.of(blocks)
    return single if single.repeats > 1 or len(blocks) == 1 else SegmentsConfig.of(blocks)


def blocks_of(stack: StackConfig | SegmentsConfig) -> tuple[AnyBlockConfig, ...]:
    """The block of each layer."""
    return tuple(block for part in stack.parts() for block in part.pattern * part.repeats)
