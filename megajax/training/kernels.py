"""Which kernels a run takes; importing this imports neither readers of data nor writers of checkpoints."""

from megajax.kernels.attention import local_device
from megajax.kernels.capability import Choice, Device
from megajax.layers.core_attention import kernel_choice
from megajax.training.run_config import RunConfig


def demand_kernels(cfg: RunConfig, device: Device | None = None) -> tuple[Choice, ...]:
    """The attention backend of each block of the pattern on `device`; none: the first jax finds.

    Raises UserError where one was asked for by name that can't be had there.
    """
    device = local_device() if device is None else device
    return tuple(
        kernel_choice(
            block.mixer,
            cfg.precision.compute,
            head_dim=block.mixer.size(cfg.model.hidden),
            length=cfg.model.sequence_length,
            documents="segment_ids" in cfg.data.leaves(),
            device=device,
            where=f"model.stack.pattern.{place}.mixer.kernel",
        )
        for place, block in enumerate(cfg.model.stack.pattern)
    )
