"""The attention that a backend is asked to compute, and the device that it is to run on; imports no jax."""

from dataclasses import dataclass
from typing import Literal

from megajax.mesh.config import UNSHARDED, ContextSharding
from megajax.processes.known_fault import Version

type Kernel = Literal["auto", "reference", "fixed", "blocks", "cudnn", "cudnn_mask", "pallas"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRequest:
    """The attention to compute. None: unknown yet, not checked."""

    dtype: str | None = None
    """Dtype of queries, keys and values."""
    key_dim: int | None = None
    """Size of a query or key head."""
    value_dim: int | None = None
    """Size of a value head."""
    length: int | None = None
    """Positions in a row."""
    key_length: int | None = None
    """Positions in a row of the other sequence that keys and values come from."""
    causal: bool = True
    cross: bool = False
    """Keys and values come from another sequence than queries."""
    window: int | None = None
    """Number of keys before its own position that a query sees."""
    documents: bool = False
    """Rows hold several documents, which must not attend to each other."""
    padded: bool = False
    """Rows hold one text, followed by padding."""
    sink: bool = False
    bias: bool = False
    """Differentiable bias of the scores."""
    cap: bool = False
    """Soft cap of the scores."""
    dropout: float = 0.0
    """Dropout rate of attention weights."""
    sharding: ContextSharding = UNSHARDED
    """How rows are sharded over devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelDevice:
    """The properties of a device that backends depend on."""

    name: str
    """Name according to the driver."""
    capability: Version | None = None
    """Compute capability of an NVIDIA GPU, (9, 0) for an H100; None: not an NVIDIA GPU."""
    cudnn: Version | None = None
    """Installed version of cuDNN; None: not installed."""
