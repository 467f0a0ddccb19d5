"""The program of docs/checkpoints.md that reads a step with Orbax alone."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint.config import CheckpointConfig
from tests.docs.blocks import ROOT, blocks


def test_the_program_of_the_page_gives_layers_in_natural_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers 0 and 2 on one stage, 1 on the other, and a padding row."""
    (program,) = (block.text for block in blocks(ROOT / "docs/checkpoints.md") if "def weight(path)" in block.text)
    assert "megajax" not in program
    layers, values = [0, 2, 1, -1], np.arange(12, dtype=np.float32).reshape(4, 3)
    with CheckpointConfig().build(tmp_path / "runs/quickstart/checkpoints") as manager:
        arrays = {"stack.blocks.0.norm.gain": jnp.asarray(values), "tokens": jnp.ones((5, 2), jnp.bfloat16)}
        manager.save(20, {"params": arrays}, {"layers": {"stack.blocks.0.norm.gain": layers}})
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(program, names)
    np.testing.assert_array_equal(names["weight"]("stack.blocks.0.norm.gain"), values[[0, 2, 1]])
    assert names["weight"]("tokens").dtype == jnp.bfloat16
    assert json.loads(next(tmp_path.rglob("meta.json")).read_text())["meta"]["layers"]
