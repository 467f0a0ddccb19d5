"""Debug twins on several devices have the losses of one: of the most kinds of layers, and of learnt preferences.

tests/one_device.py has every kind of layer, tests/oracle the logits of each family.
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
FLAT = ("parallel.expert=2", "parallel.pipeline=1", "parallel.virtual_stages=1", "parallel.schedule=1f1b",
        "parallel.tensor=1")  # fmt: skip
"""Of twins with a pipeline, on other axes."""
CASES = {
    "deepseek:deepseek_v3": (2, ()),
    "nemotron_h": (2, PIPELINE),
    "llama4": (8, (*FLAT, "parallel.context=2", "parallel.context_strategy=ring")),
}
"""Family -> rows of a microbatch on all devices, over which routers balance, and settings of the layout."""
STEPS, FALL = 12, 1.0
"""The loss falls by at least so much in these steps."""


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
    rows, layout = CASES[family]
    expected = losses(family, f"batch.micro_size={rows}", f"steps={STEPS}", devices=1)
    np.testing.assert_allclose(losses(family, *layout, f"steps={STEPS}", devices=8), expected, rtol=1e-4)
    assert len(expected) == STEPS and np.mean(expected[-3:]) < expected[0] - FALL


DPO_LAYOUTS = {
    1: (),
    4: ("parallel.tensor=2", "parallel.data_sharding=fsdp", "parallel.context=2", "parallel.context_strategy=ring"),
}
"""Number of devices -> settings."""


def trained(devices: int) -> tuple[list[float], float]:
    """The losses of 30 steps, and the accuracy on held-out pairs after them."""
    cfg = load("dpo.py:debug", *DPO_LAYOUTS[devices], "steps=30", "batch.micro_size=4", devices=devices)
    run = set_up(cfg, devices=jax.devices()[:devices])
    try:
        losses = [info.loss for info in run.steps()]
        metrics = run.metrics(run.parts.splits.valid)
    finally:
        run.close()
    assert metrics is not None
    return losses, metrics["accuracy"]


@pytest.mark.slow
def test_two_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected, accuracy = trained(1)
    assert expected[0] == pytest.approx(np.log(2), rel=1e-6) and accuracy > 0.95
    losses, accuracy = trained(4)
    np.testing.assert_allclose(losses[:10], expected[:10], rtol=1e-4)
    np.testing.assert_allclose(losses, expected, rtol=1e-2)
    assert accuracy > 0.95
