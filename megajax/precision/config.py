"""Dtypes of a run, without importing jax."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """Softmax, norms and loss are float32 whatever is said here."""

    compute: Literal["float32", "bfloat16"] = "bfloat16"
    """Activations, and weights while they are used."""
    params: Literal["float32"] = "float32"
    """Master weights."""
    gradients: Literal["float32"] = "float32"
    """Accumulation over microbatches, reduction over devices, optimizer."""

    def matmul_precision(self) -> str | None:
        """jax_default_matmul_precision of the run: float32 means float32, not TF32."""
        return "highest" if self.compute == "float32" else None
