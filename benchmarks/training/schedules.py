"""The train step by each schedule of XLA: by times of the cost model, by its own, and by times that jax measures."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax

from benchmarks.stopwatch import LEAST, WARM_UP, readings
from benchmarks.training.train_speed import Bench, program_of, synthetic_batch
from megajax.config.errors import UserError
from megajax.training.run_config import RunConfig

SCHEDULES = {"costs": ("costs", False), "default": ("default", False), "measured": ("default", True)}
"""Name -> `xla.schedule`, and whether jax measures a profile."""
LOSSES = 3
"""Steps whose losses are compared."""


def schedules(*, cfg: RunConfig, steps: int = 10) -> Iterator[dict[str, Any]]:
    """The train step by each schedule of XLA: by kernel times of the cost model, by its own, by measured ones.

    Measured: jax's profile-guided scheduling (JAX_ENABLE_PGLE), which profiles the first steps and compiles again. The
    times of --steps steps on one batch, the losses of the first three, and for costs how much the cost model expects
    and which share of the instructions has the names of the first compilation. A difference needs several GPUs.
    """
    if steps < 1:
        raise UserError(f"--steps must be at least 1, got {steps}")
    figures: dict[str, Any] = {}
    for name, (schedule, measured) in SCHEDULES.items():
        figures[name] = run(cfg.but(xla=replace(cfg.xla, schedule=schedule)), steps, measured=measured)
        seconds = figures[name]["step_seconds"]["median"]
        figures[name]["over_costs"] = seconds / figures["costs"]["step_seconds"]["median"]
        figures[name]["same_losses"] = figures[name]["losses"] == figures["costs"]["losses"]
        print(line(name, figures[name]), flush=True)
        yield figures


def run(cfg: RunConfig, steps: int, *, measured: bool) -> dict[str, Any]:
    """Compile and time one variant. Raises ConfigError if it does not fit the devices or the compiler."""
    jax.clear_caches()
    before = jax.config.jax_enable_pgle
    jax.config.update("jax_enable_pgle", measured)
    try:
        with program_of(cfg) as (program, _):
            bench = Bench(program, program.train_step, program.fresh_state()(), synthetic_batch(program))
            losses = [float(bench.step()["loss"]).hex() for _ in range(LOSSES)]
            # jax compiles again after the steps that it profiles.
            for _ in range(WARM_UP + measured * jax.config.jax_pgle_profiling_runs):
                jax.block_until_ready(bench.step())
            statistics = readings(bench.step, steps, jax.block_until_ready, least=LEAST)
    finally:
        jax.config.update("jax_enable_pgle", before)
    expected = {key: value for scheduled in program.schedules() for key, value in scheduled.to_dict().items()}
    return {"step_seconds": statistics.to_dict(), "losses": losses, **expected}


def line(name: str, figures: dict[str, Any]) -> str:
    """One variant as text."""
    seconds, losses = figures["step_seconds"], "the same losses" if figures["same_losses"] else "OTHER LOSSES"
    names = f", {figures['matched']:.1%} of the names, taken: {figures['by']}" if "matched" in figures else ""
    return f"{name}: {1e3 * seconds['median']:.1f} ms a step, {figures['over_costs']:.3f} of costs; {losses}{names}"
