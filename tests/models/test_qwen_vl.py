"""Where the images of Qwen3-VL stand in a row, and settings that do not fit."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import LENGTH, ONE, VOCABULARY, build_program

from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.position.config import AxialRopeConfig, InterleavedRopeConfig
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.qwen_vl.config import DynamicTowerConfig, QwenVLConfig, qwen_vl
from megajax.models.qwen_vl.module import image_places

IMAGE, SLOTS = VOCABULARY - 1, 2
SEEING = AttentionConfig(heads=4, causal=False, rope=AxialRopeConfig())
READING = AttentionConfig(heads=8, kv_heads=4, head_dim=8, rope=InterleavedRopeConfig(sections=(2, 1, 1)))
MIXED = ParallelConfig(data=2, tensor=2, sequence=True, data_sharding="zero1")


def model() -> QwenVLConfig:
    """Two images of a row, each of up to 4 x 4 patches, which are 4 positions; features of the blocks 0 and 1 of 3."""
    vision = DynamicTowerConfig(
        hidden=64,
        stack=StackConfig(
            pattern=(BlockConfig(mixer=SEEING, mlp=DenseMLPConfig(ffn=64), norm=LayerNormConfig()),), repeats=3
        ),
        height=6,
        width=6,
        patch=2,
        class_tokens=0,
        features=(0, 1),
        least=4,
        most=16,
        init_std=0.06,
    )
    language = DecoderConfig(
        hidden=32,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
        stack=StackConfig(pattern=(BlockConfig(mixer=READING, mlp=GatedMLPConfig(ffn=48)),), repeats=3),
        init_std=0.06,
        loss_chunk=24,
    )
    return qwen_vl(language, vision, image_token=IMAGE, slots=SLOTS)


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
        ({"slots": 5}, "5 images of 4 positions do not fit rows of 16"),
        ({"parallel": ParallelConfig(data=1, pipeline=2)}, "the model has several sections"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict, message: str) -> None:
    cfg = build_program(model(), ONE, microbatches=1).cfg
    parallel = changes.pop("parallel", ONE)
    with pytest.raises(ConfigError, match=message):
        check(replace(cfg, model=replace(cfg.model, **changes), parallel=parallel), parallel.tensor * parallel.pipeline)
