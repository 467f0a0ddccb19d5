"""Families of models for tests/one_device.py: tiny configs, what they read, and how exactly layouts can agree."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tiny_decoders import (
    LATENT,
    LORA,
    OBJECTIVES,
    ROUTERS,
    VARIANTS,
    adapted_experts,
    answering,
    answers,
    distilled,
    hybrid,
    moe,
    recurrent,
    replaying,
    windows,
    with_experts,
)
from tiny_encoders import (
    HEADS,
    bert,
    classifier,
    clip,
    images,
    intern,
    llava,
    normalised_after,
    pixels,
    positioned,
    qwen,
    read_by,
    rows_with_grids,
    rows_with_images,
    segmenting,
    siglip,
    t5,
    vit,
)
from tiny_runs import LENGTH, gpt, llama, pair, rows, with_block

from megajax.batch import Batch
from megajax.layers.norm.config import RMSNormConfig
from megajax.models.decoder.config import PredictionConfig

TOLERANCE = 1e-5
"""Largest relative error of a loss and of a norm, and of a gradient against the largest of its weight."""
UNSEEN = 0.01
"""Gradients of biases that a softmax cancels are what rounding leaves of zero, held against this share of the model's
largest gradient."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model, what it reads, and how exactly layouts can agree on it."""

    model: Any
    draw: Callable[[int], Batch] = rows
    balanced: bool = False
    """Whether a loss is of a whole microbatch, as those of routers are: then one device has the same microbatches."""
    unseen: tuple[str, ...] = ()
    """Ends of the paths of biases that a softmax cancels."""
    tolerance: float = TOLERANCE
    """Of gradients."""
    floor: float = 0.0
    """Gradients are held against this share of the model's largest, where those of their weight are smaller."""
    loss: float = TOLERANCE
    """Largest relative error of a mean of the first step."""
    rounding: float = 0.05
    """Largest norm of what bfloat16 adds to a gradient, over the norm of the gradient."""
    later: float = TOLERANCE
    """Largest relative error of losses after the first step."""


def without_counted(seed: int) -> Batch:
    """Rows whose first and last quarter of tokens do not count: the first of two devices of `context` has none."""
    batch, quarter = rows(seed), LENGTH // 4
    inside = (np.arange(LENGTH) >= quarter) & (np.arange(LENGTH) < 3 * quarter)
    return {**batch, "loss_mask": batch["loss_mask"] * inside[None]}


def family(model: Any, draw: Callable[[int], Batch] = rows, **settings: Any) -> Family:
    return Family(model=model, draw=draw, **settings)


def routed(*names: str) -> Any:
    return moe(*(ROUTERS[name] for name in names))


def pairs(**settings: Any) -> Any:
    return pair("selective", 2, **settings)


UNROTATED = ("mixer.key_bias",)
"""Biases of keys without rotation."""
SMOOTH = replace(llama(), label_smoothing=0.1, z_loss=1e-3)
FULL_HEADS = with_block(llama(), mixer={"kv_heads": 2, "qkv_bias": True, "qk_norm": RMSNormConfig()})
DROPPING = llava(shuffle=2, dropout=0.1)
DROPPING_VIT = vit(dropout=0.1, block=replace(vit().stack.pattern[0], dropout=0.1))

FAMILIES: dict[str, Family] = {
    "llama": family(llama("selective")),
    "gpt": family(gpt("selective"), unseen=UNROTATED),
    "untied": family(pairs(tied=False, learned_positions=True, dropout=0.1), unseen=UNROTATED),
    "copied-heads": family(FULL_HEADS, floor=1e-3, loss=1e-6, later=1e-6),
    "windows": family(windows(), floor=1e-3, rounding=0.1),
    "latent": family(with_block(llama(), mixer=LATENT), floor=1e-3),
    "float32-residual": family(replace(llama(), residual="float32")),
    "smooth": family(replace(SMOOTH, prediction=PredictionConfig(weight=0.3)), without_counted, floor=1e-3, later=1e-4),
    "ahead-microbatches": family(
        replace(llama(), prediction=PredictionConfig(depth=2, weight=0.3, reweighted="microbatches")),
        balanced=True,
        floor=1e-3,
    ),
    "ahead-dropout": family(
        replace(gpt("selective"), prediction=PredictionConfig(depth=2, weight=0.3)), unseen=UNROTATED, floor=1e-3
    ),
    "experts": family(routed("losses", "biased", "drops"), balanced=True, later=1e-4),
    "experts-by-position": family(moe(ROUTERS["drops-by-position"], repeats=1), balanced=True),
    "mamba": family(recurrent("mamba2", "mamba2-one-group", "mamba1")),
    # Parts of a row solve smaller triangular systems, whose float32 sums round 5e-7 apart.
    "delta": family(recurrent("delta-net", "delta-by-channel", "delta-one-key-head"), tolerance=2e-5),
    **{name: family(model, floor=1e-3, unseen=("key_norm.bias",)) for name, model in VARIANTS.items()},
    "lora": family(replace(llama(), lora=replace(LORA, dropout=0.2)), later=1e-4),
    "lora-experts": family(adapted_experts(), later=1e-4),
    "dora": family(replace(llama(), lora=replace(LORA, decomposed=True)), later=1e-4),
    **{
        f"answers-{name}": family(answering(objective), answers, balanced=True, floor=1e-3)
        for name, objective in OBJECTIVES.items()
    },
    "answers-replay": family(replaying(), with_experts, balanced=True, tolerance=2e-5),
    "distilled": family(distilled()),
    "bert": family(bert(), floor=1e-3),
    "bert-dropout": family(bert(dropout=0.1), floor=1e-3),
    "bert-post-norm": family(normalised_after(), floor=1e-3),
    "t5": family(t5(), floor=1e-3),
    "t5-relative": family(positioned(rope=False), floor=1e-3),
    **{f"classifier-{name}": family(classifier(name), read_by(name), floor=0.01) for name in (*HEADS, "decoder")},
    "vit-dropout": family(DROPPING_VIT, images, floor=1e-3),
    "clip": family(clip(), images, floor=1e-3),
    "siglip": family(siglip(), images, floor=1e-3),
    "intern": family(intern(), images, floor=1e-3),
    "segmenter": family(segmenting(), pixels, floor=1e-3),
    "llava": family(llava(), rows_with_images, floor=1e-3),
    "llava-dropout": family(DROPPING, rows_with_images, floor=1e-3),
    "qwen-vl": family(qwen(), rows_with_grids, floor=1e-3),
}  # fmt: skip
"""Families by name. A further one, "hybrid-" and letters of tiny_decoders.BLOCKS, has these layers."""


def family_of(name: str) -> Family:
    kind, _, layers = name.partition("hybrid-")
    return FAMILIES[name] if kind else family(hybrid(layers), balanced="e" in layers.lower())
