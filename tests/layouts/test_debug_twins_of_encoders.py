"""The debug twins of BERT, T5, ViT and LLaVA train on eight devices to the losses of one, on real text and digits."""

from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from megajax.config import load
from megajax.training import setup

STEPS = 20
FALL = {"bert": 0.5, "t5": 0.5, "vit": 0.3, "llava": 0.5}
"""Minimum decrease of the loss in these steps."""


@cache
def losses(name: str, *layout: str) -> list[float]:
    """Losses of the first steps; without a layout on one device."""
    devices = jax.devices()[: 8 if layout else 1]
    cfg = load(f"{name}.py:debug", *layout, f"steps={STEPS}", "evaluation.every=none", devices=len(devices))
    run = setup(cfg, devices=devices)
    try:
        return [info.loss for info in run.steps()]
    finally:
        run.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("bert", ("parallel.tensor=2", "parallel.sequence=true")),
        ("bert", ("parallel.tensor=2", "parallel.pipeline=2")),
        ("t5", ("parallel.tensor=2", "parallel.sequence=true")),
        ("vit", ("parallel.tensor=2", "parallel.sequence=true")),
        ("vit", ("parallel.tensor=2", "parallel.pipeline=2")),
        ("llava", ("parallel.tensor=2", "parallel.sequence=true")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(part.split(".")[-1] for part in value),
)
def test_eight_devices_have_the_losses_of_one(
    name: str, layout: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = losses(name)
    np.testing.assert_allclose(losses(name, *layout), expected, rtol=1e-4)
    assert len(expected) == STEPS and np.mean(expected[-3:]) < expected[0] - FALL[name]
