"""The kernel that attends to the cache."""

from megajax.kernels.attention import local_device
from megajax.kernels.capability import Choice
from megajax.kernels.paged_capability import PagedKernel, PagedRequest, choose_paged
from megajax.models.protocol import ModelConfig


def choose_kernel(
    kernel: PagedKernel, model: ModelConfig, compute: str, stored: str, where: str = "inference.kernel"
) -> Choice[PagedKernel]:
    """One kernel for all layers of a model, on the first device jax finds, and why not a faster one.

    compute: dtype of queries; stored: of the cache. Raises UserError if the named kernel does not support a layer or
    the device. `where`: name of the setting.
    """
    requests = model.paged_requests(PagedRequest(dtype=compute, stored=stored))
    return choose_paged(kernel, requests, local_device(), where)
