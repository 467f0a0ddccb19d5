"""The comparison of gradients by every way to dispatch tokens to experts, on CPU devices."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks.__main__ import main
from benchmarks.training import expert_gradients
from megajax.config import load
from megajax.config.errors import UserError
from megajax.mesh.mesh import find_devices

CONFIG = ("qwen3_moe.py:debug", "model.stack.repeats=1", "model.hidden=32", "model.sequence_length=32")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the variable that the program sets for the runtime."""
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")


@pytest.fixture(params=[2, 1])
def devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    for user in ("benchmarks.training.expert_gradients", "megajax.training.resolved"):
        monkeypatch.setattr(f"{user}.find_devices", lambda: find_devices()[: request.param])
    return request.param


def test_the_way_of_dispatch_is_set_in_every_layer() -> None:
    cfg = load("deepseek.py:debug").model
    ragged = expert_gradients.with_way(cfg, "ragged")
    assert "way='ragged'" in repr(ragged) and "way='auto'" not in repr(ragged)
    assert expert_gradients.with_way(ragged, "auto") == cfg
    dense = load("llama3.py:debug")
    with pytest.raises(UserError, match="no mixture of experts"):
        next(iter(expert_gradients.expert_gradients(cfg=dense)))


def test_different_and_non_finite_gradients_are_reported(
    tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A finite loss with NaN gradients, as publicly reported of ragged exchanges."""
    values = {"gather": 1.0, "ragged": jnp.nan, "capacity": 1.5}

    def gradients(cfg):
        (way,) = (way for way in values if f"way='{way}'" in repr(cfg.model))
        return 2.0, {"a": jnp.ones(4), "b": jnp.full(4, values[way])}

    monkeypatch.setattr(expert_gradients, "gradients", gradients)
    file = tmp_path / "ways.json"
    assert main(["expert_gradients", "--config=qwen3_moe.py:debug", f"--json={file}"]) == 1
    rows = json.loads(file.read_text())["figures"]["rows"]
    assert [(row["way"], row["worst"], row["right"]) for row in rows] == [
        ("ragged", "b", False),
        ("capacity", "b", False),
    ] * 2
    assert capsys.readouterr().out.count("WRONG") == 4


@pytest.mark.slow
def test_all_ways_of_dispatch_have_equal_gradients(
    devices: int, process: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(expert_gradients, "TOLERANCES", {"float32": 1e-5})
    file = tmp_path / "ways.json"
    argv = [f"--{setting}" for setting in CONFIG[1:]]
    assert main(["expert_gradients", f"--config={CONFIG[0]}", *argv, f"--json={file}"]) == 0
    rows = json.loads(file.read_text())["figures"]["rows"]
    assert [row["way"] for row in rows] == (["ragged", "capacity"] if devices > 1 else [])
    assert all(row["error"] <= 1e-5 and row["devices"] == 2 for row in rows)


def test_only_the_dispatch_differs_between_ways() -> None:
    cfg = load(*CONFIG).model
    gather = expert_gradients.with_way(cfg, "gather")
    assert replace(gather, stack=cfg.stack) == cfg
