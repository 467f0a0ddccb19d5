"""Where the images of Qwen3-VL stand in a row, and settings that do not fit."""

from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_encoders import qwen
from tiny_runs import ONE, build_program
from user_errors import user_error

from megajax.config import load
from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.layers.param import specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.facts import count_flops
from megajax.models.qwen_vl.module import image_places
from megajax.optim.groups import trainable
from megajax.training.run_config import RunConfig


def test_work_and_memory_of_the_tower() -> None:
    """Images are as large as possible: attention stays within an image, other layers see all patches of a row."""
    small, large = (replace(qwen(), vision=replace(qwen().vision, budget=patches)) for patches in (16, 64))
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
    """Images of 2 x 3 and 1 x 1 positions follow each other, and one of 1 x 4 stands behind text."""
    tokens = np.array([[0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0]], bool)
    grids = jnp.array([[[2, 3], [1, 1], [1, 4], [0, 0]]])
    number, inside, before = image_places(jnp.asarray(tokens), grids)
    assert number.tolist() == [[0, 0, 0, 0, 0, 0, 0, 1, 0, 2, 2, 2, 2, 0]]
    assert inside.tolist() == [[0, 0, 1, 2, 3, 4, 5, 0, 0, 0, 1, 2, 3, 0]]
    # The first image moves what follows by 3 instead of 6.
    assert before.tolist() == [[0, 0, 0, 0, 0, 0, 0, -3, -3, -3, -3, -3, -3, -3]]


@cache
def tiny() -> RunConfig:
    return build_program(qwen(), ONE, microbatches=1).cfg


@pytest.mark.parametrize(
    "changes",
    [
        {"vision": replace(qwen().vision, features=(1,))},
        {"vision": replace(qwen().vision, features=(1, 3))},
        {"vision": replace(qwen().vision, most=12)},
        {"vision": replace(qwen().vision, budget=80)},
        {"vision": replace(qwen().vision, budget=24)},
        {"parallel": ParallelConfig(data=1, pipeline=2)},
        {"parallel": ParallelConfig(data=1, context=2)},
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict) -> None:
    cfg = tiny()
    parallel = changes.pop("parallel", ONE)
    with user_error(kind=ConfigError):
        check(
            replace(cfg, model=replace(cfg.model, **changes), parallel=parallel),
            parallel.tensor * parallel.pipeline * parallel.context,
        )


@pytest.mark.parametrize("size", ["2b", "8b"])
def test_the_shipped_sizes_train_all_but_the_tower(size: str) -> None:
    """The 2B model has tied heads, the 8B model a head of its own."""
    cfg = load(f"qwen3_vl.py:qwen3_vl_{size}")
    declared = specs(nnx.eval_shape(lambda: cfg.model.build(Layout(Plan.of(ParallelConfig(data=1))))))
    frozen = set(declared) - set(trainable(cfg.optimizer, declared))
    assert frozen == {path for path in declared if path.startswith("vision.")}
