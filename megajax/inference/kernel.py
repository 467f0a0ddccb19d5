"""The kernel that attends to the cache."""

from megajax.kernels.attention import local_device
from megajax.kernels.capability import Choice
from megajax.kernels.paged_capability import PagedKernel, PagedRequest, choose_paged
from megajax.layers.cache_facts import EIGHT_BIT
from megajax.models.protocol import ModelConfig


def choose_kernel(
    kernel: PagedKernel, model: ModelConfig, compute: str, stored: str, where: str = "inference.kernel"
) -> Choice[PagedKernel]:
    """One kernel for all layers of a model, on the first device jax finds, and why not a faster one.

    compute: dtype of queries; stored: of the cache, or int8 or fp8; `where`: name of the setting. Raises UserError if
    the named kernel does not support a layer or the device.
    """
    requests = model.paged_requests(PagedRequest(dtype=compute, stored=EIGHT_BIT.get(stored, stored)))
    return choose_paged(kernel, requests, local_device(), where)
