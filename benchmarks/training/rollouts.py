"""Reinforcement learning: tokens a second of rollouts and of updates, and the cost of equality with training."""

import time
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import jax

import megajax as mj

WARM = 2
"""Steps that compile, which are left out."""


def rollouts(*, steps: int = 8) -> dict[str, Any]:
    """Figures of steps of grpo.py:debug on one device, each a rollout of 64 answers of up to 60 tokens and one update.

    Rows of 64 tokens hold one answer, so that `inference.equal_to_training` is possible. Its cost is the ratio of the
    processor seconds of both runs, which other work on the machine changes less than wall time.
    """
    plain, equal = (measured(steps, is_equal) for is_equal in (False, True))
    ratio = equal["processor_seconds"] / plain["processor_seconds"]
    return {"plain": plain, "equal_to_training": equal, "processor_ratio": ratio}


def measured(steps: int, is_equal: bool) -> dict[str, float]:
    """Medians over the steps of a run."""
    sizes = ("model.sequence_length=64", "data.max_tokens=60", "data.prompts=8", "data.answers=8")
    sizes += ("batch.global_size=64", "batch.micro_size=16", f"steps={steps + WARM}")
    equality = f"data.inference.equal_to_training={str(is_equal).lower()}"
    cfg = mj.load("grpo.py:debug", *sizes, equality, "checkpoint.every=none", "run_dir=runs/rollouts_benchmark")
    (block,) = cfg.model.stack.pattern
    block = replace(block, mixer=replace(block.mixer, kernel="fixed" if is_equal else "auto"))
    cfg = cfg.but(model=replace(cfg.model, stack=replace(cfg.model.stack, pattern=(block,))))
    run, lines, clocks = mj.setup(cfg, devices=jax.devices()[:1]), list[dict[str, float]](), [time.process_time()]
    try:
        for info in run.steps():
            lines.append(dict(info.metrics))
            clocks.append(time.process_time())
    finally:
        run.close()
    names = ("rollout_tokens_per_second", "update_tokens_per_second", "mismatch_equal", "mismatch_most")
    figures = {name: median(line[name] for line in lines[WARM:]) for name in names}
    seconds = [after - before for before, after in pairwise(clocks[WARM:])]
    return figures | {"processor_seconds": median(seconds)}
