"""Decoders of transformers: logits, loss and greedy tokens of every checkpoint in the folder, in float32."""

from pathlib import Path

import numpy as np
import pytest
from huggingface_cases import TOLERANCE, arrays, folders, opened, stored
from megatron_cases import Comparison, cases
from megatron_run import OneDevice

ELSEWHERE = ("bert", "megatron-bert", "t5", "mt5", "vit")


@pytest.mark.parametrize("case", cases(folders(lambda kind: kind not in ELSEWHERE)))
def test_checkpoint(case: str, oracle_dir: Path) -> None:
    folder, compare = oracle_dir / "hf" / case, Comparison(case)
    opening, io = opened(folder), stored(folder)
    ids, greedy = io["input_ids"].astype(np.int32), io["greedy"].astype(np.int32)
    assert ids.shape == greedy.shape
    rows, (params, kept) = np.concatenate([ids, greedy]), arrays(opening)
    actual = OneDevice(opening.model).forward(params, rows, np.roll(rows, -1, axis=1), kept)
    compare.check("logits", actual["logits"][: len(ids)], io["logits"], TOLERANCE)
    # Their balancing loss treats all layers as one; ours is per layer.
    extra = opening.origin.settings["router_aux_loss_coef"] * float(io["aux_loss"]) if "aux_loss" in io else 0.0
    compare.check("loss", actual["per_token_loss"][: len(ids), :-1].mean(), io["loss"] - extra, TOLERANCE)
    # Each next token is the likeliest after those before it, so the whole text equals greedy decoding.
    prompt = greedy.shape[1] - 8
    np.testing.assert_array_equal(greedy[:, :prompt], ids[:, :prompt])
    np.testing.assert_array_equal(actual["logits"][len(ids) :, prompt - 1 : -1].argmax(-1), greedy[:, prompt:])
    compare.finish()
