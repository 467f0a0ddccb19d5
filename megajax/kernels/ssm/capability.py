"""The capabilities of the kernels of the gated delta rule: one table for the choice, the errors and the docs.

This module imports neither jax nor numpy, so configs are checked against the same table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from megajax.kernels.attention.capability import AMPERE, BLACKWELL, Choice, Device, DeviceRange, Support, pick

type DeltaKernel = Literal["auto", "chunks", "triton"]


class DeltaSizes(NamedTuple):
    """Sizes of a gated delta net."""

    keys: int
    """Size of a key head."""
    values: int
    """Size of a value head."""
    chunk: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaBackend(Support):
    """The dtypes, devices and sizes that a kernel supports. All take rows of any length, documents, and states."""

    keys: tuple[int, ...] = ()
    """Sizes of key heads; (): any."""
    multiple: int = 1
    """Sizes of value heads must be multiples of this."""
    chunks: tuple[int, ...] = ()
    """Positions of a chunk; (): any."""

    def refusal(
        self, dtype: str | None = None, device: Device | None = None, sizes: DeltaSizes | None = None
    ) -> str | None:
        """Why the arguments are not supported, to follow `label`; None if they are. None arguments are not checked."""
        return self.base_refusal(dtype, device) or (sizes and self._size_refusal(sizes))

    def _size_refusal(self, sizes: DeltaSizes) -> str | None:
        for what, legal, size in (
            ("key heads", self.keys, sizes.keys),
            ("chunks", self.chunks, sizes.chunk),
        ):
            if legal and size not in legal:
                return f"takes {what} of {', '.join(map(str, legal))}, not of {size}"
        if sizes.values % self.multiple:
            return f"takes value heads of a multiple of {self.multiple}, not of {sizes.values}"
        return None


DELTA_BACKENDS: Mapping[DeltaKernel, DeltaBackend] = MappingProxyType(
    {
        "triton": DeltaBackend(
            label="the Triton kernel of the delta rule",
            dtypes=("bfloat16", "float16"),
            # On Blackwell they need more tensor memory than there is: 576 to 1696 columns of 512.
            devices=DeviceRange(AMPERE, (), below=BLACKWELL),
            keys=(16, 32, 64, 128, 256),
            multiple=16,
            chunks=(16, 32, 64),
        ),
        "chunks": DeltaBackend(label="the form by chunks"),
    }
)
"""Fastest first."""


def choose_delta(
    kernel: DeltaKernel,
    dtype: str | None,
    device: Device | None,
    sizes: DeltaSizes,
    setting: str = "kernel",
) -> Choice[DeltaKernel]:
    """The kernel for inputs of this dtype on this device: the named one, or for `auto` the fastest supported one.

    device: None for any NVIDIA GPU. setting: its name in messages.
    Raises UserError if the named kernel does not support them.
    """
    return pick(kernel, DELTA_BACKENDS, lambda backend: backend.refusal(dtype, device, sizes), setting)
