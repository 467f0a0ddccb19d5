"""The user's model of docs/own_model.md trains on every kind of layout as on one device."""

from pathlib import Path

import numpy as np
import pytest

from megajax.config import load
from megajax.job.notebook import set_up
from megajax.models.protocol import position_unit
from tests.docs.blocks import ROOT, blocks

STEPS = 3


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    for block in blocks(ROOT / "docs/own_model.md"):
        name = block.text.splitlines()[0].removeprefix("# ")
        if name.endswith(".py"):
            (folder / name).write_text(block.text, encoding="utf-8")
    return folder / "my_model.py"


def losses(config_file: Path, *settings: str) -> list[float]:
    """The losses of a few steps, and of an evaluation after them."""
    cfg = load(config_file, "steps=3", "precision.compute=float32", *settings)
    run = set_up(cfg)
    losses = [info.loss for info in run.steps(STEPS)]
    losses.append(run.evaluate(run.parts.splits.valid, batches=1))
    run.close()
    return losses


@pytest.fixture(scope="module")
def expected(config_file: Path) -> list[float]:
    return losses(config_file, "parallel.data=1")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("parallel.data=4", "parallel.data_sharding=fsdp"), marks=pytest.mark.slow),
        ("parallel.data=2", "parallel.pipeline=2", "parallel.tensor=2"),
    ],
    ids=["fsdp", "all"],
)
def test_losses_equal_those_of_one_device(config_file, expected, settings):
    np.testing.assert_allclose(losses(config_file, *settings), expected, rtol=1e-5)


def test_the_model_learns(expected):
    assert expected[-1] < expected[0]


def test_positions_are_not_tokens(config_file):
    model = load(config_file).model
    assert position_unit(model) == "positions"
    assert position_unit(load("gpt3.py:debug").model) == "tokens"
    assert "tokens" not in repr(set_up(load(config_file, "steps=1", "parallel.data=1")))
