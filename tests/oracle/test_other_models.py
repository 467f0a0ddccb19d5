"""BERT, T5, ViT and hybrids against Megatron-LM's: logits, losses and gradients, in float32."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_cases import pixels_last
from megatron_cases import Comparison, Settings, cases, load_arrays, load_json
from megatron_config import WITHOUT_EFFECT, attention_config, hybrid_config, mlp_config, norm_config
from megatron_run import OneDevice, lm_batch
from megatron_weights import tensors, to_megatron, to_ours, weight_by_rule
from test_numerics import LOGITS, check_gradients, check_weights, noise_of

from megajax.layers.attention.config import AttentionConfig, CrossAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.norm.config import IdentityNormConfig, LayerNormConfig
from megajax.layers.param import bind
from megajax.layers.position.config import RelativeBiasConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.bert.config import BertConfig
from megajax.models.t5.config import T5Config
from megajax.models.vision.config import VisionTowerConfig

META = load_json("numerics/other_models_meta.json")
SECTIONS = ("encoder", "decoder")


def cases_with(setting: str) -> list[Any]:
    """The cases whose description has this setting."""
    return cases({name for name in META if setting in META[name]})


def given_weights(
    compare: Comparison, stored: Mapping[str, np.ndarray], model: OneDevice, weight: Any = weight_by_rule
) -> dict[str, np.ndarray]:
    """The case's weights by our paths."""
    weights = {name: weight(name, tuple(shape)) for name, shape in META[compare.case]["params"].items()}
    check_weights(compare, stored, weights)
    return model.checked(to_ours(model.cfg, weights))


def batch_of(rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One microbatch."""
    samples = np.arange(len(rows["tokens"]), dtype=np.uint32)
    return {name: leaf[None] for name, leaf in {**rows, "sample": samples}.items()}


def bert_rows(stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What BERT reads."""
    names = {"tokens": "tokens", "token_types": "types", "segment_ids": "padding_mask"}
    return {ours: stored[theirs].astype(np.int32) for ours, theirs in names.items()}


def t5_rows(stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What T5 reads. Their masks are True where a key is hidden; a padding key is hidden from every query."""
    rows = {"encoder_tokens": stored["enc_tokens"], "tokens": stored["dec_tokens"]}
    hidden = {"encoder_segment_ids": stored["enc_mask"], "segment_ids": stored["dec_mask"]}
    rows |= {name: ~mask[:, 0].all(1) for name, mask in hidden.items()}
    return {name: leaf.astype(np.int32) for name, leaf in rows.items()}


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


@pytest.mark.parametrize("case", cases_with("num_tokentypes"))
def test_bert(case: str) -> None:
    meta, stored = META[case], load_arrays(f"numerics/{case}.npz")
    model, compare = OneDevice(bert_config(meta)), Comparison(case)
    params = given_weights(compare, stored, model)
    rows = bert_rows(stored) | {"labels": stored["labels"].astype(np.int32)}
    rows |= {"loss_mask": stored["loss_mask"], "is_random": stored["is_random"].astype(np.int32)}

    def forward(params: Any, rows: Any) -> dict[str, Any]:
        bert = bind(model.abstract, params)
        ctx = bert.context(rows)
        x = bert.final_norm(bert.stack(bert.enter(bert.embed(rows), ctx), ctx))
        called = bert(**{name: rows[name] for name in ("tokens", "token_types", "segment_ids")})
        return {"logits": called, "order": bert.order_logits(x)}

    actual = model(forward, params, rows)
    real = stored["padding_mask"].astype(bool)
    compare.check("logits", actual["logits"][:, ::4][real[:, ::4]], stored["logits_every4th"][real[:, ::4]], LOGITS)
    compare.check("order of sentences", actual["order"], stored["binary_logits"], LOGITS)

    gradients = model.gradients(params, batch_of(rows), "microbatches")
    compare.check("loss", gradients["minimised"], stored["loss"], LOGITS)
    masked = (stored["per_token_loss"] * stored["loss_mask"]).sum() / stored["loss_mask"].sum()
    compare.check("reported loss", gradients["reported"], masked, LOGITS)
    check_gradients(compare, stored, to_megatron(model.cfg, gradients["grads"]), noise_of(model))
    compare.finish()


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


@pytest.mark.parametrize("case", cases_with("relative_attention_num_buckets"))
def test_t5(case: str) -> None:
    meta, stored = META[case], load_arrays(f"numerics/{case}.npz")
    rows = t5_rows(stored) | {"labels": stored["labels"].astype(np.int32), "loss_mask": stored["loss_mask"]}
    model, compare = OneDevice(t5_config(meta, rows)), Comparison(case)
    params = given_weights(compare, stored, model)

    def forward(params: Any, rows: Any) -> Any:
        names = ("tokens", "segment_ids", "encoder_tokens", "encoder_segment_ids")
        return bind(model.abstract, params)(**{name: rows[name] for name in names})

    logits = model(forward, params, rows)
    real = rows["segment_ids"][:, ::4] == 1
    compare.check("logits", logits[:, ::4][real], stored["logits_every4th"][real], LOGITS)

    gradients = model.gradients(params, batch_of(rows), "microbatches")
    compare.check("loss", gradients["minimised"], stored["loss"], LOGITS)
    names = [name for name in meta["params"] if name.endswith("linear_qkv.bias") or name.endswith("linear_kv.bias")]
    assert names
    check_gradients(compare, stored, to_megatron(model.cfg, gradients["grads"]), set())
    compare.finish()


def tower_config(meta: dict[str, Any]) -> VisionTowerConfig:
    """The tower as Megatron-LM's settings describe it."""
    shapes, core, outer = meta["params"], Settings(meta["config"]["config"]), Settings({})
    norm, hidden, bias = norm_config(core, "LayerNorm"), core.take("hidden_size"), core.take("add_bias_linear", True)
    mixer = attention_config(core, outer, norm, bias, shapes["position_embeddings.weight"][0])
    mlp = mlp_config(core, core.take("ffn_hidden_size", 4 * hidden), bias)
    block = BlockConfig(mixer=replace(mixer, causal=False), mlp=mlp, norm=norm)
    layers = core.take("num_layers")
    for name in ("hidden_dropout", "attention_dropout"):
        core.only(name, 0.0)
    core.finish(WITHOUT_EFFECT)
    return VisionTowerConfig(
        hidden=hidden,
        stack=StackConfig(pattern=(block,), repeats=layers),
        height=meta["img_h"],
        width=meta["img_w"],
        patch=meta["patch_dim"],
        patch_bias="conv1.bias" in shapes,
        class_tokens=shapes["class_token"][1] if "class_token" in shapes else 0,
        entry_norm=norm if "ln_pre.weight" in shapes else None,
        norm=norm if "ln_post.weight" in shapes else IdentityNormConfig(),
    )


@pytest.mark.parametrize("case", cases_with("patch_dim"))
def test_vit(case: str) -> None:
    meta, stored = META[case], load_arrays(f"numerics/{case}.npz")
    model, compare = OneDevice(tower_config(meta)), Comparison(case)
    assert list(tensors(model.cfg)) == list(meta["params"])
    params, draw = given_weights(compare, stored, model), np.random.RandomState(7)
    images = draw.standard_normal((len(stored["output"]), 3, meta["img_h"], meta["img_w"])).astype(np.float32)
    target = draw.standard_normal(stored["output"].shape).astype(np.float32)

    def loss(params: Any, images: Any) -> tuple[Any, Any]:
        states = bind(model.abstract, params).states(images)
        return jnp.mean(states * target), states

    (total, states), grads = model(jax.value_and_grad(loss, has_aux=True), params, pixels_last(images))
    compare.check("output", states, stored["output"], LOGITS)
    compare.check("loss", total, stored["loss"], LOGITS)
    noise = {name for name in meta["params"] if name.endswith("k_layernorm.bias")}
    check_gradients(compare, stored, to_megatron(model.cfg, grads), noise)
    compare.finish()


def weight_of_hybrid(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The value that the rule gives, which hybrids modify for three kinds of weights."""
    ruled, kind = weight_by_rule(name, shape), name.rsplit(".", 1)[-1]
    changed = {"D": 1 + ruled, "dt_bias": ruled - 2}
    if kind == "A_log":
        changed["A_log"] = np.log(np.linspace(1, 8, shape[0]))
    return changed.get(kind, ruled).astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("case", cases_with("hybrid_layer_pattern"))
def test_hybrid(case: str) -> None:
    meta, stored = META[case], load_arrays(f"numerics/{case}.npz")
    outer = {name: meta[name] for name in ("position_embedding_type",) if name in meta}
    shapes = {name: tuple(shape) for name, shape in meta["params"].items()}
    length, vocabulary = stored["tokens"].shape[1], shapes["embedding.word_embeddings.weight"][0]
    pattern = meta["hybrid_layer_pattern"]
    model = OneDevice(hybrid_config(meta["config"], outer, pattern, vocabulary=vocabulary, length=length))
    theirs = {name: array.shape for name, array in to_megatron(model.cfg, model.zeros()).items()}
    assert theirs == shapes
    compare = Comparison(case)
    params = given_weights(compare, stored, model, weight_of_hybrid)

    tokens, labels = (stored[name].astype(np.int32) for name in ("tokens", "labels"))
    batch = tokens, labels, stored["loss_mask"]
    actual = model.forward(params, tokens, labels)
    compare.check("logits", actual["logits"][:, ::4], stored["logits_every4th"], LOGITS)
    compare.check("token losses", actual["per_token_loss"], stored["per_token_loss"], LOGITS)
    gradients = model.gradients(params, lm_batch([batch]), "microbatches")
    compare.check("loss", gradients["minimised"], stored["loss"], LOGITS)
    grads = to_megatron(model.cfg, gradients["grads"])
    check_gradients(compare, stored, {name: grads[name] for name in shapes}, noise_of(model))
    compare.finish()
