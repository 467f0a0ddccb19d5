"""T5 against Megatron-LM's: logits, losses and gradients, in float32."""

from typing import Any

import numpy as np
import pytest
from megatron_cases import Comparison, cases, load_arrays, load_json, unsupported
from megatron_run import OneDevice
from megatron_weights import to_megatron, to_ours, weight_by_rule
from test_numerics import LOGITS, check_gradients, check_weights

from megajax.layers.config import (
    AttentionConfig,
    BlockConfig,
    DenseMLPConfig,
    IdentityNormConfig,
    LayerNormConfig,
    StackConfig,
)
from megajax.layers.config.cross import CrossAttentionConfig, CrossBlockConfig
from megajax.layers.param import bind
from megajax.models.config import T5Config

META = load_json("numerics/other_models_meta.json")


def t5_config(meta: dict[str, Any], rows: dict[str, np.ndarray]) -> T5Config:
    """T5 as Megatron-LM's settings describe it."""
    if meta["position_embedding_type"] != "learned_absolute":
        unsupported(f"T5 with positions {meta['position_embedding_type']}")
    shapes, given = meta["params"], meta["config"]["config"]
    vocabulary, hidden = shapes["embedding.word_embeddings.weight"]
    heads, norm = given["num_attention_heads"], LayerNormConfig(epsilon=given.get("layernorm_epsilon", 1e-5))
    mlp = DenseMLPConfig(ffn=shapes["encoder.layers.0.mlp.linear_fc1.weight"][0], bias=True, activation="gelu")
    read = BlockConfig(mixer=AttentionConfig(heads=heads, bias=True, causal=False), mlp=mlp, norm=norm)
    write = CrossBlockConfig(
        mixer=AttentionConfig(heads=heads, bias=True),
        cross=CrossAttentionConfig(heads=heads, bias=True),
        mlp=mlp,
        norm=norm,
    )
    return T5Config(
        hidden=hidden,
        vocabulary_size=vocabulary,
        sequence_length=rows["tokens"].shape[1],
        encoder_length=rows["encoder_tokens"].shape[1],
        encoder=StackConfig(pattern=(read,), repeats=given["num_layers"]),
        stack=StackConfig(pattern=(write,), repeats=given["num_layers"]),
        learned_positions=True,
        norm=norm if "decoder.final_layernorm.weight" in shapes else IdentityNormConfig(),
    )


@pytest.mark.parametrize("case", cases({name for name in META if "relative_attention_num_buckets" in META[name]}))
def test_model(case: str) -> None:
    meta, stored = META[case], load_arrays(f"numerics/{case}.npz")
    leaves = {"encoder_tokens": "enc_tokens", "tokens": "dec_tokens", "labels": "labels"}
    rows = {ours: stored[theirs].astype(np.int32) for ours, theirs in leaves.items()}
    # Their masks are True where a key is hidden; a padding key is hidden from every query.
    rows["encoder_segment_ids"] = (~stored["enc_mask"][:, 0].all(1)).astype(np.int32)
    rows["segment_ids"] = (~stored["dec_mask"][:, 0].all(1)).astype(np.int32)
    rows["loss_mask"] = stored["loss_mask"]
    model, compare = OneDevice(t5_config(meta, rows)), Comparison(case)
    weights = {name: weight_by_rule(name, shape) for name, shape in meta["params"].items()}
    check_weights(compare, stored, weights)
    params = to_ours(model.cfg, weights)

    def forward(params: Any, rows: Any) -> Any:
        names = ("tokens", "segment_ids", "encoder_tokens", "encoder_segment_ids")
        return bind(model.abstract, params)(**{name: rows[name] for name in names})

    logits = model(forward, model.checked(params), rows)
    real = rows["segment_ids"][:, ::4] == 1
    compare.check("logits", logits[:, ::4][real], stored["logits_every4th"][real], LOGITS)

    batch = {name: leaf[None] for name, leaf in rows.items()}
    batch["sample"] = np.arange(len(rows["tokens"]), dtype=np.uint32)[None]
    gradients = model.gradients(params, batch, "microbatches")
    compare.check("loss", gradients["minimised"], stored["loss"], LOGITS)
    names = [name for name in meta["params"] if name.endswith("linear_qkv.bias") or name.endswith("linear_kv.bias")]
    assert names
    check_gradients(compare, stored, to_megatron(model.cfg, gradients["grads"]), set())
    compare.finish()
