"""ViT against Megatron-LM's CLIPViTModel and Hugging Face's classifier, in float32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_cases import TOLERANCE, arrays, folders, opened, stored
from megatron_cases import Comparison, Settings, cases, load_arrays, load_json
from megatron_config import WITHOUT_EFFECT, attention_config, mlp_config, norm_config
from megatron_run import OneDevice
from megatron_weights import tensors, to_megatron, to_ours, weight_by_rule
from test_numerics import LOGITS, check_gradients, check_weights

from megajax.layers.block.config import BlockConfig
from megajax.layers.norm.config import IdentityNormConfig
from megajax.layers.param import bind
from megajax.layers.stack.config import StackConfig
from megajax.models.vision.config import VisionTowerConfig

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
    assert list(tensors(model.cfg)) == list(weights)
    params, draw = model.checked(to_ours(model.cfg, weights)), np.random.RandomState(7)
    images = draw.standard_normal((len(stored["output"]), 3, meta["img_h"], meta["img_w"])).astype(np.float32)
    target = draw.standard_normal(stored["output"].shape).astype(np.float32)

    def loss(params: Any, images: Any) -> tuple[Any, Any]:
        states = bind(model.abstract, params).states(images)
        return jnp.mean(states * target), states

    (total, states), grads = model(jax.value_and_grad(loss, has_aux=True), params, pixels_last(images))
    compare.check("output", states, stored["output"], LOGITS)
    compare.check("loss", total, stored["loss"], LOGITS)
    noise = {name for name in weights if name.endswith("k_layernorm.bias")}
    check_gradients(compare, stored, to_megatron(model.cfg, grads), noise)
    compare.finish()


@pytest.mark.parametrize("case", cases(folders(lambda kind: kind == "vit")))
def test_huggingface(case: str, oracle_dir: Path) -> None:
    folder = oracle_dir / "hf" / case
    opening, io = opened(folder), stored(folder)
    model, (params, _) = OneDevice(opening.model), arrays(opening)
    images, labels, compare = pixels_last(io["pixel_values"]), io["labels"].astype(np.int32), Comparison(case)
    logits = model(lambda params, images: bind(model.abstract, params)(images), params, images)
    compare.check("logits", logits, io["logits"], TOLERANCE)
    batch = {"images": images[None], "labels": labels[None], "sample": np.arange(len(labels), dtype=np.uint32)[None]}
    compare.check("loss", model.gradients(params, batch, "tokens")["reported"], io["loss"], TOLERANCE)
    compare.finish()
