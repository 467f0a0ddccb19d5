"""Hugging Face's BERT, normalised after each sum, in ours: logits of both heads and loss, in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_cases import Comparison, Settings, cases, unsupported
from megatron_run import OneDevice
from test_huggingface import ACTIVATIONS, TOLERANCE, UNUSED, Checkpoint, Tensors, kinds, read_safetensors

from megajax.layers.config import (
    AttentionConfig,
    DenseMLPConfig,
    IdentityNormConfig,
    LayerNormConfig,
    PostNormBlockConfig,
    StackConfig,
)
from megajax.layers.param import bind
from megajax.models.config import BertConfig

IGNORED = {
    # About dropout and other heads.
    *("add_cross_attention", "attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob"),
    *("gradient_checkpointing", "is_decoder"),
}


def bert_config(given: Settings, length: int) -> BertConfig:
    """For rows of `length` tokens."""
    norm, named = LayerNormConfig(epsilon=given.take("layer_norm_eps", 1e-12)), given.take("hidden_act", "gelu")
    # The head of masked tokens uses the same function, ours gelu.
    if named != "gelu":
        unsupported(f"hidden_act={named}")
    given.only("position_embedding_type", "absolute")
    given.only("tie_word_embeddings", True)
    block = PostNormBlockConfig(
        mixer=AttentionConfig(heads=given.take("num_attention_heads"), bias=True, causal=False),
        mlp=DenseMLPConfig(ffn=given.take("intermediate_size"), activation=ACTIVATIONS[named]),
        norm=norm,
    )
    assert length <= given.take("max_position_embeddings")
    return BertConfig(
        hidden=given.take("hidden_size"),
        vocabulary_size=given.take("vocab_size"),
        sequence_length=length,
        stack=StackConfig(pattern=(block,), repeats=given.take("num_hidden_layers")),
        norm=IdentityNormConfig(),
        embedding_norm=norm,
        head_norm=norm,
        token_types=given.take("type_vocab_size", 2),
    )


def bert_weights(cfg: BertConfig, held: Checkpoint) -> Tensors:
    """By our paths. Matrices are (out, in); of positions, only those of our rows are used."""
    mixer, b, layer = cfg.stack.pattern[0].mixer, "stack.blocks.0", "bert.encoder.layer.{}"
    heads = mixer.heads, mixer.size(cfg.hidden)
    padding = cfg.padded_vocabulary() - cfg.vocabulary_size
    actual = {
        "tokens": held.one("bert.embeddings.word_embeddings.weight", lambda w: np.pad(w, ((0, padding), (0, 0)))),
        "positions": held.one("bert.embeddings.position_embeddings.weight", lambda w: w[: cfg.sequence_length]),
        "types": held.one("bert.embeddings.token_type_embeddings.weight"),
        "masked_bias": held.one("cls.predictions.bias", lambda w: np.pad(w, (0, padding))),
        "order": held.one("cls.seq_relationship.weight", np.transpose),
        "order_bias": held.one("cls.seq_relationship.bias"),
    }
    for ours, theirs in (("masked", "cls.predictions.transform.dense"), ("pooler", "bert.pooler.dense")):
        actual |= {
            f"{ours}.matrix": held.one(f"{theirs}.weight", np.transpose),
            f"{ours}.bias": held.one(f"{theirs}.bias"),
        }
    for name in ("query", "key", "value"):
        theirs = f"{layer}.attention.self.{name}"
        actual[f"{b}.mixer.{name}"] = held.each(f"{theirs}.weight", lambda w: w.T.reshape(cfg.hidden, *heads))
        actual[f"{b}.mixer.{name}_bias"] = held.each(f"{theirs}.bias", lambda w: w.reshape(heads))
    output = f"{layer}.attention.output.dense"
    actual[f"{b}.mixer.output"] = held.each(f"{output}.weight", lambda w: w.T.reshape(*heads, cfg.hidden))
    actual[f"{b}.mixer.output_bias"] = held.each(f"{output}.bias")
    for ours, theirs in (("up", "intermediate"), ("down", "output")):
        actual[f"{b}.mlp.{ours}"] = held.each(f"{layer}.{theirs}.dense.weight", np.transpose)
        actual[f"{b}.mlp.{ours}_bias"] = held.each(f"{layer}.{theirs}.dense.bias")
    actual |= held.norm(f"{b}.mixer_norm", f"{layer}.attention.output.LayerNorm")
    actual |= held.norm(f"{b}.mlp_norm", f"{layer}.output.LayerNorm")
    actual |= held.norm("embedding_norm", "bert.embeddings.LayerNorm")
    return actual | held.norm("masked_norm", "cls.predictions.transform.LayerNorm")


@pytest.mark.parametrize("case", cases(case for case, kind in kinds().items() if kind == "bert"))
def test_checkpoint(case: str, oracle_dir: Path) -> None:
    folder, compare = oracle_dir / "hf" / case, Comparison(case)
    with np.load(folder / "io.npz") as stored:
        io: dict[str, Any] = dict(stored)
    given = Settings(json.loads((folder / "config.json").read_text()))
    cfg = bert_config(given, io["input_ids"].shape[1])
    given.finish(UNUSED | IGNORED)
    held = Checkpoint(read_safetensors(folder / "model.safetensors"), cfg.stack.layers())
    model = OneDevice(cfg)
    params = model.checked(bert_weights(cfg, held))
    copies = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "bert.embeddings.position_ids"}
    assert held.used == set(held.tensors) - copies
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
