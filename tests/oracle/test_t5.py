"""T5 against Megatron-LM's: logits, losses and gradients, in float32."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from megatron_cases import Comparison, Settings, cases, load_arrays, load_json
from megatron_config import WITHOUT_EFFECT, attention_config, mlp_config, norm_config
from megatron_run import OneDevice
from megatron_weights import to_megatron, to_ours, weight_by_rule
from test_numerics import LOGITS, check_gradients, check_weights

from megajax.layers.attention.config import CrossAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.norm.config import IdentityNormConfig
from megajax.layers.param import bind
from megajax.layers.position.config import RelativeBiasConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.t5.config import T5Config

META = load_json("numerics/other_models_meta.json")
SECTIONS = ("encoder", "decoder")


def t5_config(meta: dict[str, Any], rows: dict[str, np.ndarray]) -> T5Config:
    """T5 as Megatron-LM's settings describe it."""
    shapes, positions = meta["params"], meta["position_embedding_type"]
    relative = positions == "relative"
    core = Settings(meta["config"]["config"])
    outer = Settings(meta["config"]["model"] | {"position_embedding_type": "none" if relative else positions})
    vocabulary, hidden = shapes["embedding.word_embeddings.weight"]
    bias, norm = core.take("add_bias_linear", True), norm_config(core, "LayerNorm")
    mlp = mlp_config(core, core.take("ffn_hidden_size", 4 * hidden), bias)
    mixer = attention_config(core, outer, norm, bias, rows["encoder_tokens"].shape[1])
    sizes = {"buckets": meta["relative_attention_num_buckets"], "distance": meta["relative_attention_max_distance"]}
    tables = [RelativeBiasConfig(**sizes, shared=True, both_ways=both) if relative else None for both in (True, False)]
    read = BlockConfig(mixer=replace(mixer, causal=False, relative=tables[0]), mlp=mlp, norm=norm)
    shared = {field.name: getattr(mixer, field.name) for field in fields(mixer)}
    cross = CrossAttentionConfig(**{**shared, "causal": False, "rope": None})
    write = BlockConfig(mixer=replace(mixer, relative=tables[1]), cross=cross, mlp=mlp, norm=norm)
    layers = [len({name.split(".")[2] for name in shapes if name.startswith(f"{part}.layers.")}) for part in SECTIONS]
    assert core.take("num_layers") == layers[1] and core.take("hidden_size") == hidden
    for name in ("hidden_dropout", "attention_dropout"):
        core.only(name, 0.0)
    for name in ("vocab_size", "max_sequence_length", "position_embedding_type", *sizes_of_tables(outer)):
        outer.take(name)
    tied = "lm_head.output_layer.bias" in shapes
    outer.take("share_embeddings_and_output_weights")
    core.finish(WITHOUT_EFFECT)
    outer.finish(WITHOUT_EFFECT)
    return T5Config(
        hidden=hidden,
        vocabulary_size=vocabulary,
        sequence_length=rows["tokens"].shape[1],
        encoder_length=rows["encoder_tokens"].shape[1],
        encoder=StackConfig(pattern=(read,), repeats=layers[0]),
        stack=StackConfig(pattern=(write,), repeats=layers[1]),
        learned_positions=positions == "learned_absolute",
        norm=norm if "decoder.final_layernorm.weight" in shapes else IdentityNormConfig(),
        tied=tied,
        head_bias=tied,
    )


def sizes_of_tables(outer: Settings) -> list[str]:
    """Settings of relative positions, which the case states outside too."""
    return [name for name in outer.left if name.startswith("relative_attention_")]


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
