"""Faults of cuDNN that others reported and that our calls can meet: `auto` leaves such kernels out. Imports no jax."""

from collections.abc import Callable
from dataclasses import dataclass

from megajax.kernels.attention.request import Kernel, KernelDevice, KernelRequest
from megajax.processes.known_fault import KnownFault, Version, VersionRange, dotted

HOPPER, BLACKWELL = (9, 0), (10, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFault(KnownFault):
    """A reported fault of cuDNN: kernels are refused where it applies. Its effect follows the backend's label."""

    kernels: tuple[Kernel, ...]
    """The backends that call what is at fault."""
    applies: Callable[[KernelRequest], bool]
    """Whether a request meets the fault; false where the needed sizes are unknown."""

    def refusal(self, request: KernelRequest, device: KernelDevice) -> str | None:
        """Effect, affected versions, the version found, report and advice; None if the request does not meet it."""
        (versions,), version = self.versions, device.cudnn
        if version is None or device.capability is None or not self.among(device.capability):
            return None
        if not versions.affected({"cuDNN": version}) or not self.applies(request):
            return None
        state = f"a fault of cuDNN {versions.text()}, here is {dotted(version)}"
        return f"{self.effect} on {device.name}: {state} ({self.report}); {self.cure}"


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


def _cudnn(first: Version = (), fixed: Version | None = None) -> tuple[VersionRange]:
    return (VersionRange(("cuDNN",), first, fixed),)


_NEGATIVE = "gives NaN gradients of queries where all scores of a query are far below 0 (their log-sum-exp below -88)"
_LENGTHS = "set rows of a multiple of 128 tokens"
_UPDATE = "install a newer cuDNN"
KERNEL_FAULTS: tuple[KernelFault, ...] = (
    KernelFault(
        name="documents_in_half_a_tile",
        kernels=("cudnn_mask",),
        effect=f"{_NEGATIVE} and keys are 64 more than a multiple of 128,",
        applies=lambda request: request.documents and _keys(request) % 128 == 64,
        capability=(HOPPER, BLACKWELL),
        # A fix was announced for 9.26 in the second report, whose test fails with 9.30.
        versions=_cudnn(),
        cure=_LENGTHS,
        report="https://github.com/pytorch/pytorch/issues/196678",
    ),
    KernelFault(
        name="half_a_tile",
        kernels=("cudnn", "cudnn_mask"),
        effect=f"{_NEGATIVE} and keys are 64 more than a multiple of 128,",
        applies=_half_a_tile_without_mask,
        capability=(HOPPER, BLACKWELL),
        versions=_cudnn(),
        cure=_LENGTHS,
        report="https://github.com/NVIDIA/cudnn-frontend/pull/628",
    ),
    KernelFault(
        name="keys_out_of_bounds",
        kernels=("cudnn", "cudnn_mask"),
        effect="may access memory out of bounds in CUDA graphs where keys are no multiple of 128",
        applies=lambda request: not request.padded and not request.documents and _keys(request) % 128 != 0,
        versions=_cudnn(fixed=(9, 15, 1)),
        cure=f"{_UPDATE}, or {_LENGTHS}",
        report="https://github.com/NVIDIA/TransformerEngine/pull/2344",
    ),
    KernelFault(
        name="keys_out_of_bounds_of_documents",
        kernels=("cudnn_mask",),
        effect="may access memory out of bounds in CUDA graphs where keys are no multiple of 128",
        applies=lambda request: request.documents and _keys(request) % 128 != 0,
        versions=_cudnn(fixed=(9, 15, 1)),
        cure=f"{_UPDATE}, or {_LENGTHS}",
        report="https://github.com/NVIDIA/TransformerEngine/pull/2344",
    ),
    KernelFault(
        name="window_with_lengths",
        kernels=("cudnn", "cudnn_mask"),
        effect="gives wrong results with a window and lengths of documents or rows, for more than 1024 keys,",
        applies=lambda request: (
            request.window is not None and (request.documents or request.padded) and _keys(request) > 1024
        ),
        versions=_cudnn((9, 14), (9, 14, 1)),
        cure=_UPDATE,
        report="https://github.com/NVIDIA/TransformerEngine/pull/2344",
    ),
    KernelFault(
        name="values_of_another_size",
        kernels=("cudnn", "cudnn_mask"),
        effect="gives wrong gradients for heads from 128 to 256 with values of another size",
        applies=_uneven_heads,
        capability=(HOPPER, BLACKWELL),
        versions=_cudnn((9, 11), (9, 13)),
        cure=_UPDATE,
        report="https://github.com/NVIDIA/cudnn-frontend/pull/166",
    ),
    KernelFault(
        name="cudnn_9_10",
        kernels=("cudnn", "cudnn_mask"),
        effect="is not used by Transformer Engine because of known faults",
        applies=lambda request: True,
        versions=_cudnn((9, 10), (9, 10, 2)),
        cure=_UPDATE,
        report="https://github.com/NVIDIA/TransformerEngine, fused_attn.cpp",
    ),
    KernelFault(
        name="b300",
        kernels=("cudnn", "cudnn_mask"),
        effect="has no kernels in this cuDNN",
        applies=lambda request: True,
        capability=((10, 3), (10, 4)),
        # The version from which jax itself allows it; the reports name none.
        versions=_cudnn(fixed=(9, 11)),
        cure=_UPDATE,
        report="https://github.com/NVIDIA/cudnn-frontend/issues/203",
        symptom=r"no valid execution plans",
    ),
)
"""Reported faults that our calls can meet; docs/attention.md has the others, and what the reports say.

A row may go when `PARTS=layers ONLY=faults benchmarks/gpu_check.sh` does not see its fault on the affected GPUs."""


def faults_of(kernel: Kernel) -> tuple[KernelFault, ...]:
    """The reported faults of a backend."""
    return tuple(fault for fault in KERNEL_FAULTS if kernel in fault.kernels)
