"""CheckpointConfig: invalid settings, and imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from megajax.checkpoint.config import CheckpointConfig


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"every": 0}, "every"),
        ({"keep_last": 0}, "keep_last"),
        ({"keep_every": -5}, "keep_every"),
        ({"step": -1}, "step"),
        ({"every": 300, "keep_every": 1000}, "keep_every"),
        ({"step": 5, "load": Path("runs/a"), "parts": "weights"}, "step"),
    ],
)
def test_invalid_settings_are_named(settings, setting):
    (problem,) = CheckpointConfig(**settings).problems()
    assert problem.setting == setting and str(next(iter(settings.values()))) in str(problem)


def test_good_settings_have_no_problems():
    assert CheckpointConfig().problems() == []
    assert CheckpointConfig(every=None, keep_last=None, keep_every=1000, step=0).problems() == []
    assert CheckpointConfig(every=250, keep_every=1000).problems() == []


def test_importing_the_config_imports_nothing_heavy():
    script = (
        "import sys, megajax.checkpoint.config; print({'jax', 'numpy', 'orbax', 'flax', 'grain'} & sys.modules.keys())"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "set()"
