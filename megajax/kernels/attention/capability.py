"""The capabilities of the attention backends: one table for the choice, the errors, the banner and the docs.

This module imports neither jax nor numpy, so configs are checked against the same table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from megajax.config.errors import UserError
from megajax.config.hints import divisors_of
from megajax.kernels.attention.faults import BLACKWELL, HOPPER, KernelFault, faults_of
from megajax.kernels.attention.request import Kernel, KernelDevice, KernelRequest
from megajax.processes.known_fault import Version, dotted


def exchange_sizes(heads: int, kv_heads: int) -> list[int]:
    """Numbers of devices that can exchange this many query and key-value heads per device for positions."""
    return [n for n in divisors_of(heads) if kv_heads % n == 0 or n % kv_heads == 0]


class DeviceRange(NamedTuple):
    """The NVIDIA GPUs that support a feature."""

    capability: Version
    """Lowest compute capability."""
    cudnn: Version
    """Lowest version of cuDNN."""
    below: Version = (100,)
    """First compute capability without support."""

    def refusal(self, device: KernelDevice) -> str | None:
        """Why this NVIDIA GPU is not supported; None if it is."""
        actual = device.capability or ()
        if actual < self.capability:
            return f"from compute capability {dotted(self.capability)} on, {device.name} has {dotted(actual)}"
        if actual >= self.below:
            return f"below compute capability {dotted(self.below)}, {device.name} has {dotted(actual)}"
        if self.cudnn and (device.cudnn is None or device.cudnn < self.cudnn):
            installed = "none was found" if device.cudnn is None else f"here is {dotted(device.cudnn)}"
            return f"from cuDNN {dotted(self.cudnn)} on, {installed}"
        return None


class Heads(NamedTuple):
    """The largest head sizes on these devices."""

    key_dim: int
    value_dim: int
    devices: DeviceRange


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """The dtypes and devices that a kernel supports: the common part of every table of capabilities."""

    label: str
    """Name in messages."""
    dtypes: tuple[str, ...] | None = None
    """Dtypes of activations; None: any."""
    devices: DeviceRange | None = None
    """NVIDIA GPUs that it supports; None: any device."""

    def base_refusal(self, dtype: str | None, device: KernelDevice | None) -> str | None:
        """Why the dtype or the device is not supported, to follow `label`; None if supported or unknown."""
        if device is not None and self.devices is not None:
            if device.capability is None:
                return f"needs an NVIDIA GPU, jax found {device.name}"
            if reason := self.devices.refusal(device):
                return f"runs {reason}"
        if self.dtypes is not None and dtype is not None and dtype not in self.dtypes:
            return f"computes in {' or '.join(self.dtypes)}, not in {dtype}"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend(Support):
    """What an attention backend supports. All support grouped queries and return a log-sum-exp."""

    heads: tuple[Heads, ...] = ()
    """Supported head sizes; (): any."""
    multiple: int = 1
    """Head sizes must be multiples of this."""
    even: bool = False
    """Rows must have an even length."""
    documents: DeviceRange | None = None
    """Devices on which it isolates documents; None: it never does."""
    documents_of_one_size: bool = False
    """With documents, the smaller of key and value heads are zero-padded to the size of the larger."""
    bidirectional_window: bool = False
    """Whether a window works without a causal mask."""
    bias: bool = False
    cap: bool = False
    dropout: bool = False
    documents_of_two: bool = False
    """Whether it isolates documents if queries and keys come from two sequences."""
    faults: tuple[KernelFault, ...] = ()
    """Reported faults, see KERNEL_FAULTS."""
    positions: Literal["any", "chunks", "whole rows"] = "whole rows"
    """Supported shards of rows. any: queries and keys at any positions; chunks: a chunk of queries with its own
    keys and those before it (kernels/context/gathered.py); whole rows: no shards."""

    def refusal(self, request: KernelRequest, device: KernelDevice | None = None) -> str | None:
        """Why the request is not supported, to follow `label`; None if it is. device: None for any NVIDIA GPU."""
        return (
            self.base_refusal(request.dtype, device)
            or self._shape_refusal(request)
            or self._sharding_refusal(request)
            or self._head_refusal(request, device)
            or self._feature_refusal(request, device)
            or self._known_fault(request, device)
        )

    def _known_fault(self, request: KernelRequest, device: KernelDevice | None) -> str | None:
        texts = () if device is None else (fault.refusal(request, device) for fault in self.faults)
        return next((text for text in texts if text), None)

    def _shape_refusal(self, request: KernelRequest) -> str | None:
        for length in (request.length, request.key_length):
            if self.even and length is not None and length % 2:
                return f"takes rows of even length, not of {length}"
        if request.window is not None and not request.causal and not self.bidirectional_window:
            return f"has windows in causal attention only, and window={request.window}"
        return None

    def _sharding_refusal(self, request: KernelRequest) -> str | None:
        """Why the sharding of rows over `parallel.context` is not supported."""
        sharding = request.sharding
        between = sharding.between()
        if between is None or self.positions == "any":
            return None
        over = f"over parallel.context={sharding.devices} with parallel.context_strategy={sharding.strategy}"
        if self.positions == "whole rows":
            return f"takes whole rows, and has parts of them {over}"
        if request.window is not None:
            return f"has no windows in parts of rows, and window={request.window} {over}"
        if request.documents and not request.causal:
            return f"isolates documents in parts of rows of causal attention only, and attention is not causal {over}"
        if between == "ring" and request.documents:
            return f"isolates no documents {over}"
        if between == "ring" and request.causal and (request.padded or sharding.chunks != 2):
            rows = "rows are padded" if request.padded else f"a device has chunks={sharding.chunks} of a row"
            return f"takes in a causal ring two chunks a device without padding, and {rows} {over}"
        size = None if request.length is None else request.length // (sharding.devices * sharding.chunks)
        if self.even and size is not None and size % 2:
            return f"takes chunks of even length, not of {size} {over}"
        return None

    def _head_refusal(self, request: KernelRequest, device: KernelDevice | None) -> str | None:
        key = request.key_dim
        value = key if request.value_dim is None else request.value_dim
        if key is None or value is None or not self.heads:
            return None
        if request.documents and self.documents_of_one_size:
            key = value = max(key, value)
        sizes = f"{key}" if key == value else f"{key} with values of {value}"
        if key % self.multiple or value % self.multiple:
            return f"takes heads of a multiple of {self.multiple}, not of {sizes}"
        large_enough = [heads for heads in self.heads if key <= heads.key_dim and value <= heads.value_dim]
        if not large_enough:
            largest = max(heads.key_dim for heads in self.heads)
            return f"takes heads up to {largest}, not of {sizes}"
        reasons = ["" if device is None else heads.devices.refusal(device) or "" for heads in large_enough]
        if not all(reasons):
            return None
        # A newer cuDNN is easier to get than another GPU, so that reason comes first.
        return f"takes heads of {sizes} {min(reasons, key=lambda text: not text.startswith('from cuDNN'))}"

    def _feature_refusal(self, request: KernelRequest, device: KernelDevice | None) -> str | None:
        if request.cross and request.documents and not self.documents_of_two:
            return "does not isolate documents between two sequences"
        if request.bias and not self.bias:
            return "has no bias of scores"
        if request.cap and not self.cap:
            return "has no soft cap of scores"
        if request.dropout and not self.dropout:
            return f"has no dropout of attention weights that is the same on every layout, which is {request.dropout:g}"
        if request.documents and self.documents is None:
            return "does not isolate documents"
        reason = self.documents.refusal(device) if request.documents and self.documents and device else None
        return f"isolates documents {reason}" if reason else None


AMPERE = (8, 0)


_CUDNN = Backend(
    label="cuDNN's attention",
    dtypes=("bfloat16", "float16"),
    devices=DeviceRange(AMPERE, (9, 2)),
    multiple=8,
    even=True,
    heads=(
        Heads(128, 128, DeviceRange(AMPERE, (9, 2))),
        Heads(256, 256, DeviceRange(HOPPER, (9, 10), below=BLACKWELL)),
        Heads(192, 128, DeviceRange(BLACKWELL, (9, 11), below=(11,))),
    ),
)

BACKENDS: Mapping[Kernel, Backend] = MappingProxyType(
    {
        "cudnn": replace(
            _CUDNN,
            documents=DeviceRange(HOPPER, (9, 6), below=(11,)),
            documents_of_one_size=True,
            positions="chunks",
            faults=faults_of("cudnn"),
        ),
        "pallas": Backend(
            label="the Pallas kernel",
            dtypes=("bfloat16", "float16"),
            devices=DeviceRange(AMPERE, ()),
            multiple=16,
            heads=(Heads(256, 256, DeviceRange(AMPERE, ())),),
            documents=DeviceRange(AMPERE, ()),
            documents_of_two=True,
            positions="any",
            bidirectional_window=True,
            cap=True,
        ),
        "cudnn_mask": replace(
            _CUDNN,
            label="cuDNN's attention with a mask",
            documents=DeviceRange(AMPERE, (9, 2)),
            faults=faults_of("cudnn_mask"),
        ),
        "reference": Backend(
            label="the reference",
            documents=DeviceRange((), ()),
            bidirectional_window=True,
            bias=True,
            cap=True,
            dropout=True,
            documents_of_two=True,
            positions="any",
        ),
        "fixed": Backend(
            label="attention in fixed tiles",
            documents=DeviceRange((), ()),
            bidirectional_window=True,
            cap=True,
            documents_of_two=True,
        ),
        "blocks": Backend(
            label="attention in blocks",
            documents=DeviceRange((), ()),
            bidirectional_window=True,
            cap=True,
            dropout=True,
            documents_of_two=True,
            positions="any",
        ),
    }
)
"""Fastest first, but for RANKS; `fixed`, for the order of its sums, and `blocks`, for CPUs, are chosen by name only.

Sizes and versions follow cuDNN's release notes and the checks of jax 0.12."""
FUSED = tuple(name for name in BACKENDS if name not in ("reference", "fixed"))
"""Backends that do not store the scores; `fixed` does in the backward pass."""


class KernelChoice[K: str](NamedTuple):
    """A backend, and why the faster ones were not chosen. K: the type of its name, `Kernel` for attention."""

    kernel: K
    reasons: tuple[str, ...] = ()
    """Faster backends and the reason, such as "cudnn, pallas: takes heads up to 256, not of 512"."""
    place: str = ""
    """The kind of attention, if the model has several kinds; or the kind of layer that is not attention."""

    @property
    def layer(self) -> str:
        """The kind of layer that the kernel computes."""
        return self.place if self.place and not self.place.endswith("attention") else "attention"


def pick[K: str, B: Support](
    kernel: K, kernels: Mapping[K, B], refusal: Callable[[B], str | None], setting: str
) -> KernelChoice[K]:
    """The named kernel, or for `auto` the first kernel of the table that is not refused; the last one never is.

    refusal: why a kernel is not supported, to follow its label. Raises UserError if the named one is refused.
    """
    reasons: dict[str, list[str]] = {}
    for name, support in kernels.items():
        refused = refusal(support)
        if refused is None:
            break
        reasons.setdefault(refused, []).append(name)
    else:
        raise AssertionError("the last kernel supports every request")
    if kernel == "auto":
        return KernelChoice(name, tuple(f"{', '.join(names)}: {reason}" for reason, names in reasons.items()))
    refused = refusal(kernels[kernel])
    if refused is None:
        return KernelChoice(kernel)
    raise UserError(f"{setting}={kernel}: {kernels[kernel].label} {refused}. Set {setting}={name} or auto.")


class BackendOrder(NamedTuple):
    """The order in which `auto` tries backends on a range of NVIDIA GPUs."""

    capability: tuple[Version, Version]
    """First compute capability, and the first one after it that is not meant."""
    first: tuple[Kernel, ...]
    """The backends before those of BACKENDS."""
    why: str


_MEASURED = "https://github.com/huggingface/transformers/pull/48163, forward and backward beside FlashAttention 2"
RANKS = (
    BackendOrder(((8, 0), (8, 9)), ("pallas",), f"cuDNN is slower on A100 (0.82) and A10G (0.93): {_MEASURED}"),
    BackendOrder(((12, 0), (13,)), ("pallas",), f"cuDNN is slower on RTX PRO 6000 (0.88): {_MEASURED}"),
)
"""Orders other than that of BACKENDS, which has cuDNN first: 1.7 to 2.3 times as fast on Hopper, as fast on Ada (8.9).

FlashAttention 2 is not our Pallas kernel, but the same algorithm: on an RTX 3090, jax's own had 0.83 to 0.96 of its
speed forward (https://github.com/nshepperd/flash_attn_jax/issues/5). The part kernels_attention of gpu_check times
both, and decides."""


def in_order(device: KernelDevice | None) -> Mapping[Kernel, Backend]:
    """BACKENDS in the order in which `auto` tries them on a device."""
    capability = None if device is None else device.capability
    first = (rank.first for rank in RANKS if capability and rank.capability[0] <= capability < rank.capability[1])
    return {name: BACKENDS[name] for name in (*next(first, ()), *BACKENDS)}


def choose(
    kernel: Kernel, request: KernelRequest, device: KernelDevice | None, setting: str = "kernel"
) -> KernelChoice[Kernel]:
    """The backend for this request on this device: `kernel` itself, or for `auto` the fastest that supports it.

    Raises UserError if the named backend does not support the request. setting: its name in messages.
    """
    return pick(kernel, in_order(device), lambda backend: backend.refusal(request, device), setting)
