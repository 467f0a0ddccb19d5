"""Settings of batch and evaluation, without importing jax."""

from dataclasses import dataclass
from typing import Literal

from megajax.config.errors import Problem
from megajax.config.nearest import nearest_divisors


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """How many rows make a step, and how many of them a device works on at once."""

    global_size: int = 8
    """Rows per step, over all devices."""
    micro_size: int = 1
    """Rows of a microbatch on each data-parallel device; microbatches of a step follow one another."""
    loss_average: Literal["tokens", "microbatches"] = "tokens"
    """tokens: every counted token weighs the same; microbatches: the mean over microbatches of their mean losses, as
    Megatron-LM does without --calculate-per-token-loss. The reported loss is the tokens' mean either way."""

    def problems(self) -> list[Problem]:
        found = [
            Problem(name, f"must be at least 1, got {getattr(self, name)}")
            for name in ("global_size", "micro_size")
            if getattr(self, name) < 1
        ]
        if not found and self.global_size % self.micro_size:
            legal = ", ".join(str(n) for n in nearest_divisors(self.global_size, self.micro_size))
            what = f"micro_size={self.micro_size} does not divide global_size={self.global_size}"
            found.append(Problem("micro_size", what, f"nearest divisors: {legal}"))
        return found

    def microbatches(self, replicas: int) -> int:
        """Microbatches of a step on `replicas` data-parallel devices."""
        return self.global_size // (self.micro_size * replicas)

    def replica_problems(self, replicas: int) -> list[Problem]:
        """What is wrong with these sizes on `replicas` data-parallel devices."""
        unit = self.micro_size * replicas
        if self.global_size < 1 or unit < 1 or self.global_size % unit == 0:
            return []
        below = self.global_size // unit * unit
        near = [str(n) for n in (below, below + unit) if n > 0]
        return [
            Problem(
                "global_size",
                f"{self.global_size} rows are not divisible by micro_size={self.micro_size} x "
                f"{replicas} data-parallel devices = {unit}",
                f"nearest legal values: {', '.join(near)}",
            )
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """Loss on rows the model is not trained on."""

    every: int | None = None
    """Steps between evaluations on the validation split; none: only at the end."""
    batches: int = 10
    """Global batches of each evaluation."""
    at_end: bool = True
    """Evaluate on the validation and test splits when training ends."""

    def problems(self) -> list[Problem]:
        found = []
        if self.every is not None and self.every < 1:
            found.append(
                Problem("every", f"must be at least 1, got {self.every}", "every=none evaluates at the end only")
            )
        if self.batches < 0:
            found.append(Problem("batches", f"must not be negative, got {self.batches}"))
        return found
