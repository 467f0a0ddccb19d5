"""What each attention backend can compute, and on which devices: one table for choice, errors, banner and docs.

Importing this imports neither jax nor numpy, so that configs are checked against the same table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from megajax.config.errors import UserError

type Version = tuple[int, ...]
type Kernel = Literal["auto", "reference", "cudnn", "cudnn_mask", "pallas"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """An attention to be computed; None where something is not known yet and so cannot be refused."""

    dtype: str | None = None
    """Of queries, keys and values."""
    key_dim: int | None = None
    """Size of a query or key head."""
    value_dim: int | None = None
    """Size of a value head."""
    length: int | None = None
    """Positions in a row."""
    causal: bool = True
    window: int | None = None
    """Keys a query sees before its own."""
    documents: bool = False
    """Rows hold documents that do not see each other."""
    sink: bool = False
    bias: bool = False
    """Of scores, with a gradient."""
    dropout: float = 0.0
    """Of attention weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What limits depend on."""

    name: str
    """As its driver calls it."""
    capability: Version | None = None
    """Compute capability of an NVIDIA GPU, (9, 0) for an H100; None: not an NVIDIA GPU."""
    cudnn: Version | None = None
    """Version of cuDNN beside it; None: none."""


class Since(NamedTuple):
    """Devices something runs on."""

    capability: Version
    """Lowest compute capability."""
    cudnn: Version
    """Lowest version of cuDNN."""
    below: Version = (100,)
    """Compute capability from which on it does not."""

    def refusal(self, device: Device) -> str | None:
        """Why not on this NVIDIA GPU."""
        have = device.capability or ()
        if have < self.capability:
            return f"from compute capability {_dotted(self.capability)} on, {device.name} has {_dotted(have)}"
        if have >= self.below:
            return f"below compute capability {_dotted(self.below)}, {device.name} has {_dotted(have)}"
        if self.cudnn and (device.cudnn is None or device.cudnn < self.cudnn):
            found = "none was found" if device.cudnn is None else f"here is {_dotted(device.cudnn)}"
            return f"from cuDNN {_dotted(self.cudnn)} on, {found}"
        return None


class Heads(NamedTuple):
    """Sizes of heads up to these, on these devices."""

    key_dim: int
    value_dim: int
    since: Since


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A way to compute attention: what it takes, and where. All take grouped queries and give a log-sum-exp."""

    says: str
    """What messages call it."""
    dtypes: tuple[str, ...] | None = None
    """None: any."""
    since: Since | None = None
    """NVIDIA GPUs it runs on; None: any device."""
    heads: tuple[Heads, ...] = ()
    """Sizes of heads, one of which must do; (): any."""
    multiple: int = 1
    """Sizes of heads are multiples of this."""
    even: bool = False
    """Rows are of even length."""
    documents: Since | None = None
    """Where it isolates documents beside its other needs; None: nowhere."""
    documents_of_one_size: bool = False
    """With documents, the narrower of keys and values get zeros up to the size of the others."""
    both_ways_window: bool = False
    """A window goes with attention that is not causal."""
    bias: bool = False
    dropout: bool = False

    def refusal(self, request: Request, device: Device | None = None) -> str | None:
        """Why this is not to be had, to follow `says`; None where it is. Without a device: on any NVIDIA GPU."""
        if device is not None and self.since is not None:
            if device.capability is None:
                return f"needs an NVIDIA GPU, jax found {device.name}"
            if where := self.since.refusal(device):
                return f"runs {where}"
        return self._shape_refusal(request) or self._head_refusal(request, device) or self._rest(request, device)

    def _shape_refusal(self, request: Request) -> str | None:
        if self.dtypes is not None and request.dtype is not None and request.dtype not in self.dtypes:
            return f"computes in {' or '.join(self.dtypes)}, not in {request.dtype}"
        if self.even and request.length is not None and request.length % 2:
            return f"takes rows of even length, not of {request.length}"
        if request.window is not None and not request.causal and not self.both_ways_window:
            return f"has windows in causal attention only, and window={request.window}"
        return None

    def _head_refusal(self, request: Request, device: Device | None) -> str | None:
        key = request.key_dim
        value = key if request.value_dim is None else request.value_dim
        if key is None or value is None or not self.heads:
            return None
        if request.documents and self.documents_of_one_size:
            key = value = max(key, value)
        sizes = f"{key}" if key == value else f"{key} with values of {value}"
        if key % self.multiple or value % self.multiple:
            return f"takes heads of a multiple of {self.multiple}, not of {sizes}"
        wide = [each for each in self.heads if key <= each.key_dim and value <= each.value_dim]
        if not wide:
            largest = max(each.key_dim for each in self.heads)
            return f"takes heads up to {largest}, not of {sizes}"
        where = ["" if device is None else each.since.refusal(device) or "" for each in wide]
        if not all(where):
            return None
        # A newer cuDNN is nearer than another GPU.
        return f"takes heads of {sizes} {min(where, key=lambda text: not text.startswith('from cuDNN'))}"

    def _rest(self, request: Request, device: Device | None) -> str | None:
        if request.bias and not self.bias:
            return "is given no bias of scores"
        if request.dropout and not self.dropout:
            return f"has no dropout of attention weights that is the same on every layout, which is {request.dropout:g}"
        if request.documents and self.documents is None:
            return "does not isolate documents"
        where = self.documents.refusal(device) if request.documents and self.documents and device else None
        return f"isolates documents {where}" if where else None


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
_CUDNN = Backend(
    says="cuDNN's attention",
    dtypes=("bfloat16", "float16"),
    since=Since(AMPERE, (9, 2)),
    multiple=8,
    even=True,
    heads=(
        Heads(128, 128, Since(AMPERE, (9, 2))),
        Heads(256, 256, Since(HOPPER, (9, 10), below=BLACKWELL)),
        Heads(192, 128, Since(BLACKWELL, (9, 11), below=(11,))),
    ),
)

BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "cudnn": replace(_CUDNN, documents=Since(HOPPER, (9, 6), below=(11,)), documents_of_one_size=True),
        "pallas": Backend(
            says="the Pallas kernel",
            dtypes=("bfloat16", "float16"),
            since=Since(AMPERE, ()),
            multiple=16,
            heads=(Heads(256, 256, Since(AMPERE, ())),),
            documents=Since(AMPERE, ()),
            both_ways_window=True,
        ),
        "cudnn_mask": replace(_CUDNN, says="cuDNN's attention with a mask", documents=Since(AMPERE, (9, 2))),
        "reference": Backend(
            says="the reference", documents=Since((), ()), both_ways_window=True, bias=True, dropout=True
        ),
    }
)
"""Fastest first. Sizes and versions are those of cuDNN's release notes and of the checks of jax 0.12."""


class Choice(NamedTuple):
    """A backend, and why not a faster one."""

    kernel: str
    reasons: tuple[str, ...] = ()
    """Faster backends that can't and what they can't, "cudnn, pallas: takes heads up to 256, not of 512"."""


def choose(kernel: str, request: Request, device: Device | None, where: str = "kernel") -> Choice:
    """What `kernel` means for this request on this device: itself, or for `auto` the fastest that can.

    Raises UserError where it was asked for by name and can't, naming the fastest that can; `where` is the setting.
    """
    if kernel == "auto":
        found = {name: backend.refusal(request, device) for name, backend in BACKENDS.items()}
        able = next(name for name, refusal in found.items() if refusal is None)
        faster = list(BACKENDS)[: list(BACKENDS).index(able)]
        reasons: dict[str, list[str]] = {}
        for name in faster:
            reasons.setdefault(str(found[name]), []).append(name)
        return Choice(able, tuple(f"{', '.join(names)}: {reason}" for reason, names in reasons.items()))
    refusal = BACKENDS[kernel].refusal(request, device)
    if refusal is None:
        return Choice(kernel)
    nearest = choose("auto", request, device).kernel
    raise UserError(f"{where}={kernel}: {BACKENDS[kernel].says} {refusal}. Set {where}={nearest} or auto.")
