"""A small tree of configs with every kind of field, as the packages of megajax write theirs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megajax.config import Problem
from megajax.config.hints import nearest_divisors


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    heads: int = 12
    """Number of query heads."""
    window: int | None = None
    """How far back a token sees, in tokens; none for all."""

    def problems(self) -> list[Problem]:
        return [Problem("heads", f"must be at least 1, got {self.heads}")] if self.heads < 1 else []


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockConfig:
    attention: AttentionConfig = AttentionConfig()
    """The attention of the block."""
    norm: Literal["rms", "layer"] = "rms"
    """Which norm stands before each half."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaConfig:
    state: int = 64
    """Size of the state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    hidden_size: int
    """Width of the residual stream."""
    pattern: tuple[BlockConfig | MambaConfig, ...] = (BlockConfig(),)
    """The blocks that repeat."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What the model computes in."""

    def problems(self) -> list[Problem]:
        problems = []
        for index, block in enumerate(self.pattern):
            if isinstance(block, BlockConfig) and self.hidden_size % block.attention.heads:
                heads = block.attention.heads
                divisors = ", ".join(map(str, nearest_divisors(self.hidden_size, heads)))
                problems.append(
                    Problem(
                        f"pattern.{index}.attention.heads",
                        f"hidden_size={self.hidden_size} is not divisible by heads={heads}",
                        f"divisors near {heads}: {divisors}",
                    )
                )
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    tensor: int = 1
    """Devices that share each matrix."""
    data: int | None = None
    """Copies of the model; none for what is left."""
    sequence: bool = False
    """Split the residual stream along the sequence."""
    data_sharding: Literal["replicate", "zero1", "fsdp"] = "zero1"
    """What is split over the copies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWConfig:
    lr: float = 3e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonConfig:
    lr: float = 0.02
    """Peak learning rate."""
    momentum: float = 0.95
    """Decay of the momentum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    window: int = 100
    """Steps looked back on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    paths: tuple[str, ...] = ()
    """The files."""
    blend: Mapping[str, float] = field(default_factory=dict)
    """File -> weight."""
    parts: Mapping[str, GuardConfig] = field(default_factory=dict)
    """Named parts."""
    limit: int | float | str | None = None
    """A union of scalars."""
    ramp: tuple[tuple[int, int], ...] = ()
    """(samples, batch size) pairs."""
    cache: Path | None = None
    """Folder of the index caches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A tiny run."""

    model: ModelConfig
    """The model."""
    parallel: ParallelConfig = ParallelConfig()
    """How the devices are used."""
    optimizer: AdamWConfig | MuonConfig = AdamWConfig()
    """Which optimizer, and its settings."""
    guard: GuardConfig | None = None
    """Watches the loss; none for no watch."""
    data: DataConfig = field(default_factory=DataConfig)
    """What is read."""
    steps: int = 1000
    """Optimizer steps in all."""
    seed: int = 0
    """Seed of all random numbers."""
    run_dir: str | None = None
    """Folder of the run."""

    def problems(self, devices: int | None) -> list[Problem]:
        if devices is not None and devices % self.parallel.tensor:
            return [Problem("parallel.tensor", f"{self.parallel.tensor} does not divide {devices} devices")]
        return []
