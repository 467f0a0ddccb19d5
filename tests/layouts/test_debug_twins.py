"""Debug twins of some shipped families learn on eight devices, on real data, with the losses of one device.

These combine the most kinds of layers. tests/one_device.py has every kind, tests/oracle the logits of each family.
"""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from megajax.config import load
from megajax.job.notebook import set_up
from megajax.mesh.config import ParallelConfig

PIPELINE = ("parallel.tensor=2", "parallel.pipeline=2")
SEQUENCE = ("parallel.tensor=2", "parallel.sequence=true")
FLAT = ("parallel.expert=2", "parallel.pipeline=1", "parallel.virtual_stages=1", "parallel.schedule=1f1b",
        "parallel.tensor=1")  # fmt: skip
"""Of twins with a pipeline, on other axes."""
CASES = {
    "gpt_oss": (4, 12, 1.0, ("parallel.expert=4", *SEQUENCE)),
    "deepseek:deepseek_v3": (2, 12, 1.0, ()),
    "nemotron_h": (2, 12, 1.0, PIPELINE),
    "llama4": (8, 12, 1.0, (*FLAT, "parallel.context=2", "parallel.context_strategy=ring")),
    "minimax": (8, 12, 0.8, ("parallel.expert=2", "parallel.data_sharding=fsdp")),
    "kimi_linear": (8, 12, 1.0, (*FLAT, "parallel.data_sharding=fsdp", "parallel.context=2")),
    "t5": (None, 20, 0.5, SEQUENCE),
    "qwen3_vl": (None, 20, 0.5, SEQUENCE),
}
"""Family -> rows of a microbatch on all devices, over which routers balance (None: any), steps, the minimum decrease of
the loss in these steps, and settings of the layout."""


def losses(family: str, *settings: str, devices: int) -> list[float]:
    name, _, size = family.partition(":")
    cfg = load(f"{name}.py:{size}_debug".replace(":_", ":"), *settings, "evaluation.every=none")
    if devices == 1:
        cfg = cfg.but(parallel=ParallelConfig(), batch=replace(cfg.batch, side_by_side=1))
    run = set_up(cfg, devices=jax.devices()[:devices])
    try:
        return [info.loss for info in run.steps()]
    finally:
        run.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_eight_devices_have_the_losses_of_one(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows, steps, fall, layout = CASES[family]
    alone = [] if rows is None else [f"batch.micro_size={rows}"]
    expected = losses(family, *alone, f"steps={steps}", devices=1)
    np.testing.assert_allclose(losses(family, *layout, f"steps={steps}", devices=8), expected, rtol=1e-4)
    assert len(expected) == steps and np.mean(expected[-3:]) < expected[0] - fall
