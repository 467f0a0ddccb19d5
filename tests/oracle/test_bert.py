"""BERT against Megatron-LM's: logits of both heads, losses and gradients, in float32."""

from typing import Any

import numpy as np
import pytest
from megatron_cases import Comparison, cases, load_arrays, load_json
from megatron_run import OneDevice
from megatron_weights import to_megatron, to_ours, weight_by_rule
from test_numerics import LOGITS, check_gradients, check_weights, noise_of

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.param import bind
from megajax.layers.stack.config import StackConfig
from megajax.models.bert.config import BertConfig

META = load_json("numerics/other_models_meta.json")


def bert_config(meta: dict[str, Any]) -> BertConfig:
    """BERT as Megatron-LM's settings describe it."""
    shapes, given = meta["params"], meta["config"]["config"]
    vocabulary, hidden = shapes["embedding.word_embeddings.weight"]
    length = shapes["embedding.position_embeddings.weight"][0]
    ffn = shapes["encoder.layers.0.mlp.linear_fc1.weight"][0]
    norm = LayerNormConfig(epsilon=given.get("layernorm_epsilon", 1e-5))
    block = BlockConfig(
        mixer=AttentionConfig(heads=given["num_attention_heads"], bias=True, causal=False),
        mlp=DenseMLPConfig(ffn=ffn, bias=True, activation=given.get("activation_func", "gelu")),
        norm=norm,
    )
    return BertConfig(
        hidden=hidden,
        vocabulary_size=vocabulary,
        sequence_length=length,
        stack=StackConfig(pattern=(block,), repeats=given["num_layers"]),
        norm=norm,
        token_types=meta["num_tokentypes"],
        next_sentence="binary_head.weight" in shapes,
    )


@pytest.mark.parametrize("case", cases({name for name in META if "num_tokentypes" in META[name]}))
def test_model(case: str) -> None:
    meta, stored = META[case], load_arrays(f"numerics/{case}.npz")
    model, compare = OneDevice(bert_config(meta)), Comparison(case)
    weights = {name: weight_by_rule(name, shape) for name, shape in meta["params"].items()}
    check_weights(compare, stored, weights)
    params = to_ours(model.cfg, weights)
    leaves = {"tokens": "tokens", "token_types": "types", "segment_ids": "padding_mask", "labels": "labels"}
    rows = {ours: stored[theirs].astype(np.int32) for ours, theirs in leaves.items()}
    rows |= {"loss_mask": stored["loss_mask"], "is_random": stored["is_random"].astype(np.int32)}

    def forward(params: Any, rows: Any) -> dict[str, Any]:
        bert = bind(model.abstract, params)
        ctx = bert.context(rows)
        x = bert.final_norm(bert.stack(bert.enter(bert.embed(rows), ctx), ctx))
        called = bert(**{name: rows[name] for name in ("tokens", "token_types", "segment_ids")})
        return {"logits": called, "order": bert.order_logits(x)}

    actual = model(forward, model.checked(params), rows)
    real = stored["padding_mask"].astype(bool)
    compare.check("logits", actual["logits"][:, ::4][real[:, ::4]], stored["logits_every4th"][real[:, ::4]], LOGITS)
    compare.check("order of sentences", actual["order"], stored["binary_logits"], LOGITS)

    batch = {name: leaf[None] for name, leaf in rows.items()}
    batch["sample"] = np.arange(len(rows["tokens"]), dtype=np.uint32)[None]
    gradients = model.gradients(params, batch, "microbatches")
    compare.check("loss", gradients["minimised"], stored["loss"], LOGITS)
    masked = (stored["per_token_loss"] * stored["loss_mask"]).sum() / stored["loss_mask"].sum()
    compare.check("reported loss", gradients["reported"], masked, LOGITS)
    check_gradients(compare, stored, to_megatron(model.cfg, gradients["grads"]), noise_of(model))
    compare.finish()
