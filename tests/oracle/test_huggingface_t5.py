"""T5 of transformers: logits, loss and the encoder's output of every checkpoint in the folder, in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_cases import TOLERANCE, arrays, folders, opened, stored
from megatron_cases import Comparison, cases
from megatron_run import OneDevice

from megajax.layers.param import bind
from megajax.models.t5.module import EncoderSection


@pytest.mark.parametrize("case", cases(folders(lambda kind: kind in ("t5", "mt5"))))
def test_checkpoint(case: str, oracle_dir: Path) -> None:
    folder = oracle_dir / "hf" / case
    io = stored(folder)
    opening = opened(folder)
    start, padding = opening.origin.settings["decoder_start_token_id"], opening.origin.settings["pad_token_id"]
    labels, compare = io["labels"].astype(np.int32), Comparison(case)
    model, (params, _) = OneDevice(opening.model), arrays(opening)
    counted = labels >= 0
    shifted = np.concatenate([np.full_like(labels[:, :1], start), np.where(counted, labels, padding)[:, :-1]], axis=1)
    rows = {
        "encoder_tokens": io["input_ids"].astype(np.int32),
        "encoder_segment_ids": io["attention_mask"].astype(np.int32),
        "tokens": shifted,
        "labels": np.where(counted, labels, 0),
        "loss_mask": counted.astype(np.float32),
        # Theirs does not mask padding of the decoder.
        "segment_ids": np.ones_like(labels),
    }

    def forward(params: Any, rows: Any) -> Any:
        t5 = bind(model.abstract, params)
        section = EncoderSection(t5)
        ctx = section.context(rows, None)
        memory = section.leave(section.stack(section.enter(section.embed(rows), ctx), ctx), ctx)
        names = ("tokens", "segment_ids", "encoder_tokens", "encoder_segment_ids")
        return t5(**{name: rows[name] for name in names}), memory

    logits, memory = model(forward, params, rows)
    read = io["attention_mask"].astype(bool)
    compare.check("logits", logits, io["logits"], TOLERANCE)
    compare.check("encoder's output", memory[read], io["encoder_last_hidden_state"][read], TOLERANCE)
    batch = {name: leaf[None] for name, leaf in rows.items()}
    batch["sample"] = np.arange(len(labels), dtype=np.uint32)[None]
    compare.check("loss", model.gradients(params, batch, "tokens")["minimised"], io["loss"], TOLERANCE)
    compare.finish()
