"""Descriptions of runs for tests of the formulas, and what tests of compiled plans need."""

from typing import Any

from megajax.mesh.config import ParallelConfig
from megajax.models.presets.llama import llama3
from megajax.planning.compiled.devices import GPUS
from megajax.planning.cost.description import Description

TENSOR_4 = ("parallel.tensor=4", "parallel.sequence=true", "parallel.data_sharding=zero1", "model.recompute=selective",
            "batch.micro_size=1")  # fmt: skip
"""Settings of llama3_8b, which ships FSDP."""
STAGES_70B = ("parallel.tensor=8", "parallel.pipeline=4", "parallel.context=1", "parallel.context_strategy=all_gather",
              "parallel.schedule=interleaved", "parallel.virtual_stages=5", "batch.side_by_side=1")  # fmt: skip
"""Settings of llama3_70b, which ships rings and pairs of microbatches."""
STAGES_405B = (*STAGES_70B, "parallel.pipeline=16", "parallel.virtual_stages=4", "model.recompute=full")


def llama3_8b(parallel: ParallelConfig, global_size: int, **changes: Any) -> Description:
    """Llama-3 8B on nodes of 8 H100s."""
    defaults = {"model": llama3("8b"), "device": GPUS["h100"], "per_node": 8}
    return Description(**{**defaults, "parallel": parallel, "global_size": global_size, **changes})
