"""The debug twins with experts and state spaces train on eight devices to the losses of one, on real text."""

from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from megajax.config import load
from megajax.training import setup

STEPS = 12


@cache
def losses(source: str, rows: int, *layout: str) -> list[float]:
    """Losses of the first steps. rows: of a microbatch on all devices, over which routers balance."""
    devices = jax.devices()[: 8 if layout else 1]
    micro = [] if layout else [f"batch.micro_size={rows}"]
    cfg = load(source, *micro, *layout, f"steps={STEPS}", "evaluation.every=none", devices=len(devices))
    run = setup(cfg, devices=devices)
    try:
        return [info.loss for info in run.steps()]
    finally:
        run.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rows", "layout"),
    [
        ("mixtral", 8, ("parallel.expert=4", "parallel.data=2")),
        ("mixtral", 8, ("parallel.expert=2", "parallel.data_sharding=fsdp")),
        ("mixtral", 2, ("parallel.expert=2", "parallel.tensor=2", "parallel.pipeline=2")),
        ("qwen3_moe", 8, ("parallel.expert=4",)),
        ("gpt_oss", 4, ("parallel.expert=4", "parallel.tensor=2", "parallel.sequence=true")),
        ("deepseek", 8, ("parallel.expert=2", "parallel.data_sharding=fsdp")),
        ("mamba2", 2, ("parallel.tensor=2", "parallel.pipeline=2")),
        ("nemotron_h", 2, ("parallel.tensor=2", "parallel.pipeline=2")),
    ],
    ids=lambda value: "-".join(part.split(".")[-1] for part in value) if isinstance(value, tuple) else str(value),
)
def test_eight_devices_have_the_losses_of_one(
    family: str, rows: int, layout: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = losses(f"{family}.py:debug", rows)
    np.testing.assert_allclose(losses(f"{family}.py:debug", rows, *layout), expected, rtol=1e-4)
    assert np.mean(expected[-3:]) < expected[0] - 1.0
