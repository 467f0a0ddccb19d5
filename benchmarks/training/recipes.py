"""Losses of a small Llama by recipe of precision.matmul, beside bfloat16 and a second seed of it."""

from typing import Any

import jax
import numpy as np

from megajax.config import load
from megajax.training.session import setup

RECIPES = {
    "bfloat16": (),
    "bfloat16, another seed": ("seed=1",),
    "fp8_current": ("precision.matmul=Fp8Current",),
    "fp8_delayed": ("precision.matmul=Fp8Delayed", "precision.matmul.history=16", "precision.matmul.algorithm=max"),
    "fp8_blocks": ("precision.matmul=Fp8Blocks",),
    "mxfp8": ("precision.matmul=Mxfp8",),
    "nvfp4": ("precision.matmul=Nvfp4",),
    "nvfp4, all layers": (
        "precision.matmul=Nvfp4", "precision.matmul.first_layers=0", "precision.matmul.last_layers=0",
    ),
    "nvfp4, all layers, nearest": (
        "precision.matmul=Nvfp4", "precision.matmul.first_layers=0", "precision.matmul.last_layers=0",
        "precision.matmul.stochastic=false", "precision.matmul.hadamard=false",
    ),
}  # fmt: skip
"""Name -> settings."""


def recipes(
    *, config: str = "quickstart.py", steps: int = 200, layers: int = 4, rows: int = 4, only: str = ""
) -> dict[str, Any]:
    """Losses of a run by recipe, and their differences from bfloat16: the mean of the last 20 steps, and the largest.

    layers: of the model; rows: of a step; only: names of recipes, separated by `;`.
    """
    names, found = only.split(";") if only else [*RECIPES], {}
    for name in names:
        shared = (
            f"model.stack.repeats={layers}",
            "precision.compute=bfloat16",
            f"steps={steps}",
            f"batch.global_size={rows}",
        )
        run = setup(load(config, *shared, f"batch.micro_size={rows}", "parallel.data=1", *RECIPES[name]))
        try:
            found[name] = _losses(run, steps)
        finally:
            run.close()
        print(name, f"{found[name][-20:].mean():.4f}", flush=True)
    base, table = found.get("bfloat16"), {}
    for name, losses in found.items():
        apart = np.abs(losses - base).max() if base is not None else np.nan
        last = losses[-20:].mean()
        change = last - base[-20:].mean() if base is not None else np.nan
        figures = {"last_20": last, "change": change, "apart": apart}
        table[name] = {key: round(float(value), 4) for key, value in figures.items()}
    settings = {"config": config, "steps": steps, "layers": layers, "rows": rows}
    return {**settings, "device": jax.devices()[0].device_kind, "recipes": table}


def _losses(run: Any, steps: int) -> np.ndarray:
    with jax.set_mesh(run.mesh):
        return np.array([report.loss for report in run.steps(steps)])
