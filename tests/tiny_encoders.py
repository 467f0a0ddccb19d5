"""Tiny encoders, models of images and heads that classify, and the batches that they read: for tests/one_device.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from tiny_runs import LENGTH, READ, ROWS, VOCABULARY, llama, rows

from megajax.batch import Batch
from megajax.layers.attention.config import AttentionConfig, CrossAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.norm.config import IdentityNormConfig, LayerNormConfig, LayerScaleConfig, RMSNormConfig
from megajax.layers.position.config import AxialRopeConfig, InterleavedRopeConfig, RelativeBiasConfig, RopeConfig
from megajax.layers.recompute import Recompute
from megajax.layers.stack.config import StackConfig
from megajax.models.bert.config import BertConfig
from megajax.models.classifier.config import (
    ChoiceHeadConfig,
    ClassHeadConfig,
    RegressionHeadConfig,
    SpanHeadConfig,
    TextClassifierConfig,
    TextHead,
    with_text_head,
)
from megajax.models.decoder.config import DecoderConfig
from megajax.models.llava.config import LlavaConfig, ProjectorConfig
from megajax.models.presets.encoders import bert as published_bert
from megajax.models.presets.vit import llava as joined
from megajax.models.qwen_vl.config import DynamicTowerConfig, QwenVLConfig, qwen_vl
from megajax.models.t5.config import T5Config
from megajax.models.vision.config import VisionTowerConfig
from megajax.models.vit.config import AttentionPoolingConfig, ClassifierConfig, SegmenterConfig, ViTConfig

MLP, NORM = DenseMLPConfig(ffn=48, bias=True), LayerNormConfig()
READING = BlockConfig(mixer=AttentionConfig(heads=4, bias=True, causal=False), mlp=MLP, norm=NORM)
WRITING = BlockConfig(
    mixer=AttentionConfig(heads=4, bias=True), cross=CrossAttentionConfig(heads=4, bias=True), mlp=MLP, norm=NORM
)


def bert(*, dropout: float = 0.0, repeats: int = 2) -> BertConfig:
    return BertConfig(
        hidden=32,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
        stack=StackConfig(pattern=(replace(READING, dropout=dropout),), repeats=repeats),
        dropout=dropout,
        recompute="selective",
        init_std=0.06,
        loss_chunk=24,
    )


def t5(recompute: Recompute = "selective", *, dropout: float = 0.0) -> T5Config:
    return T5Config(
        hidden=32,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
        encoder_length=READ,
        encoder=StackConfig(pattern=(replace(READING, dropout=dropout),), repeats=2),
        stack=StackConfig(pattern=(replace(WRITING, dropout=dropout),), repeats=2),
        learned_positions=True,
        dropout=dropout,
        recompute=recompute,
        init_std=0.06,
        loss_chunk=24,
    )


def positioned(*, rope: bool) -> T5Config:
    """T5 with rotary positions, or with T5's own, and a gated MLP."""
    sections = []
    for (block,), both_ways in ((t5().encoder.pattern, True), (t5().stack.pattern, False)):
        bias = RelativeBiasConfig(buckets=8, distance=12, shared=True, both_ways=both_ways)
        mixer = replace(block.mixer, rope=RopeConfig()) if rope else replace(block.mixer, relative=bias)
        gated = replace(block, mixer=mixer, mlp=GatedMLPConfig(ffn=48, activation="gelu_tanh"))
        sections.append(StackConfig(pattern=(gated,), repeats=2))
    return replace(t5(), encoder=sections[0], stack=sections[1], learned_positions=False)


def normalised_after() -> BertConfig:
    """BERT as first published."""
    parts = {"mixer": READING.mixer, "mlp": MLP, "norm": NORM}
    stack = StackConfig(pattern=(BlockConfig(norm_placement="post", **parts),), repeats=2)
    return replace(bert(), stack=stack, norm=IdentityNormConfig(), embedding_norm=NORM, head_norm=NORM)


CLASSES = ClassHeadConfig(classes=3, dropout=0.0)
HEADS: dict[str, TextHead] = {
    "classes": CLASSES,
    "number": RegressionHeadConfig(dropout=0.0),
    "choices": ChoiceHeadConfig(choices=3, dropout=0.0),
    "span": SpanHeadConfig(),
}
LAST = replace(CLASSES, pooling="last", pooler=False)


def classifier(name: str) -> TextClassifierConfig:
    """BERT with one of HEADS, or a decoder that classifies by its last token."""
    if name == "decoder":
        return with_text_head(llama("none"), LAST)
    base = published_bert("debug", sequence_length=LENGTH, vocabulary_size=VOCABULARY, dropout=0.0)
    return with_text_head(replace(base, init_std=0.06, recompute="none"), HEADS[name])


def texts(seed: int, choices: int = 1) -> Batch:
    """Rows of sequences with padding at their ends, a fifth of the rows without weight."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, choices, LENGTH) if choices > 1 else (ROWS, LENGTH)
    lengths = rng.integers(4, LENGTH + 1, (*shape[:-1], 1))
    segments = (np.arange(LENGTH) < lengths).astype(np.int32)
    starts = rng.integers(0, 4, ROWS, dtype=np.int32)
    return {
        "tokens": rng.integers(0, VOCABULARY, shape, dtype=np.int32),
        "segment_ids": segments,
        "token_types": segments * (np.arange(LENGTH) >= 3).astype(np.int32),
        "labels": rng.integers(0, 3, ROWS, dtype=np.int32),
        "starts": starts,
        "ends": starts,
        "loss_mask": (rng.random(ROWS) < 0.8).astype(np.float32),
        "sample": np.arange(40, 40 + ROWS, dtype=np.uint32),
    }


def choices(seed: int) -> Batch:
    return texts(seed, choices=3)


def numbers(seed: int) -> Batch:
    batch = texts(seed)
    return {**batch, "labels": batch["labels"].astype(np.float32)}


def read_by(head: str) -> Callable[[int], Batch]:
    """What makes the rows of a classifier."""
    return {"choices": choices, "number": numbers}.get(head, texts)


KINDS, SIZE = 5, 8
"""Classes of images, and the pixels of a side."""
SEEING = BlockConfig(
    mixer=AttentionConfig(heads=4, bias=True, causal=False), mlp=DenseMLPConfig(ffn=48), norm=LayerNormConfig()
)
ATTENDING = AttentionPoolingConfig(attention=CrossAttentionConfig(heads=4, bias=True), mlp=DenseMLPConfig(ffn=48))


def vit(*, repeats: int = 2, block: BlockConfig = SEEING, **more: Any) -> ViTConfig:
    """16 patches and, unless `more` says otherwise, a class token and 3 positions of padding."""
    settings: dict[str, Any] = {"head": ClassifierConfig(classes=KINDS, label_smoothing=0.1), "positions_multiple": 4}
    return ViTConfig(
        hidden=32,
        stack=StackConfig(pattern=(block,), repeats=repeats),
        height=SIZE,
        width=SIZE,
        patch=2,
        recompute="selective",
        init_std=0.06,
        **(settings | more),
    )


def clip() -> ViTConfig:
    block = replace(SEEING, mlp=DenseMLPConfig(ffn=48, activation="quick_gelu"))
    return vit(block=block, entry_norm=LayerNormConfig(), patch_bias=False)


def siglip(**more: Any) -> ViTConfig:
    return vit(class_tokens=0, head=ClassifierConfig(classes=KINDS, pooling=ATTENDING), **more)


def intern() -> ViTConfig:
    mixer = replace(SEEING.mixer, qkv_bias=False, qk_norm=RMSNormConfig(), qk_norm_over="heads")
    return vit(block=replace(SEEING, mixer=mixer, norm=RMSNormConfig(), layer_scale=LayerScaleConfig()))


def segmenting() -> ViTConfig:
    return vit(head=SegmenterConfig(classes=KINDS))


def images(seed: int) -> Batch:
    """Rows of mixed images, with some that do not count."""
    rng = np.random.default_rng(seed)
    return {
        "images": rng.integers(0, 256, (ROWS, SIZE, SIZE, 3), dtype=np.uint8),
        "labels": rng.integers(0, KINDS, ROWS, dtype=np.int32),
        "other_labels": rng.integers(0, KINDS, ROWS, dtype=np.int32),
        "mix": rng.random(ROWS, dtype=np.float32),
        "loss_mask": (rng.random(ROWS) < np.linspace(0.6, 1, ROWS)).astype(np.float32),
        "sample": np.arange(40, 40 + ROWS, dtype=np.uint32),
    }


def pixels(seed: int) -> Batch:
    """Rows with a class for each pixel, or none."""
    rng, batch = np.random.default_rng(seed), images(seed)
    labels = rng.integers(0, KINDS, (ROWS, SIZE, SIZE), dtype=np.int32)
    labels[rng.random(labels.shape) < 0.2] = 255
    return {**batch, "labels": labels}


IMAGE = VOCABULARY - 1
"""The token that stands for a position of an image."""
GATED = ProjectorConfig(ffn=24, activation="silu", gated=True, bias=False)


def reader(mixer: AttentionConfig, repeats: int = 2, dropout: float = 0.0) -> DecoderConfig:
    """The language model behind a tower."""
    block = BlockConfig(mixer=mixer, mlp=GatedMLPConfig(ffn=48), dropout=dropout)
    return DecoderConfig(
        hidden=32,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
        stack=StackConfig(pattern=(block,), repeats=repeats),
        init_std=0.06,
        loss_chunk=24,
        dropout=dropout,
    )


def llava(*, shuffle: int = 1, ffn: int | None = None, dropout: float = 0.0) -> LlavaConfig:
    """Two images of a row, each of 2 x 2 patches and a class token."""
    block = BlockConfig(
        mixer=AttentionConfig(heads=4, causal=False), mlp=DenseMLPConfig(ffn=64), norm=NORM, dropout=dropout
    )
    vision = VisionTowerConfig(
        hidden=64,
        stack=StackConfig(pattern=(block,), repeats=3),
        height=8,
        width=8,
        patch=4,
        init_std=0.06,
    )
    language = reader(AttentionConfig(heads=8, kv_heads=4, rope=RopeConfig()), dropout=dropout)
    projector = ProjectorConfig(pixel_shuffle=shuffle, ffn=ffn)
    return joined(language, vision, image_token=IMAGE, slots=2, projector=projector)


def rows_with_images(seed: int) -> Batch:
    """The rows of other tests, with images and, in most rows, the positions of one or both."""
    batch, draw = dict(rows(seed)), np.random.default_rng(seed)
    batch["images"] = draw.integers(0, 256, (ROWS, 2, 8, 8, 3), np.uint8)
    for row, count in enumerate(draw.integers(0, 3, ROWS)):
        batch["tokens"][row, 1 : 1 + 4 * count] = IMAGE
    return batch


SLOTS = 2
"""Images of a row of `qwen`."""


def qwen(dropout: float = 0.0, features: tuple[int, ...] = (0, 1)) -> QwenVLConfig:
    """Two images of a row, each of up to 4 x 4 patches, which are 4 positions; features of the first blocks but one."""
    mixer = AttentionConfig(heads=4, causal=False, rope=AxialRopeConfig())
    block = BlockConfig(mixer=mixer, mlp=DenseMLPConfig(ffn=64), norm=NORM, dropout=dropout)
    vision = DynamicTowerConfig(
        hidden=64,
        stack=StackConfig(pattern=(block,), repeats=1 + len(features)),
        height=6,
        width=6,
        patch=2,
        class_tokens=0,
        features=features,
        least=4,
        most=16,
        budget=32,
        init_std=0.06,
        dropout=dropout,
    )
    attention = AttentionConfig(heads=8, kv_heads=4, head_dim=8, rope=InterleavedRopeConfig(sections=(2, 1, 1)))
    return qwen_vl(reader(attention, repeats=1 + len(features)), vision, image_token=IMAGE, slots=SLOTS)


def document_leaves(lengths: list[int], length: int) -> dict[str, np.ndarray]:
    """Positions and segment ids of a row of texts of these lengths, and one document of padding."""
    parts = [*lengths, length - sum(lengths)]
    positions = np.concatenate([np.arange(part, dtype=np.int32) for part in parts])
    return {"positions": positions, "segment_ids": np.repeat(np.arange(len(parts), dtype=np.int32), parts)}


def rows_with_grids(seed: int) -> Batch:
    """The rows of other tests, with up to two images in them: in one text, or in the second one of two."""
    batch, draw = dict(rows(seed)), np.random.default_rng(seed)
    batch["tokens"] %= IMAGE
    batch["images"] = draw.integers(0, 256, (ROWS, 32, 12), np.uint8)
    batch["grids"] = np.zeros((ROWS, SLOTS, 2), np.int32)
    for row, count in enumerate(draw.integers(0, 3, ROWS)):
        first, leaves = int(draw.integers(1, 6)), document_leaves([5, 9] if row % 2 else [14], LENGTH)
        batch["positions"][row], batch["segment_ids"][row] = leaves["positions"], leaves["segment_ids"]
        for image in range(count):
            grid = batch["grids"][row, image] = 2 * draw.integers(1, 3, 2)
            positions = int(grid.prod()) // 4
            batch["tokens"][row, first : first + positions] = IMAGE
            first += positions
    return batch
