"""ViT against Megatron-LM's CLIPViTModel and Hugging Face's classifier, in float32."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from megatron_cases import Comparison, Settings, cases, load_arrays, load_json, unsupported
from megatron_config import WITHOUT_EFFECT, attention_config, mlp_config, norm_config
from megatron_run import OneDevice
from megatron_weights import Piece, from_pieces, images_pieces, into_pieces, weight_by_rule
from test_huggingface import ACTIVATIONS, TOLERANCE, UNUSED, Checkpoint, Tensors, kinds, read_safetensors
from test_numerics import LOGITS, check_gradients, check_weights

from megajax.layers.config import (
    AttentionConfig,
    BlockConfig,
    DenseMLPConfig,
    IdentityNormConfig,
    LayerNormConfig,
    StackConfig,
)
from megajax.layers.param import bind
from megajax.models.config.vision import VisionTowerConfig
from megajax.models.config.vit import ClassifierConfig, ViTConfig

META = load_json("numerics/other_models_meta.json")


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


def pixels_last(images: np.ndarray) -> np.ndarray:
    """[B, 3, H, W] -> [B, H, W, 3]."""
    return np.ascontiguousarray(images.transpose(0, 2, 3, 1), np.float32)


@pytest.mark.parametrize("case", cases({name for name in META if "patch_dim" in META[name]}))
def test_megatron(case: str) -> None:
    meta, stored = META[case], load_arrays(f"numerics/{case}.npz")
    model, compare = OneDevice(tower_config(meta)), Comparison(case)
    weights = {name: weight_by_rule(name, shape) for name, shape in meta["params"].items()}
    check_weights(compare, stored, weights)
    table: dict[str, Piece] = images_pieces(model.cfg)
    assert list(table) == list(weights)
    params, draw = model.checked(into_pieces(table, weights)), np.random.RandomState(7)
    images = draw.standard_normal((len(stored["output"]), 3, meta["img_h"], meta["img_w"])).astype(np.float32)
    target = draw.standard_normal(stored["output"].shape).astype(np.float32)

    def loss(params: Any, images: Any) -> tuple[Any, Any]:
        states = bind(model.abstract, params).states(images)
        return jnp.mean(states * target), states

    (total, states), grads = model(jax.value_and_grad(loss, has_aux=True), params, pixels_last(images))
    compare.check("output", states, stored["output"], LOGITS)
    compare.check("loss", total, stored["loss"], LOGITS)
    noise = {name for name in table if name.endswith("k_layernorm.bias")}
    check_gradients(compare, stored, from_pieces(table, grads), noise)
    compare.finish()


def huggingface_config(given: Settings, classes: int) -> ViTConfig:
    given.only("model_type", "vit")
    hidden, size = given.take("hidden_size"), given.take("image_size")
    named = given.take("hidden_act", "gelu")
    if named not in ACTIVATIONS:
        unsupported(f"hidden_act={named}")
    given.only("num_channels", 3)
    norm = LayerNormConfig(epsilon=given.take("layer_norm_eps", 1e-12))
    mixer = AttentionConfig(
        heads=given.take("num_attention_heads"), qkv_bias=given.take("qkv_bias", True), bias=True, causal=False
    )
    mlp = DenseMLPConfig(ffn=given.take("intermediate_size"), activation=ACTIVATIONS[named])
    block = BlockConfig(mixer=mixer, mlp=mlp, norm=norm)
    return ViTConfig(
        hidden=hidden,
        stack=StackConfig(pattern=(block,), repeats=given.take("num_hidden_layers")),
        height=size,
        width=size,
        patch=given.take("patch_size", 16),
        norm=norm,
        head=ClassifierConfig(classes=classes),
    )


def huggingface_weights(cfg: ViTConfig, held: Checkpoint) -> Tensors:
    """Matrices are (out, in)."""
    heads, layer, b = cfg.stack.pattern[0].mixer.heads, "vit.encoder.layer.{}", "stack.blocks.0"
    actual = {
        "patches": held.one("vit.embeddings.patch_embeddings.projection.weight", patches_last),
        "patch_bias": held.one("vit.embeddings.patch_embeddings.projection.bias"),
        "class_tokens": held.one("vit.embeddings.cls_token", lambda w: w[0]),
        "positions": held.one("vit.embeddings.position_embeddings", lambda w: w[0]),
        f"{b}.mixer.output": held.each(
            f"{layer}.attention.output.dense.weight", lambda w: w.T.reshape(heads, -1, w.shape[0])
        ),
        f"{b}.mixer.output_bias": held.each(f"{layer}.attention.output.dense.bias"),
        f"{b}.mlp.up": held.each(f"{layer}.intermediate.dense.weight", np.transpose),
        f"{b}.mlp.up_bias": held.each(f"{layer}.intermediate.dense.bias"),
        f"{b}.mlp.down": held.each(f"{layer}.output.dense.weight", np.transpose),
        f"{b}.mlp.down_bias": held.each(f"{layer}.output.dense.bias"),
        "head.linear.matrix": held.one("classifier.weight", np.transpose),
        "head.linear.bias": held.one("classifier.bias"),
    }
    for name in ("query", "key", "value"):
        there = f"{layer}.attention.attention.{name}"
        actual[f"{b}.mixer.{name}"] = held.each(f"{there}.weight", lambda w: w.T.reshape(w.shape[1], heads, -1))
        if cfg.stack.pattern[0].mixer.has_qkv_bias():
            actual[f"{b}.mixer.{name}_bias"] = held.each(f"{there}.bias", lambda w: w.reshape(heads, -1))
    actual |= held.norm(f"{b}.mixer_norm", f"{layer}.layernorm_before")
    return actual | held.norm(f"{b}.mlp_norm", f"{layer}.layernorm_after") | held.norm("norm", "vit.layernorm")


def patches_last(weight: np.ndarray) -> np.ndarray:
    """A convolution's [D, 3, rows, columns] -> [rows * columns * 3, D]."""
    return weight.transpose(2, 3, 1, 0).reshape(-1, weight.shape[0])


IGNORED = UNUSED | {
    "attention_probs_dropout_prob", "encoder_stride", "hidden_dropout_prob", "id2label", "label2id", "pooler_act",
    "pooler_output_size", "problem_type",
}  # fmt: skip


@pytest.mark.parametrize("case", cases(case for case, kind in kinds().items() if kind == "vit"))
def test_huggingface(case: str, oracle_dir: Path) -> None:
    folder = oracle_dir / "hf" / case
    tensors = read_safetensors(folder / "model.safetensors")
    given = Settings(json.loads((folder / "config.json").read_text()))
    model = OneDevice(huggingface_config(given, len(tensors["classifier.bias"])))
    given.finish(IGNORED)
    held = Checkpoint(tensors, model.cfg.stack.layers())
    params = model.checked(huggingface_weights(model.cfg, held))
    assert held.used == set(held.tensors)
    with np.load(folder / "io.npz") as stored:
        io: dict[str, Any] = dict(stored)
    images, labels, compare = pixels_last(io["pixel_values"]), io["labels"].astype(np.int32), Comparison(case)
    logits = model(lambda params, images: bind(model.abstract, params)(images), params, images)
    compare.check("logits", logits, io["logits"], TOLERANCE)
    batch = {"images": images[None], "labels": labels[None], "sample": np.arange(len(labels), dtype=np.uint32)[None]}
    compare.check("loss", model.gradients(params, batch, "tokens")["reported"], io["loss"], TOLERANCE)
    compare.finish()
