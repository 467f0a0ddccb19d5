"""BERT, T5 and ViT of transformers, in float32: logits, losses and a round trip of every checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_cases import ENCODERS, TOLERANCE, arrays, check_round_trip, folders, opened, pixels_last, stored
from megatron_cases import Comparison, cases
from megatron_run import OneDevice

from megajax.layers.param import bind
from megajax.models.t5.module import EncoderSection

BERT, T5 = ("bert", "megatron-bert"), ("t5", "mt5")


def compare_loss(
    compare: Comparison,
    model: OneDevice,
    params: Mapping[str, np.ndarray],
    rows: Mapping[str, np.ndarray],
    loss: float,
    average: Any,
) -> None:
    """The minimised loss of one microbatch of these rows."""
    batch = {name: leaf[None] for name, leaf in rows.items()}
    batch["sample"] = np.arange(len(rows["tokens"]), dtype=np.uint32)[None]
    compare.check("loss", model.gradients(params, batch, average)["minimised"], loss, TOLERANCE)
    compare.finish()


@pytest.mark.parametrize("case", cases(folders(lambda kind: kind in BERT)))
def test_bert(case: str, oracle_dir: Path) -> None:
    """Normalised after each sum: logits of both heads, and loss."""
    folder, compare = oracle_dir / "hf" / case, Comparison(case)
    io, opening = stored(folder), opened(folder)
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
    compare_loss(compare, model, params, rows, io["loss"], "microbatches")


@pytest.mark.parametrize("case", cases(folders(lambda kind: kind in T5)))
def test_t5(case: str, oracle_dir: Path) -> None:
    """Logits, loss and the encoder's output are compared."""
    folder, compare = oracle_dir / "hf" / case, Comparison(case)
    io, opening = stored(folder), opened(folder)
    start, padding = opening.origin.settings["decoder_start_token_id"], opening.origin.settings["pad_token_id"]
    labels, counted = io["labels"].astype(np.int32), io["labels"] >= 0
    model, (params, _) = OneDevice(opening.model), arrays(opening)
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
    compare_loss(compare, model, params, rows, io["loss"], "tokens")


@pytest.mark.parametrize("case", cases(folders(lambda kind: kind == "vit")))
def test_vit(case: str, oracle_dir: Path) -> None:
    folder = oracle_dir / "hf" / case
    opening, io = opened(folder), stored(folder)
    model, (params, _) = OneDevice(opening.model), arrays(opening)
    images, labels, compare = pixels_last(io["pixel_values"]), io["labels"].astype(np.int32), Comparison(case)
    logits = model(lambda params, images: bind(model.abstract, params)(images), params, images)
    compare.check("logits", logits, io["logits"], TOLERANCE)
    batch = {"images": images[None], "labels": labels[None], "sample": np.arange(len(labels), dtype=np.uint32)[None]}
    compare.check("loss", model.gradients(params, batch, "tokens")["reported"], io["loss"], TOLERANCE)
    compare.finish()


@pytest.mark.parametrize("case", cases(folders(lambda kind: kind in ENCODERS)))
def test_a_run_reproduces_the_folder(case: str, oracle_dir: Path, tmp_path: Path) -> None:
    check_round_trip(oracle_dir / "hf" / case, tmp_path)
