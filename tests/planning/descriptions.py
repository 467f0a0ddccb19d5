"""Descriptions of runs for tests of the formulas, and what tests of compiled plans need."""

from typing import Any

from megajax.compiled.gpus import GPUS
from megajax.mesh.config import ParallelConfig
from megajax.models.presets.llama import llama3
from megajax.planning.cost.description import Description


def llama3_8b(parallel: ParallelConfig, global_size: int, **changes: Any) -> Description:
    """Llama-3 8B on nodes of 8 H100s."""
    defaults = {"model": llama3("8b"), "device": GPUS["h100"], "per_node": 8}
    return Description(**{**defaults, "parallel": parallel, "global_size": global_size, **changes})
