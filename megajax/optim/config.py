"""Settings of the optimizer and the learning-rate schedule, without importing jax."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal

from megajax.config.builds import Builds
from megajax.config.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWConfig(Builds):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    target: ClassVar[str] = "megajax.optim.optimizer:AdamW"
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Share of a weight taken off per step and unit of learning rate; biases and norm gains are not decayed."""
    clip: float | None = 1.0
    """Largest global gradient norm, gradients are scaled down to it; none: no limit."""

    def problems(self) -> list[Problem]:
        found = []
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                found.append(Problem(name, f"must be at least 0 and below 1, got {getattr(self, name)}"))
        if self.clip is not None and not 0 < self.clip < inf:
            found.append(Problem("clip", f"must be a number above 0, got {self.clip}", "clip=none turns clipping off"))
        if not self.epsilon > 0:
            found.append(
                Problem("epsilon", f"must be above 0, got {self.epsilon}", "a weight without gradient divides by it")
            )
        if not 0 <= self.weight_decay < inf:
            found.append(Problem("weight_decay", f"must be a number from 0 up, got {self.weight_decay}"))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig(Builds):
    """Learning rate over the run. Everything is counted in samples (rows); steps are converted by the batch size.

    The first update uses the rate at 0 samples: with a warm-up, warmup_start.
    """

    target: ClassVar[str] = "megajax.optim.schedule:Schedule"
    lr: float = 3e-4
    """Highest learning rate."""
    min_lr: float = 0.0
    """Rate at the end of the decay, and after it."""
    style: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the decay from lr to min_lr; constant never decays."""
    warmup_steps: int | None = None
    """Steps from warmup_start to lr; give at most one of the three warm-ups."""
    warmup_samples: int | None = None
    """The same in samples."""
    warmup_fraction: float | None = None
    """The same as a share of the decay."""
    warmup_start: float = 0.0
    """Learning rate of the first update, when there is a warm-up."""
    decay_steps: int | None = None
    """Steps until min_lr, warm-up included; none: the whole run."""
    decay_samples: int | None = None
    """The same in samples."""

    def problems(self) -> list[Problem]:
        found = []
        warmups = [n for n in ("warmup_steps", "warmup_samples", "warmup_fraction") if getattr(self, n) is not None]
        if len(warmups) > 1:
            found.append(Problem(warmups[1], f"{' and '.join(warmups)} are both given", "give one of them"))
        if self.decay_steps is not None and self.decay_samples is not None:
            found.append(Problem("decay_samples", "decay_steps and decay_samples are both given", "give one of them"))
        if self.min_lr > self.lr:
            found.append(Problem("min_lr", f"min_lr={self.min_lr} is above lr={self.lr}"))
        for name in ("lr", "min_lr", "warmup_start", "warmup_steps", "warmup_samples"):
            if not 0 <= (getattr(self, name) or 0) < inf:
                found.append(Problem(name, f"must be a number from 0 up, got {getattr(self, name)}"))
        if self.warmup_fraction is not None and not 0 <= self.warmup_fraction <= 1:
            found.append(Problem("warmup_fraction", f"must be between 0 and 1, got {self.warmup_fraction}"))
        return found

    def decay(self, *, steps: int, global_size: int) -> int:
        """Samples until min_lr."""
        if self.decay_samples is not None:
            return self.decay_samples
        return (steps if self.decay_steps is None else self.decay_steps) * global_size

    def warmup(self, *, steps: int, global_size: int) -> float:
        """Samples of warm-up."""
        if self.warmup_fraction is not None:
            return self.warmup_fraction * self.decay(steps=steps, global_size=global_size)
        if self.warmup_samples is not None:
            return self.warmup_samples
        return (self.warmup_steps or 0) * global_size

    def run_problems(self, *, steps: int, global_size: int) -> list[Problem]:
        """What is wrong with the schedule for a run of that length."""
        warmup, decay = (f(steps=steps, global_size=global_size) for f in (self.warmup, self.decay))
        if self.style != "constant" and warmup >= decay and warmup > 0:
            return [
                Problem(
                    "decay_steps",
                    f"the decay ends after {decay} samples, the warm-up after {warmup:g}",
                    "make the warm-up shorter or the decay longer",
                )
            ]
        return []
