"""Stacks of several patterns; importing this imports neither jax nor flax."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

from megajax.config.builds import Builds
from megajax.config.errors import Problem
from megajax.layers.config.block import AnyBlockConfig, StackConfig, period, table_problems, table_weights
from megajax.layers.facts import Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentsConfig(Builds):
    """Stacks one after another, each scanned: hybrids whose layers are not one repeated pattern.

    Layers are numbered through all segments. A pipeline is refused: all its stages run the same program, so they need
    the same blocks in the same order.
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
        numbers = [blocks.index(block) for block in blocks]
        best: list[tuple[int, tuple[StackConfig, ...]]] = [(0, ())]
        for end in range(1, len(blocks) + 1):
            options = []
            for start in range(end):
                length = period(numbers[start:end])
                last = StackConfig(pattern=tuple(blocks[start : start + length]), repeats=(end - start) // length)
                options.append((best[start][0] + length, (*best[start][1], last)))
            best.append(min(options, key=lambda option: (option[0], len(option[1]))))
        return cls(segments=best[-1][1])

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
