"""Facts of models of several sections, or with another head: against their modules, and against computation."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tiny_encoders import HEADS as TEXT_HEADS
from tiny_encoders import bert, classifier, clip, intern, llava, normalised_after, positioned, siglip, t5
from tiny_runs import ROWS, gpt, llama

from megajax.layers.attention.config import CrossAttentionConfig
from megajax.layers.facts import norm_weights
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.param import ParamSpec, specs
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.decoder.config import DecoderConfig
from megajax.models.facts import count_flops
from megajax.models.vit.config import AttentionPoolingConfig, ClassifierConfig, HeadConfig, SegmenterConfig, ViTConfig
from tests.models.test_presets_and_formulas import MODELS as DECODERS

MODELS = {"t5": t5(), "bert": bert(), "gpt": gpt(), "llama": llama()}


def vit(head: HeadConfig) -> ViTConfig:
    """Images of 12 patches and two class tokens in rows of 16 positions."""
    (block,) = bert().stack.pattern
    stack, sizes = StackConfig(pattern=(block,), repeats=2), {"height": 24, "width": 32, "patch": 8}
    return ViTConfig(hidden=32, stack=stack, class_tokens=2, **sizes, head=head)


POOLING = AttentionPoolingConfig(attention=CrossAttentionConfig(heads=4), mlp=DenseMLPConfig(ffn=64))
HEADS = {
    "classes": ClassifierConfig(classes=7),
    "pixels": SegmenterConfig(classes=5),
    "pooled": ClassifierConfig(classes=3, pooling=POOLING),
}
IMAGES = {name: vit(head) for name, head in HEADS.items()}


def layout() -> Layout:
    return Layout(Plan.of(ParallelConfig()))


KNOWN = {
    **MODELS,
    **IMAGES,
    **{name: cfg for name, cfg in DECODERS.items() if cfg.prediction is None},
    **{f"classifier of {name}": classifier(name) for name in (*TEXT_HEADS, "decoder")},
    **{f"{make.__name__} tower": make() for make in (clip, siglip, intern)},
    "bert, as first published": normalised_after(),
    "llava": llava(),
}


@pytest.mark.parametrize("cfg", KNOWN.values(), ids=KNOWN)
def test_weights_equal_those_that_modules_declare(cfg: DecoderConfig | ViTConfig) -> None:
    """Names, shapes and axes are equal, in the stacks and outside of them."""
    declared = {}
    for section in cfg.section_facts():
        repeats = section.stack.repeats
        for place in range(len(section.stack.pattern)):
            for one in section.stack_weights(place):
                declared[one.name] = (repeats, *one.shape), ("layer", *one.axes)
    norms = [
        weight
        for section in cfg.section_facts()
        for weight in norm_weights(f"{section.path}.norm".lstrip("."), section.norm, section.hidden)
    ]
    entries = [weight for section in cfg.section_facts() for weight in section.weights]
    for weight in (*entries, *norms, *cfg.head_facts().weights):
        assert weight.name not in declared
        declared[weight.name] = weight.shape, weight.axes
    held = specs(nnx.eval_shape(lambda: cfg.build(layout())))
    assert {path: (spec.shape, spec.axes) for path, spec in held.items()} == declared
    assert cfg.parameter_count().total == sum(prod(spec.shape) for spec in held.values()) - unused(cfg, held)


def unused(cfg: Any, held: Mapping[str, ParamSpec]) -> int:
    """Weights of the ids that pad the vocabulary."""
    tables = [spec.shape for spec in held.values() if "vocab" in spec.axes]
    return sum(
        (cfg.padded_vocabulary() - cfg.vocabulary_size) * prod(shape) // cfg.padded_vocabulary() for shape in tables
    )


def test_tables_of_relative_positions_are_counted_in_both_sections() -> None:
    cfg = positioned(rope=False)
    held = specs(nnx.eval_shape(lambda: cfg.build(layout())))
    assert {"encoder.stack.relative.table", "stack.relative.table"} <= held.keys()
    assert cfg.parameter_count().total == sum(prod(spec.shape) for spec in held.values()) - unused(cfg, held)


def products(jaxpr: Any, times: int = 1) -> Iterator[int]:
    """Operations of each matrix product of a traced function."""
    for equation in jaxpr.eqns:
        inner = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for value in equation.params.values():
            for closed in value if isinstance(value, tuple | list) else [value]:
                if hasattr(inside := getattr(closed, "jaxpr", closed), "eqns"):
                    yield from products(inside, inner)
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            sides = equation.invars[0].aval.shape
            yield 2 * times * equation.outvars[0].aval.size * prod(sides[axis] for axis in contracted)


@pytest.mark.parametrize("cfg", IMAGES.values(), ids=IMAGES)
def test_operations_of_images(cfg: ViTConfig) -> None:
    """The product of patches includes the places of class tokens; those of padding do not count. Pixels have no
    gradient."""
    used = replace(cfg, positions_multiple=1)
    zeros = ROWS * cfg.class_tokens * cfg.patch_size() * cfg.hidden
    actual = forward(used, images=jnp.zeros((ROWS, cfg.height, cfg.width, 3)))
    pixels = 2 * cfg.patches() * cfg.patch_size() * cfg.hidden
    assert actual - 2 * zeros - resized(used) == pytest.approx(ROWS * (count_flops(cfg).full + pixels) / 3, rel=1e-12)


def resized(cfg: ViTConfig) -> int:
    """Operations of the products by which scores of patches become scores of pixels."""
    if not isinstance(cfg.head, SegmenterConfig):
        return 0
    (rows, columns), classes = cfg.grid(), cfg.head.classes
    return 2 * ROWS * classes * rows * cfg.width * (columns + cfg.height)


def forward(cfg: DecoderConfig | ViTConfig, **leaves: Any) -> int:
    """Operations of all matrix products of plain use."""
    graph, state = nnx.split(nnx.eval_shape(lambda: cfg.build(layout())))
    traced = jax.make_jaxpr(lambda state, leaves: nnx.merge(graph, state)(**leaves))(state, leaves)
    return sum(products(traced.jaxpr))


def test_attention_in_both_directions_counts_whole_squares() -> None:
    (block,) = bert().stack.pattern
    causal = replace(block, mixer=replace(block.mixer, causal=True))
    first, second = (
        replace(bert(), stack=replace(bert().stack, pattern=(changed_block,))) for changed_block in (block, causal)
    )
    assert count_flops(first).full == count_flops(second).full == count_flops(first).causal > count_flops(second).causal
