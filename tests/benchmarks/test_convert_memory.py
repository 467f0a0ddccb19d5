"""The benchmark of conversions, on a small model."""

from pathlib import Path

import convert
import pytest


@pytest.mark.slow
def test_a_small_model_comes_back_within_the_memory(tmp_path: Path) -> None:
    figures = convert.measure("debug", tmp_path)
    assert figures["tensors_equal"] and figures["within_allowed"]
    assert 50 < figures["hugging_face_to_run"]["peak_private_megabytes"] < figures["allowed_megabytes"]
