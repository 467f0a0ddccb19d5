"""The capabilities of the attention backends: one table for the choice, the errors, the banner and the docs.

This module imports neither jax nor numpy, so configs are checked against the same table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from megajax.config.errors import UserError
from megajax.config.hints import divisors_of
from megajax.mesh.config import UNSHARDED, ContextSharding

type Version = tuple[int, ...]
type Kernel = Literal["auto", "reference", "fixed", "blocks", "cudnn", "cudnn_mask", "pallas"]


def exchange_sizes(heads: int, kv_heads: int) -> list[int]:
    """Numbers of devices that can exchange this many query and key-value heads per device for positions."""
    return [n for n in divisors_of(heads) if kv_heads % n == 0 or n % kv_heads == 0]


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
            return f"from compute capability {_dotted(self.capability)} on, {device.name} has {_dotted(actual)}"
        if actual >= self.below:
            return f"below compute capability {_dotted(self.below)}, {device.name} has {_dotted(actual)}"
        if self.cudnn and (device.cudnn is None or device.cudnn < self.cudnn):
            installed = "none was found" if device.cudnn is None else f"here is {_dotted(device.cudnn)}"
            return f"from cuDNN {_dotted(self.cudnn)} on, {installed}"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownFault:
    """A fault of cuDNN that was reported: kernels are refused where it applies."""

    kernels: tuple[Kernel, ...]
    """The backends that call what is at fault."""
    effect: str
    """What goes wrong, to follow the backend's label."""
    applies: Callable[[KernelRequest], bool]
    """Whether a request meets the fault; false where the needed sizes are unknown."""
    capability: tuple[Version, Version] = ((), (100,))
    """First affected compute capability, and the first one after it that is not."""
    cudnn: tuple[Version, Version | None]
    """First affected version of cuDNN and first version with a fix; None: no such version is known."""
    change: str
    """What avoids it besides another kernel."""
    report: str
    """Where it is described."""

    def refusal(self, request: KernelRequest, device: KernelDevice) -> str | None:
        """Effect, affected versions, the version found, report and advice; None if the request does not meet it."""
        (oldest, newer), (first, fixed), version = self.capability, self.cudnn, device.cudnn
        if version is None or device.capability is None or not oldest <= device.capability < newer:
            return None
        if version < first or (fixed is not None and version >= fixed) or not self.applies(request):
            return None
        since = f"from {_dotted(first)} on" if first else "of any version"
        until = "without a known fix" if fixed is None else f"fixed in {_dotted(fixed)}"
        versions = f"a fault of cuDNN {since}, {until}, here is {_dotted(version)}"
        return f"{self.effect} on {device.name}: {versions} ({self.report}); {self.change}"


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
    faults: tuple[KnownFault, ...] = ()
    """Reported faults, see KNOWN_FAULTS."""
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


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)


def _keys(request: KernelRequest) -> int:
    """Keys of a whole row; 0: unknown."""
    return (request.key_length if request.cross else None) or request.length or 0


def _half_a_tile_without_mask(request: KernelRequest) -> bool:
    """Calls without a mask or lengths, with 64 keys more than a multiple of 128."""
    if request.padded or request.documents:
        return False
    sharding = request.sharding
    if sharding.between() == "ring":
        # In a ring, causal or not, later parts have no mask.
        part = _keys(request) // sharding.devices
        return any(keys % 128 == 64 for keys in (part, part // sharding.chunks))
    return not request.causal and _keys(request) % 128 == 64


def _uneven_heads(request: KernelRequest) -> bool:
    """Different sizes of keys and values from 128 to 256, other than 192 with 128."""
    key, value = request.key_dim or 0, request.value_dim or request.key_dim or 0
    return not request.documents and min(key, value) >= 128 and key != value and (key, value) != (192, 128)


_NEGATIVE = "gives NaN gradients of queries where all scores of a query are far below 0 (their log-sum-exp below -88)"
_LENGTHS = "set rows of a multiple of 128 tokens"
_UPDATE = "install a newer cuDNN"
KNOWN_FAULTS: tuple[KnownFault, ...] = (
    KnownFault(
        kernels=("cudnn_mask",),
        effect=f"{_NEGATIVE} and keys are 64 more than a multiple of 128,",
        applies=lambda request: request.documents and _keys(request) % 128 == 64,
        capability=(HOPPER, BLACKWELL),
        # A fix was announced for 9.26 in the second report, whose test fails with 9.30.
        cudnn=((), None),
        change=_LENGTHS,
        report="https://github.com/pytorch/pytorch/issues/196678",
    ),
    KnownFault(
        kernels=("cudnn", "cudnn_mask"),
        effect=f"{_NEGATIVE} and keys are 64 more than a multiple of 128,",
        applies=_half_a_tile_without_mask,
        capability=(HOPPER, BLACKWELL),
        cudnn=((), None),
        change=_LENGTHS,
        report="https://github.com/NVIDIA/cudnn-frontend/pull/628",
    ),
    KnownFault(
        kernels=("cudnn", "cudnn_mask"),
        effect="may access memory out of bounds in CUDA graphs where keys are no multiple of 128",
        applies=lambda request: not request.padded and not request.documents and _keys(request) % 128 != 0,
        cudnn=((), (9, 15, 1)),
        change=f"{_UPDATE}, or {_LENGTHS}",
        report="https://github.com/NVIDIA/TransformerEngine/pull/2344",
    ),
    KnownFault(
        kernels=("cudnn_mask",),
        effect="may access memory out of bounds in CUDA graphs where keys are no multiple of 128",
        applies=lambda request: request.documents and _keys(request) % 128 != 0,
        cudnn=((), (9, 15, 1)),
        change=f"{_UPDATE}, or {_LENGTHS}",
        report="https://github.com/NVIDIA/TransformerEngine/pull/2344",
    ),
    KnownFault(
        kernels=("cudnn", "cudnn_mask"),
        effect="gives wrong results with a window and lengths of documents or rows, for more than 1024 keys,",
        applies=lambda request: (
            request.window is not None and (request.documents or request.padded) and _keys(request) > 1024
        ),
        cudnn=((9, 14), (9, 14, 1)),
        change=_UPDATE,
        report="https://github.com/NVIDIA/TransformerEngine/pull/2344",
    ),
    KnownFault(
        kernels=("cudnn", "cudnn_mask"),
        effect="gives wrong gradients for heads from 128 to 256 with values of another size",
        applies=_uneven_heads,
        capability=(HOPPER, BLACKWELL),
        cudnn=((9, 11), (9, 13)),
        change=_UPDATE,
        report="https://github.com/NVIDIA/cudnn-frontend/pull/166",
    ),
    KnownFault(
        kernels=("cudnn", "cudnn_mask"),
        effect="is not used by Transformer Engine because of known faults",
        applies=lambda request: True,
        cudnn=((9, 10), (9, 10, 2)),
        change=_UPDATE,
        report="https://github.com/NVIDIA/TransformerEngine, fused_attn.cpp",
    ),
)
"""Reported faults that our calls can meet; docs/attention.md has the others.

A row may go when `PARTS=layers ONLY=faults benchmarks/gpu_check.sh` does not see its fault on the affected GPUs."""


def faults_of(kernel: Kernel) -> tuple[KnownFault, ...]:
    """The reported faults of a backend."""
    return tuple(fault for fault in KNOWN_FAULTS if kernel in fault.kernels)


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
"""Fastest first; `fixed`, for the order of its sums, and `blocks`, for CPUs, are chosen by name only.

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


def choose(
    kernel: Kernel, request: KernelRequest, device: KernelDevice | None, setting: str = "kernel"
) -> KernelChoice[Kernel]:
    """The backend for this request on this device: `kernel` itself, or for `auto` the fastest that supports it.

    Raises UserError if the named backend does not support the request. setting: its name in messages.
    """
    return pick(kernel, BACKENDS, lambda backend: backend.refusal(request, device), setting)
