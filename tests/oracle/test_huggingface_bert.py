"""BERT of transformers, normalised after each sum: logits of both heads and loss, in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_cases import TOLERANCE, arrays, folders, opened, stored
from megatron_cases import Comparison, cases
from megatron_run import OneDevice

from megajax.layers.param import bind


@pytest.mark.parametrize("case", cases(folders(lambda kind: kind in ("bert", "megatron-bert"))))
def test_checkpoint(case: str, oracle_dir: Path) -> None:
    folder, compare = oracle_dir / "hf" / case, Comparison(case)
    io = stored(folder)
    opening = opened(folder)
    model, (params, _) = OneDevice(opening.model), arrays(opening)
    leaves = {"tokens": "input_ids", "segment_ids": "attention_mask", "token_types": "token_type_ids"}
    rows = {ours: io[theirs].astype(np.int32) for ours, theirs in leaves.items()}
    labels = io["labels"].astype(np.int32)
    rows |= {"labels": np.maximum(labels, 0), "loss_mask": (labels >= 0).astype(np.float32)}
    rows["is_random"] = io["next_sentence_label"].astype(np.int32).reshape(-1)

    def forward(params: Any, rows: Any) -> Any:
        bert = bind(model.abstract, params)
        ctx = bert.context(rows)
        x = bert.final_norm(bert.stack(bert.enter(bert.embed(rows), ctx), ctx))
        return bert(rows["tokens"], None, rows["segment_ids"], rows["token_types"]), bert.order_logits(x)

    logits, order = model(forward, params, rows)
    real = io["attention_mask"].astype(bool)
    compare.check("logits", logits[real], io["prediction_logits"][real], TOLERANCE)
    compare.check("order of sentences", order, io["seq_relationship_logits"], TOLERANCE)
    batch = {name: leaf[None] for name, leaf in rows.items()}
    batch["sample"] = np.arange(len(labels), dtype=np.uint32)[None]
    compare.check("loss", model.gradients(params, batch, "microbatches")["minimised"], io["loss"], TOLERANCE)
    compare.finish()
