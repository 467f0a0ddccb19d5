"""Data without the leaves of a model is refused when the config is read; the message names both sides."""

import pytest

from megajax.config import load
from megajax.config.errors import ConfigError

CASES = {
    "gpt3.py:debug data.type=LibrarySentences": (
        "LibrarySentencesConfig makes loss_mask (float32), tokens (int32)",
        "DecoderConfig reads tokens (int32), labels (int32), loss_mask (float32), positions (int32); "
        "missing: positions",
    ),
    "bert.py:debug data.type=Blend data.paths=a": (
        "BlendConfig makes tokens (int32), labels (int32), loss_mask (float32), positions (int32), "
        "padding (bool); BertConfig reads",
        "missing: segment_ids, token_types, is_random",
        "choose data that makes segment_ids and token_types and is_random, or another model",
    ),
    "bert.py:debug data.next_sentence=false": ("missing: is_random",),
    "t5.py:debug data.type=LibrarySentences": ("T5Config reads", "missing: encoder_tokens, encoder_segment_ids"),
}


@pytest.mark.parametrize("settings", CASES)
def test_the_message_names_both_sides(settings: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(*settings.split())
    text = str(refused.value)
    assert all(part in text for part in CASES[settings]), text
    assert "1 problem in" in text


def test_sections_of_different_depth_are_rounded_whole() -> None:
    """First and last layers are the same numbers in all sections."""
    deeper = "t5.py:debug", "precision.compute=bfloat16", "model.encoder.repeats=4"
    assert load(*deeper, "precision.matmul=Fp8Current").precision.matmul is not None
    with pytest.raises(ConfigError, match="sections of equally many layers, and these differ: encoder 4, stack 2"):
        load(*deeper, "precision.matmul=Nvfp4")
