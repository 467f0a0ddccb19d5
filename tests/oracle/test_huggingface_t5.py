"""Hugging Face's T5 in ours: logits, loss and the encoder's output of every checkpoint in the folder, in float32."""

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
    BlockConfig,
    DenseMLPConfig,
    GatedMLPConfig,
    MLPConfig,
    RelativeBiasConfig,
    RMSNormConfig,
    StackConfig,
)
from megajax.layers.config.cross import CrossAttentionConfig, CrossBlockConfig
from megajax.layers.param import bind
from megajax.models.config import T5Config, WidthScalingConfig
from megajax.models.t5 import Reading

IGNORED = {
    # About initial values, dropout, other heads and what text begins and ends with.
    *("classifier_dropout", "decoder_start_token_id", "dropout_rate", "initializer_factor"),
    *("is_decoder", "n_positions", "num_layers", "output_past", "task_specific_params"),
}


def t5_mlp(given: Settings) -> MLPConfig:
    """By `feed_forward_proj`, such as relu or gated-gelu, which is the tanh form."""
    named, ffn = given.take("feed_forward_proj", "relu"), given.take("d_ff")
    for derived in ("dense_act_fn", "is_gated_act"):
        given.take(derived)
    activation = "gelu_tanh" if named == "gated-gelu" else ACTIVATIONS.get(named.removeprefix("gated-"))
    if activation is None:
        unsupported(f"feed_forward_proj={named}")
    mlp = GatedMLPConfig if named.startswith("gated-") else DenseMLPConfig
    return mlp(ffn=ffn, activation=activation, bias=False)


def t5_config(given: Settings, length: int, encoder_length: int) -> T5Config:
    hidden, heads, size, tied = (given.take(name) for name in ("d_model", "num_heads", "d_kv", "tie_word_embeddings"))
    buckets, distance = given.take("relative_attention_num_buckets"), given.take("relative_attention_max_distance", 128)
    norm, mlp = RMSNormConfig(epsilon=given.take("layer_norm_epsilon", 1e-6)), t5_mlp(given)
    given.only("is_encoder_decoder", True)
    scaled = given.take("scale_decoder_outputs", tied)

    def attention(*, both_ways: bool) -> AttentionConfig:
        bias = RelativeBiasConfig(buckets=buckets, distance=distance, both_ways=both_ways, shared=True)
        return AttentionConfig(heads=heads, head_dim=size, scale=1.0, relative=bias, causal=not both_ways)

    cross = CrossAttentionConfig(heads=heads, head_dim=size, scale=1.0)
    write = CrossBlockConfig(mixer=attention(both_ways=False), cross=cross, mlp=mlp, norm=norm)
    layers = given.left["num_layers"]
    return T5Config(
        hidden=hidden,
        vocabulary_size=given.take("vocab_size"),
        sequence_length=length,
        encoder_length=encoder_length,
        encoder=StackConfig(
            pattern=(BlockConfig(mixer=attention(both_ways=True), mlp=mlp, norm=norm),), repeats=layers
        ),
        stack=StackConfig(pattern=(write,), repeats=given.take("num_decoder_layers", layers)),
        norm=norm,
        tied=tied,
        head_bias=False,
        width_scaling=WidthScalingConfig(base_hidden=hidden, output=hidden**-0.5) if scaled else None,
    )


def section(cfg: T5Config, tensors: Tensors, name: str) -> tuple[Checkpoint, Tensors]:
    """The weights of `encoder` or `decoder`, by paths after the section's. Matrices are (out, in)."""
    held = Checkpoint(tensors, (cfg.encoder if name == "encoder" else cfg.stack).layers())
    block, (heads, size) = (
        f"{name}.block.{{}}.layer",
        (cfg.stack.pattern[0].mixer.heads, cfg.stack.pattern[0].cross.head_dim),
    )

    def attention(path: str, theirs: str) -> Tensors:
        actual = {
            f"{path}.{ours}": held.each(f"{theirs}.{letter}.weight", lambda w: w.T.reshape(cfg.hidden, heads, size))
            for ours, letter in (("query", "q"), ("key", "k"), ("value", "v"))
        }
        output = held.each(f"{theirs}.o.weight", lambda w: w.T.reshape(heads, size, cfg.hidden))
        return actual | {f"{path}.output": output}

    b, last = "stack.blocks.0", 1
    actual = attention(f"{b}.mixer", f"{block}.0.SelfAttention") | held.norm(f"{b}.mixer_norm", f"{block}.0.layer_norm")
    if name == "decoder":
        actual |= attention(f"{b}.cross", f"{block}.1.EncDecAttention")
        actual |= held.norm(f"{b}.cross_norm", f"{block}.1.layer_norm")
        last = 2
    mlp = f"{block}.{last}.DenseReluDense"
    gated = {"gate": "wi_0", "up": "wi_1", "down": "wo"}
    names = gated if isinstance(cfg.stack.pattern[0].mlp, GatedMLPConfig) else {"up": "wi", "down": "wo"}
    actual |= {f"{b}.mlp.{ours}": held.each(f"{mlp}.{theirs}.weight", np.transpose) for ours, theirs in names.items()}
    actual |= held.norm(f"{b}.mlp_norm", f"{block}.{last}.layer_norm")
    table = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    actual["stack.relative.table"] = held.one(table)
    return held, actual | held.norm("norm", f"{name}.final_layer_norm")


def t5_weights(cfg: T5Config, tensors: Tensors) -> Tensors:
    """By our paths; every one of theirs must be used, copies of the shared table aside."""
    read, encoder = section(cfg, tensors, "encoder")
    written, decoder = section(cfg, tensors, "decoder")
    actual = {f"encoder.{path}": w for path, w in encoder.items()} | decoder
    padding = ((0, cfg.padded_vocabulary() - cfg.vocabulary_size), (0, 0))
    actual["tokens"] = np.pad(read.one("shared.weight"), padding)
    if not cfg.tied:
        actual["head"] = np.pad(read.one("lm_head.weight"), padding)
    copies = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"} | (
        {"lm_head.weight"} if cfg.tied else set()
    )
    assert read.used | written.used == set(tensors) - copies
    return actual


@pytest.mark.parametrize("case", cases(case for case, kind in kinds().items() if kind in ("t5", "mt5")))
def test_checkpoint(case: str, oracle_dir: Path) -> None:
    folder = oracle_dir / "hf" / case
    with np.load(folder / "io.npz") as stored:
        io: dict[str, Any] = dict(stored)
    given = Settings(json.loads((folder / "config.json").read_text()))
    start, padding = given.left["decoder_start_token_id"], given.left["pad_token_id"]
    labels, compare = io["labels"].astype(np.int32), Comparison(case)
    cfg = t5_config(given, labels.shape[1], io["input_ids"].shape[1])
    given.finish(UNUSED | IGNORED)
    model = OneDevice(cfg)
    params = model.checked(t5_weights(cfg, read_safetensors(folder / "model.safetensors")))
    counted = labels >= 0
    shifted = np.concatenate([np.full_like(labels[:, :1], start), np.where(counted, labels, padding)[:, :-1]], axis=1)
    rows = {
        "encoder_tokens": io["input_ids"].astype(np.int32),
        "encoder_segment_ids": io["attention_mask"].astype(np.int32),
        "tokens": shifted,
        "labels": np.where(counted, labels, 0),
        "loss_mask": counted.astype(np.float32),
        # Theirs hides no padding of the decoder.
        "segment_ids": np.ones_like(labels),
    }

    def forward(params: Any, rows: Any) -> Any:
        t5 = bind(model.abstract, params)
        reading = Reading(t5)
        ctx = reading.context(rows, None)
        memory = reading.leave(reading.stack(reading.enter(reading.embed(rows), ctx), ctx), ctx)
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
