"""Configs of stacks: one repeated pattern of blocks, or segments with a pattern each. Imports neither jax nor flax."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import eq
from typing import Annotated, ClassVar

from megajax.config.bounds import NotEmpty, Size
from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.layers.block.config import BlockConfig, shared_bias
from megajax.layers.facts import Weight
from megajax.layers.position.config import RelativeBiasConfig

type Pattern = tuple[int, ...]
"""Blocks by number; equal blocks have the same number."""


@dataclass(frozen=True, kw_only=True)
class StackConfig(Builds):
    """`pattern` is unrolled in Python and scanned over `repeats`: (dense, moe) x 16 is 32 layers.

    Example: `mj.StackConfig(pattern=(mj.BlockConfig(mixer=mj.Mamba2Config(heads=24)),), repeats=24)`
    """

    target: ClassVar[str] = "megajax.layers.stack.stack:Stack"
    pattern: Annotated[tuple[BlockConfig, ...], NotEmpty(problem="needs at least one block")]
    """Blocks that are repeated together."""
    repeats: Size
    """How many times the pattern is applied; layers = len(pattern) * repeats."""

    def problems(self) -> list[Problem]:
        return table_problems("pattern", self.pattern)

    def parts(self) -> tuple["StackConfig", ...]:
        """The segments of the stack: itself."""
        return (self,)

    def with_pattern(self, blocks: Sequence[BlockConfig]) -> "StackConfig":
        """A copy with these blocks as the pattern."""
        return replace(self, pattern=tuple(blocks))

    @classmethod
    def of(cls, blocks: Sequence[BlockConfig]) -> "StackConfig":
        """A stack of these blocks with the shortest repeating pattern."""
        length = period([blocks.index(block) for block in blocks])
        return cls(pattern=tuple(blocks[:length]), repeats=len(blocks) // length)

    def layers(self) -> int:
        """Number of layers."""
        return len(self.pattern) * self.repeats

    def stored(self) -> tuple[tuple[BlockConfig, tuple[int, ...]], ...]:
        """Each block with stacked weights, and the numbers of its layers."""
        size = len(self.pattern)
        return tuple((block, tuple(range(place, self.layers(), size))) for place, block in enumerate(self.pattern))

    def named_blocks(self) -> dict[str, BlockConfig]:
        """Setting -> block, for each block of the config."""
        return {f"pattern.{place}": block for place, block in enumerate(self.pattern)}

    def cut_unit(self) -> int:
        """Layers that stay on one pipeline stage: a repeat of the pattern."""
        return len(self.pattern)

    def sub_layers(self) -> int:
        """Number of sub-layers: outputs that are added to the residual stream."""
        return self.repeats * sum(len(block.parts()) for block in self.pattern)

    def repeated_blocks(self) -> tuple[tuple[BlockConfig, int], ...]:
        """Each block of the config and how often it is applied."""
        return tuple((block, self.repeats) for block in self.pattern)

    def shared_weights(self) -> tuple[Weight, ...]:
        """Weights that all layers of the stack share."""
        return table_weights(self.pattern)


@dataclass(frozen=True, kw_only=True)
class SegmentsConfig(Builds):
    """Consecutive stacks, each scanned: hybrids whose layers are not one repeated pattern.

    Layers are numbered across segments. The weights of equal blocks are stacked together, so the arrays do not depend
    on how layers are divided into segments and pipeline stages.

    Example: `mj.nemotron_h("8b").stack`
    """

    target: ClassVar[str] = "megajax.layers.stack.stack:Stack"
    segments: Annotated[tuple[StackConfig, ...], NotEmpty(problem="needs at least one")]
    """From the first layer to the last."""

    def problems(self) -> list[Problem]:
        return table_problems("segments", self.pattern)

    def parts(self) -> tuple[StackConfig, ...]:
        return self.segments

    def with_pattern(self, blocks: Sequence[BlockConfig]) -> "SegmentsConfig":
        """A copy with these blocks, one per layer. Equal blocks must be replaced by equal blocks."""
        starts = accumulate((part.layers() for part in self.segments), initial=0)
        parts = [
            part.with_pattern(blocks[start : start + len(part.pattern)])
            for start, part in zip(starts, self.segments, strict=False)
        ]
        return replace(self, segments=tuple(parts))

    @property
    def pattern(self) -> tuple[BlockConfig, ...]:
        """The blocks of all layers, as a pattern that occurs once."""
        return tuple(block for part in self.segments for block in part.pattern * part.repeats)

    @property
    def repeats(self) -> int:
        return 1

    @classmethod
    def of(cls, blocks: Sequence[BlockConfig]) -> "SegmentsConfig":
        """Segments of these blocks with the fewest blocks to compile: the smallest total length of patterns."""
        runs = split_patterns([blocks.index(block) for block in blocks])
        stacks = (StackConfig(pattern=tuple(blocks[n] for n in pattern), repeats=repeats) for pattern, repeats in runs)
        return cls(segments=tuple(stacks))

    def stored(self) -> tuple[tuple[BlockConfig, tuple[int, ...]], ...]:
        """Each block with stacked weights, and the numbers of its layers."""
        layers: dict[BlockConfig, list[int]] = {}
        for number, block in enumerate(self.pattern):
            layers.setdefault(block, []).append(number)
        return tuple((block, tuple(numbers)) for block, numbers in layers.items())

    def named_blocks(self) -> dict[str, BlockConfig]:
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

    def repeated_blocks(self) -> tuple[tuple[BlockConfig, int], ...]:
        """Each block of the config and how often it is applied."""
        return tuple(pair for part in self.segments for pair in part.repeated_blocks())

    def shared_weights(self) -> tuple[Weight, ...]:
        """Weights that all layers of the stack share."""
        return table_weights(self.pattern)


def stack_of(blocks: Sequence[BlockConfig]) -> StackConfig | SegmentsConfig:
    """A stack of these layers: one repeated pattern if possible, otherwise segments."""
    single = StackConfig.of(blocks)
    return single if single.repeats > 1 or len(blocks) == 1 else SegmentsConfig.of(blocks)


def blocks_of(stack: StackConfig | SegmentsConfig) -> tuple[BlockConfig, ...]:
    """The block of each layer."""
    return tuple(block for part in stack.parts() for block in part.pattern * part.repeats)


def shared_tables(blocks: Sequence[BlockConfig]) -> set[tuple[int, RelativeBiasConfig]]:
    """Heads and settings of the tables of relative biases that blocks of a stack share."""
    return {shared for block in blocks if (shared := shared_bias(block)) is not None}


def table_problems(setting: str, blocks: Sequence[BlockConfig]) -> list[Problem]:
    """Problems of the tables that blocks of a stack share."""
    message = "blocks that share a table of relative biases differ in its settings or in heads"
    return [Problem(setting, message, "use the same settings")] if len(shared_tables(blocks)) > 1 else []


def table_weights(blocks: Sequence[BlockConfig]) -> tuple[Weight, ...]:
    """The tables that blocks of a stack share."""
    return tuple(
        Weight("relative.table", (bias.buckets, heads), (None, "heads")) for heads, bias in shared_tables(blocks)
    )


def period(numbers: Sequence[int]) -> int:
    """Length of the shortest sequence that gives this one when repeated."""
    count = len(numbers)
    return next(n for n in range(1, count + 1) if count % n == 0 and all(map(eq, numbers, numbers[n:])))


def split_patterns(
    numbers: Sequence[int], patterns: Collection[Pattern] | None = None
) -> tuple[tuple[Pattern, int], ...]:
    """The numbers as (pattern, repeats): the shortest total length of patterns, then the fewest patterns.

    patterns: the allowed ones, which include each number as its own pattern; None: any pattern.
    """
    numbers = tuple(numbers)
    best: list[tuple[int, int, tuple[tuple[Pattern, int], ...]]] = [(0, 0, ())]
    for end in range(1, len(numbers) + 1):
        options = []
        for start in range(end):
            size = period(numbers[start:end])
            pattern = numbers[start : start + size]
            if patterns is None or pattern in patterns:
                cost, count, before = best[start]
                options.append((cost + size, count + 1, (*before, (pattern, (end - start) // size))))
        best.append(min(options, key=lambda option: option[:2]))
    return best[-1][2]
