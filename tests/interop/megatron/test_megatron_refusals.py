"""Models that Megatron-LM's arguments can't express are refused with a UserError."""

from pathlib import Path
from typing import Any

import pytest

from megajax.config import load
from megajax.config.errors import UserError
from megajax.interop.megatron.checkpoints.format import write_model


@pytest.mark.parametrize("config", ["mamba2.py:debug", "nemotron_h.py:debug"])
def test_models_with_state_spaces_are_refused(config: str, tmp_path: Path) -> None:
    weights: Any = None  # Refused before weights are read.
    with pytest.raises(UserError, match="Megatron-LM's arguments can't express the model"):
        write_model(tmp_path, load(config).model, weights)
    assert not list(tmp_path.iterdir())
