"""ViT: its weights, operations and scores. tests/one_device.py has layouts."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_encoders import KINDS, SEEING, SIZE, images, intern, pixels, segmenting, siglip, vit
from tiny_runs import ONE, ROWS, build_program
from user_errors import user_error

from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.param import Normal, bind, specs
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.facts import flops_of
from megajax.models.presets import vit as presets
from megajax.models.reduction import LossReduction, quotient
from megajax.models.vit.config import (
    ClassifierConfig,
    MeanPoolingConfig,
    ViTConfig,
    with_image_head,
)


def build_model(cfg: ViTConfig) -> tuple[Any, dict[str, np.ndarray]]:
    """The module without values, and random values."""
    abstract = nnx.eval_shape(lambda: cfg.build(Layout(Plan.of(ONE))))
    rng = np.random.default_rng(0)
    deviations = {
        path: spec.init.std if isinstance(spec.init, Normal) else 0.1 for path, spec in specs(abstract).items()
    }
    return abstract, {
        path: rng.normal(spec.role == "gain", deviations[path], spec.shape).astype(np.float32)
        for path, spec in specs(abstract).items()
    }


def test_padding_changes_nothing() -> None:
    """The states of images are equal with and without positions that nothing attends to."""
    rows = images(0)["images"][:2]
    plain, padded = vit(positions_multiple=1), vit(positions_multiple=16)
    assert (plain.padding(), padded.padding()) == (0, 15)
    states = []
    for cfg in (plain, padded):
        abstract, params = build_model(cfg)
        states.append(
            jax.jit(lambda params, rows, abstract=abstract: bind(abstract, params).states(rows))(params, rows)
        )
    np.testing.assert_allclose(*states, rtol=1e-5, atol=1e-5)


def test_the_loss_equals_the_formula() -> None:
    """Labels are smoothed and images mixed; the reported loss has no smoothing."""
    cfg, batch = vit(), images(0)
    abstract, _ = build_model(cfg)
    logits = np.random.default_rng(1).normal(0, 1, (ROWS, KINDS)).astype(np.float32)
    rows = {name: jnp.asarray(leaf) for name, leaf in batch.items()}
    loss = abstract.head.loss(jnp.asarray(logits), rows, LossReduction())
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    one_hot, mix = np.eye(KINDS), batch["mix"][:, None]
    target = mix * one_hot[batch["labels"]] + (1 - mix) * one_hot[batch["other_labels"]]
    weight = batch["loss_mask"].sum()
    for name, target_row in (("loss", target), (None, 0.9 * target + 0.1 / KINDS)):
        expected = (-(target_row * log_p).sum(1) * batch["loss_mask"]).sum() / weight
        actual = quotient(*loss.metrics[name]) if name else loss.loss_sum / loss.weight_sum
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_iou_is_the_mean_over_classes_that_occur() -> None:
    abstract, _ = build_model(segmenting())
    rng, batch = np.random.default_rng(2), pixels(3)
    logits = rng.normal(0, 1, (ROWS, SIZE, SIZE, KINDS)).astype(np.float32)
    logits[..., 3], batch["labels"][batch["labels"] == 3] = -9, 255  # class 3 occurs nowhere
    rows = {name: jnp.asarray(leaf) for name, leaf in batch.items() if name in ("labels", "images")}
    loss = abstract.head.loss(jnp.asarray(logits), rows, LossReduction())
    valid, predicted_classes = batch["labels"] != 255, logits.argmax(-1)
    pairs = [(batch["labels"][valid] == number, predicted_classes[valid] == number) for number in (0, 1, 2, 4)]
    expected = np.mean([(true & predicted).sum() / (true | predicted).sum() for true, predicted in pairs])
    np.testing.assert_allclose(quotient(*loss.metrics["iou"]), expected, rtol=1e-6)
    shares = [(predicted_classes[row] == batch["labels"][row])[valid[row]].sum() / SIZE**2 for row in range(ROWS)]
    correct, weight = loss.metrics["accuracy"]
    np.testing.assert_allclose(correct, sum(shares), rtol=1e-6)
    np.testing.assert_allclose(weight, valid.sum() / SIZE**2, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "parallel"),
    [
        ({"height": 9}, ONE),
        ({"class_tokens": 0}, ONE),
        ({"mean": (0.5,)}, ONE),
        ({"positions_multiple": 1}, ParallelConfig(data=1, tensor=2, sequence=True)),
        ({}, ParallelConfig(data=1, context=2)),
        ({"stack": StackConfig(pattern=(replace(SEEING, mixer=AttentionConfig(heads=4)),), repeats=2)}, ONE),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], parallel: ParallelConfig) -> None:
    cfg = replace(build_program(vit(), ONE, microbatches=1).cfg, model=replace(vit(), **changes), parallel=parallel)
    with user_error(kind=ConfigError):
        check(cfg, parallel.sizes(2)["data"] * parallel.without_data() if parallel is not ONE else 1)


@pytest.mark.parametrize(("size", "weights", "gigaflops"), [("b16", 86_567_656, 17.564), ("h14", 632_045_800, 167.295)])
def test_sizes_equal_those_that_torchvision_publishes(size: str, weights: int, gigaflops: float) -> None:
    """They are those of vit_b_16 and vit_h_14; multiply-adds of a forward pass count once there."""
    model, flops = presets.vit(size), flops_of(presets.vit(size))
    assert model.parameter_count().total == weights
    # Pixels have no gradient.
    patches = 2 * model.patches() * model.patch_size() * model.hidden
    assert flops is not None and round((flops.full + patches) / 6e9, 3) == gigaflops


@pytest.mark.parametrize("family", presets.TOWERS)
def test_presets_have_no_problems(family: str) -> None:
    sizes = {"vit": presets.VIT, "clip": presets.CLIP, "siglip": presets.SIGLIP, "internvit": presets.INTERN}[family]
    for size in sizes:
        tower = presets.TOWERS[family](size)
        assert not tower.problems()
        assert not with_image_head(tower, ClassifierConfig(classes=10, pooling=MeanPoolingConfig())).problems()


def test_attention_pooling_equals_the_formula() -> None:
    """A learned query has heads of 8, a residual MLP follows, and padding is masked."""
    cfg = siglip(positions_multiple=5)
    assert cfg.padding() == 4
    abstract, params = build_model(cfg)
    x = np.random.default_rng(4).normal(0, 1, (2, 20, 32)).astype(np.float32)

    def pool(params: Any, x: Any) -> Any:
        model = bind(abstract, params)
        return model.head.pooling(x, model.image_context(2))

    actual = jax.jit(pool)(params, x)
    of = {name.removeprefix("head.pooling."): w for name, w in params.items() if name.startswith("head.pooling.")}
    attention = {name.removeprefix("attention."): w for name, w in of.items() if name.startswith("attention.")}
    query = np.einsum("d,dnh->nh", of["query"], attention["query"]) + attention["query_bias"]
    keys, values = (
        np.einsum("bsd,dnh->bsnh", x[:, :16], attention[name]) + attention[f"{name}_bias"] for name in ("key", "value")
    )
    scores = np.exp(np.einsum("nh,bsnh->bns", query, keys) / 8**0.5)
    mixed = np.einsum("bns,bsnh->bnh", scores / scores.sum(-1, keepdims=True), values)
    y = np.einsum("bnh,nhd->bd", mixed, attention["output"]) + attention["output_bias"]
    normed = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
    inner = (normed * of["norm.gain"] + of["norm.bias"]) @ of["mlp.up"] + of["mlp.up_bias"]
    expected = y + np.asarray(jax.nn.gelu(inner, approximate=False)) @ of["mlp.down"] + of["mlp.down_bias"]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_block_scales_channels_and_normalises_over_heads() -> None:
    """InternViT's block equals its formula."""
    cfg = intern()
    _, params = build_model(cfg)
    x = np.random.default_rng(5).normal(0, 1, (2, 20, 32)).astype(np.float32)
    first_layers = {path: w[:1] for path, w in params.items() if path.startswith("stack.")}
    short = nnx.eval_shape(lambda: replace(cfg, stack=replace(cfg.stack, repeats=1)).build(Layout(Plan.of(ONE))))

    def forward(params: Any, x: Any) -> Any:
        model = bind(short, params)
        return model.stack(x, model.image_context(2))

    actual = jax.jit(forward)({**params, **first_layers}, x)
    w = {path.removeprefix("stack.blocks.0."): rows[0] for path, rows in first_layers.items()}

    def rms(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * gain

    normed = rms(x, w["mixer_norm.gain"])
    q, k, v = (np.einsum("bsd,dnh->bsnh", normed, w[f"mixer.{name}"]) for name in ("query", "key", "value"))
    q, k = (
        rms(a.reshape(2, 20, 32), w[f"mixer.{name}_norm.gain"]).reshape(a.shape)
        for a, name in ((q, "query"), (k, "key"))
    )
    scores = np.exp(np.einsum("bsnh,btnh->bnst", q, k) / 8**0.5) * (np.arange(20) < 17)
    mixed = np.einsum("bnst,btnh->bsnh", scores / scores.sum(-1, keepdims=True), v)
    mixed = np.einsum("bsnh,nhd->bsd", mixed, w["mixer.output"]) + w["mixer.output_bias"]
    y = x + mixed * w["mixer_scale.gain"]
    inner = rms(y, w["mlp_norm.gain"]) @ w["mlp.up"] + w["mlp.up_bias"]
    after = np.asarray(jax.nn.gelu(inner, approximate=False)) @ w["mlp.down"] + w["mlp.down_bias"]
    expected = y + after * w["mlp_scale.gain"]
    np.testing.assert_allclose(actual[:, :17], expected[:, :17], rtol=1e-4, atol=1e-4)
