"""The capabilities of the kernels of a paged cache: one table for the choice, the errors and the docs.

This module imports neither jax nor numpy, so configs are checked against the same table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from megajax.kernels.attention.capability import AMPERE, DeviceRange, KernelChoice, Support, pick
from megajax.kernels.attention.request import KernelDevice

type PagedKernel = Literal["auto", "triton", "tiled", "fixed", "reference"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedRequest:
    """The attention to compute. None: unknown yet, not checked."""

    dtype: str | None = None
    """Dtype of queries."""
    stored: str | None = None
    """Dtype of the pool."""
    key_dim: int | None = None
    """Size of a key head in the pool."""
    value_dim: int | None = None
    bias: bool = False
    """Bias of the scores."""


class PagedHeads(NamedTuple):
    """The head sizes of a kernel."""

    multiple: int
    """Sizes of values, of keys, and of the part of keys after the values in them must be multiples of this."""
    largest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedBackend(Support):
    """The requests that a kernel of a paged cache supports. All support windows, chunks, sinks, soft caps,
    grouped and several queries."""

    stored: Mapping[str, DeviceRange] | None = None
    """Dtypes of pools other than the queries' dtype, with their devices; None: any dtype on any device."""
    heads: PagedHeads | None = None
    """None: any."""
    bias: bool = False

    def refusal(self, request: PagedRequest, device: KernelDevice | None = None) -> str | None:
        """Why the request is not supported, to follow `label`; None if it is. No device: on any NVIDIA GPU."""
        if reason := self.base_refusal(request.dtype, device):
            return reason
        if request.bias and not self.bias:
            return "has no bias of scores"
        return self._stored_refusal(request, device) or self._head_refusal(request)

    def _stored_refusal(self, request: PagedRequest, device: KernelDevice | None) -> str | None:
        stored = request.stored
        if stored is None or self.stored is None or stored in (self.dtypes or ()):
            return None
        if stored not in self.stored:
            return f"reads a cache in {', '.join((*(self.dtypes or ()), *self.stored))}, not in {stored}"
        reason = device and self.stored[stored].refusal(device)
        return f"reads a cache in {stored} {reason}" if reason else None

    def _head_refusal(self, request: PagedRequest) -> str | None:
        key, value = request.key_dim, request.value_dim
        if self.heads is None or key is None or value is None:
            return None
        sizes = f"{key}" if key == value else f"{key} with values of {value}"
        if key % self.heads.multiple or value % self.heads.multiple:
            return f"takes heads of a multiple of {self.heads.multiple}, not of {sizes}"
        return f"takes heads up to {self.heads.largest}, not of {sizes}" if key > self.heads.largest else None


PAGED_BACKENDS: Mapping[PagedKernel, PagedBackend] = MappingProxyType(
    {
        "triton": PagedBackend(
            label="the Triton kernel of a paged cache",
            dtypes=("bfloat16", "float16"),
            devices=DeviceRange(AMPERE, ()),
            # Triton converts float8_e4m3fn from compute capability 8.9 on.
            stored={"int8": DeviceRange(AMPERE, ()), "float8_e4m3fn": DeviceRange((8, 9), ())},
            heads=PagedHeads(multiple=16, largest=576),
        ),
        "tiled": PagedBackend(label="the tiled loop", bias=True),
        "fixed": PagedBackend(label="the tiled loop of training", bias=True),
        "reference": PagedBackend(label="the reference", bias=True),
    }
)
"""Fastest first. The reference gathers whole rows, to compare others with."""


def choose_paged(
    kernel: PagedKernel, requests: Sequence[PagedRequest], device: KernelDevice | None, setting: str = "kernel"
) -> KernelChoice[PagedKernel]:
    """One kernel for all these layers on this device: the named one, or for `auto` the fastest that supports them.

    Raises UserError if the named kernel does not support one of them. setting: its name in messages.
    """

    def refusal(backend: PagedBackend) -> str | None:
        return next((reason for request in requests if (reason := backend.refusal(request, device))), None)

    return pick(kernel, PAGED_BACKENDS, refusal, setting)
