"""Losses of a small Llama by recipe of precision.matmul, beside bfloat16."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from megajax.config import load
from megajax.training.session import Run, setup

ALL = "precision.matmul.first_layers=0", "precision.matmul.last_layers=0"
RECIPES = {
    "bfloat16": (),
    "bfloat16, two microbatches": ("batch.micro_size=2",),
    "mxfp8": ("precision.matmul=Mxfp8",),
    "nvfp4": ("precision.matmul=Nvfp4",),
    "fp8_blocks": ("precision.matmul=Fp8Blocks",),
    "fp8_current": ("precision.matmul=Fp8Current",),
    "fp8_delayed": ("precision.matmul=Fp8Delayed", "precision.matmul.history=16", "precision.matmul.algorithm=max"),
    "nvfp4, all layers": ("precision.matmul=Nvfp4", *ALL),
}
"""Name -> settings. Two microbatches add the same gradients in another order: what rounding alone changes."""


def recipes(
    *,
    hidden: int = 128,
    steps: int = 200,
    layers: int = 4,
    lr: float = 1e-3,
    seeds: int = 2,
    only: str = "",
) -> Iterator[dict[str, Any]]:
    """Losses by recipe: the mean of the last 20 steps, and its change from bfloat16, of each seed.

    The quickstart model with this width, heads of 64 above its own, in steps of 4 rows. only: names of recipes,
    separated by `;`.
    """
    names = only.split(";") if only else [*RECIPES]
    last: dict[str, list[float]] = {name: [] for name in names}
    shared = f"model.stack.repeats={layers}", "precision.compute=bfloat16", f"steps={steps}", f"schedule.lr={lr}"
    block = "model.stack.pattern.0"
    shared += f"model.hidden={hidden}", f"{block}.mixer.heads={max(4, hidden // 64)}", f"{block}.mlp.ffn={3 * hidden}"
    for seed in range(seeds):
        for name in names:
            settings = *shared, "batch.global_size=4", "batch.micro_size=4", "parallel.data=1", f"seed={seed}"
            run = setup(load("quickstart.py", *settings, *RECIPES[name]))
            try:
                last[name].append(float(_losses(run, steps)[-20:].mean()))
            finally:
                run.close()
            base = last[names[0]]
            rows = {
                name: {
                    "last_20": [round(loss, 4) for loss in values],
                    "change": [round(loss - plain, 4) for loss, plain in zip(values, base, strict=False)],
                }
                for name, values in last.items()
            }
            yield {
                "hidden": hidden,
                "steps": steps,
                "layers": layers,
                "lr": lr,
                "device": jax.devices()[0].device_kind,
                "recipes": rows,
            }


def _losses(run: Run, steps: int) -> np.ndarray:
    with jax.set_mesh(run.mesh):
        return np.array([report.loss for report in run.steps(steps)])
