"""CPU devices that present themselves as NVIDIA GPUs, so that tests reach the lines a run reaches on GPUs.

What a run reads of a device is taken from here: platform, kind, compute capability, memory, version of the driver's
client. Programs still run on the CPU; there the reference computes what an attention kernel of a GPU is asked for.
"""

import jaxlib
import pytest

from megajax.kernels.attention.attention import PASSES

KIND = "NVIDIA H100 80GB HBM3"
CAPABILITY = "9.0"
CUDNN = 92800
MEMORY = 72 * 2**30


class CudaVersions:
    """A stand-in for jax's module `cuda_versions`."""

    @staticmethod
    def cudnn_get_version() -> int:
        return CUDNN


def memory_stats(device: object) -> dict[str, int]:
    """What a GPU counts; a CPU device counts nothing."""
    del device
    return {"bytes_in_use": 2**20, "peak_bytes_in_use": 2**21, "bytes_limit": MEMORY}


def stand_in(
    patch: pytest.MonkeyPatch, *, platform: str = "gpu", kind: str = KIND, capability: str = CAPABILITY
) -> None:
    """From here on the devices of this process are GPUs to all who ask them."""
    device, client = jaxlib._jax.Device, jaxlib._jax.Client
    patch.setattr(device, "platform", property(lambda _: "gpu"))
    patch.setattr(device, "device_kind", property(lambda _: kind))
    patch.setattr(device, "compute_capability", property(lambda _: capability), raising=False)
    patch.setattr(device, "memory_stats", memory_stats)
    patch.setattr(client, "platform_version", property(lambda _: "cuda 12090"))
    patch.setattr("megajax.kernels.attention.attention.cuda_versions", CudaVersions)
    patch.setattr("megajax.kernels.attention.attention.PASSES", dict.fromkeys(PASSES, PASSES["reference"]))
