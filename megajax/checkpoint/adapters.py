"""Low-rank adapters as arrays: a model's weights with those of its adapters added."""

import numpy as np

from megajax.layers.param import ParamSpec

LORA_A, LORA_B = ".lora_a", ".lora_b"
"""What the paths of an adapter's matrices have beyond that of the matrix that they adapt."""


def added(w: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float, leading: int) -> np.ndarray:
    """w + scale * a b in float32, in w's dtype.

    w: [..., inputs, outputs]; a: [..., inputs, rank]; b: [..., rank, outputs]; leading: number of dimensions of layers
    and experts, the first ones. Inputs and outputs may be several dimensions each.
    """
    lead, rank = w.shape[:leading], a.shape[-1]
    product = np.matmul(
        a.reshape(*lead, -1, rank).astype(np.float32), b.reshape(*lead, rank, -1).astype(np.float32), dtype=np.float32
    )
    return (w.astype(np.float32) + np.float32(scale) * product.reshape(w.shape)).astype(w.dtype)


def leading(spec: ParamSpec) -> int:
    """Number of the first dimensions of a weight that are of layers and experts."""
    return sum(name in ("layer", "expert") for name in spec.axes)
