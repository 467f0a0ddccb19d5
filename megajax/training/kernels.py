"""Which kernels a run takes; importing this imports neither readers of data nor writers of checkpoints."""

from megajax.kernels.attention import local_device
from megajax.kernels.capability import Choice, Device, Request
from megajax.mesh.cut import Cut
from megajax.models.facts import ChoosesKernels
from megajax.training.run_config import RunConfig


def demand_kernels(cfg: RunConfig, device: Device | None = None) -> tuple[Choice[str], ...]:
    """The kernel of each block of the pattern on `device`, as far as the model tells; see `ChoosesKernels`.

    device: None for the first that jax finds. Raises UserError where a kernel was asked for by name that is not
    available there.
    """
    if not isinstance(cfg.model, ChoosesKernels):
        return ()
    cut = Cut.of(cfg.parallel, causal=cfg.model.ignores_later_positions())
    known = Request(dtype=cfg.precision.compute, documents="segment_ids" in cfg.data.leaves(), cut=cut)
    return cfg.model.kernel_choices(known, local_device() if device is None else device)
