"""The capabilities of the kernels of the grouped matmul: one table for the choice, the errors and the docs.

This module imports neither jax nor numpy, so configs are checked against the same table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from megajax.kernels.attention.capability import BLACKWELL, HOPPER, DeviceRange, KernelChoice, Support, pick
from megajax.kernels.attention.request import KernelDevice

type GroupedKernel = Literal["auto", "reference", "mosaic"]
type CodesKernel = Literal["codes", "blackwell_block_scaled"]


class GroupedSizes(NamedTuple):
    """Sizes of a grouped matmul of x [rows, inner] and w [groups, inner, outer]."""

    rows: int
    groups: int
    inner: int
    outer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedBackend(Support):
    """The dtypes, devices and sizes that a kernel of the grouped matmul supports."""

    rows: int = 1
    """The number of rows must be a multiple of this."""
    least: int = 1
    """Minimum number of rows."""
    sides: int = 1
    """Both sides of the matrices must be multiples of this."""

    def refusal(
        self, dtype: str | None = None, device: KernelDevice | None = None, sizes: GroupedSizes | None = None
    ) -> str | None:
        """Why the arguments are not supported, to follow `label`; None if they are. None arguments are not checked."""
        return self.base_refusal(dtype, device) or (sizes and self._size_refusal(sizes))

    def _size_refusal(self, sizes: GroupedSizes) -> str | None:
        if sizes.rows % self.rows or sizes.rows < self.least:
            return f"takes a multiple of {self.rows} rows, {self.least} at least, not {sizes.rows}"
        if sizes.inner % self.sides or sizes.outer % self.sides:
            return f"takes matrices with sides of multiples of {self.sides}, not {sizes.inner} x {sizes.outer}"
        return None


GROUPED_BACKENDS: Mapping[GroupedKernel, GroupedBackend] = MappingProxyType(
    {
        "mosaic": GroupedBackend(
            label="the Mosaic kernel",
            dtypes=("bfloat16", "float16"),
            # Only Hopper has the instruction wgmma. For other GPUs the compiler refuses it or ends the process.
            devices=DeviceRange(HOPPER, (), below=BLACKWELL),
            rows=8,
            least=64,
            sides=64,
        ),
        "reference": GroupedBackend(label="the reference"),
    }
)
"""Fastest first."""

CODES: Mapping[CodesKernel, GroupedBackend] = MappingProxyType(
    {
        name: GroupedBackend(label=label, devices=devices, rows=8, least=128, sides=128)
        for name, label, devices in (
            # Blackwell has no wgmma.
            ("codes", "the Mosaic kernel of 8-bit codes", DeviceRange(HOPPER, (), below=BLACKWELL)),
            # GPUs of capability 12 have no tcgen05.
            ("blackwell_block_scaled", "the Mosaic kernel of scaled blocks", DeviceRange(BLACKWELL, (), below=(11, 0))),
        )
    }
)
"""The kernels of codes, by module of `megajax.kernels.grouped`."""


def capable_grouped(kernel: GroupedKernel, dtype: str, sizes: GroupedSizes) -> GroupedKernel:
    """The kernel, or the next fastest one that supports the dtype and the sizes."""
    if kernel == "auto":
        return kernel
    names = [*GROUPED_BACKENDS]
    able = names[names.index(kernel) :]
    return next(name for name in able if GROUPED_BACKENDS[name].refusal(dtype, None, sizes) is None)


def choose_grouped(
    kernel: GroupedKernel,
    dtype: str | None,
    device: KernelDevice | None,
    setting: str = "kernel",
    sizes: GroupedSizes | None = None,
) -> KernelChoice[GroupedKernel]:
    """The kernel for rows of this dtype on this device: the named one, or for `auto` the fastest supported one.

    device: None for any NVIDIA GPU; sizes: None if unknown. setting: its name in messages.
    Raises UserError if the named kernel does not support them.
    """
    return pick(kernel, GROUPED_BACKENDS, lambda backend: backend.refusal(dtype, device, sizes), setting)
