"""The benchmark of conversions, on a small model."""

from pathlib import Path

import pytest

from benchmarks.checkpoints.convert import convert


@pytest.mark.slow
def test_a_small_model_is_converted_back_within_the_memory_limit(tmp_path: Path) -> None:
    figures = convert(size="debug", folder=tmp_path)
    assert figures["tensors_equal"] and figures["within_allowed"]
    assert 50 < figures["hugging_face_to_run"]["peak_private_megabytes"] < figures["allowed_megabytes"]
