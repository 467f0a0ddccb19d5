"""OLMo 2 of transformers: logits, loss, a round trip byte for byte, and a debug twin that learns."""

import numpy as np
import pytest
from huggingface_cases import arrays, opened, stored
from megatron_cases import FOLDER as ORACLE
from megatron_run import OneDevice

from megajax.config import load
from megajax.job.notebook import setup

FOLDER = ORACLE.parent / "oracle3" / "hf" / "olmo2"
TOLERANCE = 1e-4


@pytest.mark.skipif(not FOLDER.exists(), reason="needs ../shared")
def test_logits_and_loss_equal_those_of_transformers() -> None:
    """`opened` also writes every tensor back, byte for byte."""
    opening, io = opened(FOLDER), stored(FOLDER)
    ids = io["input_ids"].astype(np.int32)
    params, kept = arrays(opening)
    actual = OneDevice(opening.model).forward(params, ids, np.roll(ids, -1, axis=1), kept)
    np.testing.assert_allclose(actual["logits"], io["logits"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(actual["per_token_loss"][:, :-1].mean(), io["loss"], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_the_debug_twin_learns_on_two_devices_of_tensor() -> None:
    losses = [info.loss for info in setup(load("olmo2.py:olmo2_32b_debug")).steps(10)]
    assert losses[-1] < losses[0] - 0.03
