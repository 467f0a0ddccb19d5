"""DPO on synthetic pairs learns to prefer the right answer in held-out pairs, alike on every layout."""

from pathlib import Path

import jax
import numpy as np
import pytest

from megajax.config import load
from megajax.job.notebook import set_up

LAYOUTS = {
    1: (),
    2: ("parallel.pipeline=2", "parallel.data=1"),
    4: ("parallel.tensor=2", "parallel.data_sharding=fsdp", "parallel.context=2", "parallel.context_strategy=ring"),
}
"""Number of devices -> settings."""


def trained(devices: int) -> tuple[list[float], float]:
    """The losses of 30 steps, and the accuracy on held-out pairs after them."""
    cfg = load("dpo.py:debug", *LAYOUTS[devices], "steps=30", "batch.micro_size=4", devices=devices)
    run = set_up(cfg, devices=jax.devices()[:devices])
    try:
        losses = [info.loss for info in run.steps()]
        metrics = run.metrics(run.parts.splits.valid)
    finally:
        run.close()
    assert metrics is not None
    return losses, metrics["accuracy"]


@pytest.mark.slow
def test_three_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected, accuracy = trained(1)
    assert expected[0] == pytest.approx(np.log(2), rel=1e-6) and accuracy > 0.95
    for devices in (2, 4):
        losses, accuracy = trained(devices)
        np.testing.assert_allclose(losses[:10], expected[:10], rtol=1e-4)
        np.testing.assert_allclose(losses, expected, rtol=1e-2)
        assert accuracy > 0.95
