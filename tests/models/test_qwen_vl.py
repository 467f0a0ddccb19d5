"""Where the images of Qwen3-VL stand in a row, and settings that do not fit."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_runs import LENGTH, ONE, ROWS, VOCABULARY, assert_same_step, build_program
from tiny_runs import rows as plain_rows

from megajax.batch import Batch
from megajax.config import load
from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.param import specs
from megajax.layers.position.config import AxialRopeConfig, InterleavedRopeConfig
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.decoder.config import DecoderConfig
from megajax.models.facts import count_flops
from megajax.models.qwen_vl.config import DynamicTowerConfig, QwenVLConfig, qwen_vl
from megajax.models.qwen_vl.module import image_places
from megajax.optim.groups import trainable

IMAGE, SLOTS = VOCABULARY - 1, 2
SEEING = AttentionConfig(heads=4, causal=False, rope=AxialRopeConfig())
READING = AttentionConfig(heads=8, kv_heads=4, head_dim=8, rope=InterleavedRopeConfig(sections=(2, 1, 1)))
MIXED = ParallelConfig(data=2, tensor=2, sequence=True, data_sharding="zero1")
FSDP = ParallelConfig(data=4, tensor=2, data_sharding="fsdp")


def model(dropout: float = 0.0, features: tuple[int, ...] = (0, 1)) -> QwenVLConfig:
    """Two images of a row, each of up to 4 x 4 patches, which are 4 positions; features of the first blocks but one."""
    vision = DynamicTowerConfig(
        hidden=64,
        stack=StackConfig(
            pattern=(BlockConfig(mixer=SEEING, mlp=DenseMLPConfig(ffn=64), norm=LayerNormConfig(), dropout=dropout),),
            repeats=1 + len(features),
        ),
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
    language = DecoderConfig(
        hidden=32,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
        stack=StackConfig(pattern=(BlockConfig(mixer=READING, mlp=GatedMLPConfig(ffn=48)),), repeats=1 + len(features)),
        init_std=0.06,
        loss_chunk=24,
    )
    return qwen_vl(language, vision, image_token=IMAGE, slots=SLOTS)


def document_leaves(lengths: list[int], length: int) -> dict[str, np.ndarray]:
    """Positions and segment ids of a row of texts of these lengths, and one document of padding."""
    parts = [*lengths, length - sum(lengths)]
    positions = np.concatenate([np.arange(part, dtype=np.int32) for part in parts])
    return {"positions": positions, "segment_ids": np.repeat(np.arange(len(parts), dtype=np.int32), parts)}


def batches(seed: int) -> Batch:
    """The rows of other tests, with up to two images in them: in one text, or in the second one of two."""
    batch, draw = dict(plain_rows(seed)), np.random.default_rng(seed)
    batch["tokens"] %= IMAGE
    batch["images"] = draw.integers(0, 256, (ROWS, 32, 12), np.uint8)
    batch["grids"] = np.zeros((ROWS, SLOTS, 2), np.int32)
    for row, images in enumerate(draw.integers(0, 3, ROWS)):
        first, texts = int(draw.integers(1, 6)), document_leaves([5, 9] if row % 2 else [14], LENGTH)
        batch["positions"][row], batch["segment_ids"][row] = texts["positions"], texts["segment_ids"]
        for image in range(images):
            grid = batch["grids"][row, image] = 2 * draw.integers(1, 3, 2)
            count = int(grid.prod()) // 4
            batch["tokens"][row, first : first + count] = IMAGE
            first += count
    return batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cfg", "parallel"),
    [
        (model(), MIXED),
        (replace(model(features=(0,)), recompute="full"), FSDP),
        (model(dropout=0.1, features=(0,)), MIXED),
    ],
)
def test_trains_like_one_device(cfg: QwenVLConfig, parallel: ParallelConfig) -> None:
    single = assert_same_step(cfg, parallel, microbatches=3, tolerance=1e-4, floor=1e-4, draw=batches)
    for path in ("vision.patches", "vision.positions", "features.0.down", "projector.down"):
        assert np.abs(single.gradients[path]).max() > 0, path


def test_work_and_memory_of_the_tower() -> None:
    """Of images as large as possible: attention within an image, other layers for all patches of a row."""
    small, large = (replace(model(), vision=replace(model().vision, budget=patches)) for patches in (16, 64))
    longer = [replace(cfg, sequence_length=64) for cfg in (small, large)]
    sections = [[section for section in cfg.section_facts() if section.path] for cfg in longer]
    assert [{(part.length, part.sequences) for part in parts} for parts in sections] == [{(16, 1)}, {(16, 4)}]
    # Three images more: per patch 3 x 2 x (4 matrices of 64 x 64, two of 64 x 64, scores and mix over 16 patches) in 3
    # blocks, and the patches themselves; per position the MLPs of three projectors.
    patch = 3 * (6 * 64 * 64 + 2 * 16 * 64) + 24 * 64 * 2 / 3  # pixels have no gradient
    position = 3 * (256 * 256 + 256 * 32)
    work = [flops.full * 64 for flops in map(count_flops, longer)]
    assert work[1] - work[0] == pytest.approx(6 * (48 * patch + 12 * position))


def test_places_of_images() -> None:
    """Images of 2 x 3 and 1 x 1 positions, one after the other, and one of 1 x 4 behind text."""
    tokens = np.array([[0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0]], bool)
    grids = jnp.array([[[2, 3], [1, 1], [1, 4], [0, 0]]])
    number, inside, before = image_places(jnp.asarray(tokens), grids)
    assert number.tolist() == [[0, 0, 0, 0, 0, 0, 0, 1, 0, 2, 2, 2, 2, 0]]
    assert inside.tolist() == [[0, 0, 1, 2, 3, 4, 5, 0, 0, 0, 1, 2, 3, 0]]
    # The first image moves what follows by 3 instead of 6.
    assert before.tolist() == [[0, 0, 0, 0, 0, 0, 0, -3, -3, -3, -3, -3, -3, -3]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision": replace(model().vision, features=(1,))}, r"deepstack=true in the layers \[0, 1\], for 1 features"),
        ({"vision": replace(model().vision, features=(1, 3))}, "ascending numbers below the 3 blocks"),
        ({"vision": replace(model().vision, most=12)}, r"12 is not a multiple of merge\^2=4 and of 8"),
        ({"vision": replace(model().vision, budget=80)}, "16 is too short for 5 images of 4 positions"),
        ({"vision": replace(model().vision, budget=24)}, "24 is not a multiple of most=16"),
        ({"parallel": ParallelConfig(data=1, pipeline=2)}, "the model has several sections"),
        ({"parallel": ParallelConfig(data=1, context=2)}, "parallel.context"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict, message: str) -> None:
    cfg = build_program(model(), ONE, microbatches=1).cfg
    parallel = changes.pop("parallel", ONE)
    with pytest.raises(ConfigError, match=message):
        check(
            replace(cfg, model=replace(cfg.model, **changes), parallel=parallel),
            parallel.tensor * parallel.pipeline * parallel.context,
        )


@pytest.mark.parametrize("size", ["2b", "8b"])
def test_the_shipped_sizes_train_all_but_the_tower(size: str) -> None:
    """2B has tied heads, 8B a head of its own."""
    cfg = load(f"qwen3_vl.py:qwen3_vl_{size}")
    declared = specs(nnx.eval_shape(lambda: cfg.model.build(Layout(Plan.of(ParallelConfig(data=1))))))
    frozen = set(declared) - set(trainable(cfg.optimizer, declared))
    assert frozen == {path for path in declared if path.startswith("vision.")}
