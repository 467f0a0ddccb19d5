"""Hybrids, whose layers differ and repeat no pattern, train on every layout as on one device."""

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import QUICK, assert_same_step, build_program, llama, place, rows, start, within

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig
from megajax.layers.position.config import RopeConfig
from megajax.layers.stack.config import SegmentsConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig

MIXTURE = MoEConfig(experts=4, expert=GatedMLPConfig(ffn=16), router=RouterConfig(z_loss=1e-3))
ATTENTION = AttentionConfig(heads=4, kv_heads=2, rope=RopeConfig())
BLOCKS = {
    "M": BlockConfig(mixer=Mamba2Config(heads=4, head_dim=16, state=8, groups=2, chunk=8), dropout=0.1),
    "*": BlockConfig(mixer=ATTENTION),
    "-": BlockConfig(mlp=GatedMLPConfig(ffn=48)),
    "E": BlockConfig(mlp=MIXTURE),
    "d": BlockConfig(mixer=ATTENTION, mlp=GatedMLPConfig(ffn=48)),
    "e": BlockConfig(mixer=ATTENTION, mlp=MIXTURE),
}


def hybrid(pattern: str, **settings: Any) -> DecoderConfig:
    return replace(llama(), stack=SegmentsConfig.of([BLOCKS[letter] for letter in pattern]), **settings)


def test_stages_that_differ() -> None:
    """The gradients of two layers on two stages: one has the feed-forward layer and one the attention."""
    assert_same_step(hybrid("-*"), ParallelConfig(pipeline=2, data=1), microbatches=2)


def test_loops_say_how_many_layers_a_stage_has_on_average() -> None:
    """In a name that plans of compiled programs read: the number itself is data."""
    program = build_program(hybrid("--*"), ParallelConfig(pipeline=2, data=1, layers=(2, 1)), microbatches=2)
    with within(program):
        inputs, batch = start(program).inputs, place(program, rows())
        lowered = jax.jit(lambda scale: program.grad_fn()(inputs, batch, scale)).lower(np.float32(1))
    names = set(re.findall(r"runs_(\d+)_of_2", lowered.as_text(debug_info=True)))
    assert names == {"1", "2"}


CASES = {
    "1f1b, tensor": ("M-*M", "none", ParallelConfig(pipeline=2, tensor=2, data=2, sequence=True)),
    "interleaved": (
        "M-*M",
        "selective",
        ParallelConfig(pipeline=2, virtual_stages=2, schedule="interleaved", data=1, tensor=2),
    ),
    "gpipe, uneven": ("M-M*-M-", "full", ParallelConfig(pipeline=4, schedule="gpipe", layers=(1, 3, 1, 2), data=1)),
    "dense first, pipeline and experts": (
        "ddeee",
        "selective",
        ParallelConfig(pipeline=2, expert=2, data=1, layers=(3, 2)),
    ),
    "mixtures between, FSDP and experts": (
        "ME*EME",
        "selective",
        ParallelConfig(data=2, expert=2, data_sharding="fsdp"),
    ),
    "mixtures between, pipeline, experts and tensor": (
        "ME*EM",
        "selective",
        ParallelConfig(pipeline=2, expert=2, data=1, tensor=2),
    ),
    "segments, FSDP, tensor": (
        "M-M-*-M-",
        "full",
        ParallelConfig(data=2, tensor=2, data_sharding="fsdp", sequence=True),
    ),
}
"""Name -> pattern, recomputation, layout."""


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "recompute", "parallel"), CASES.values(), ids=CASES)
def test_losses_and_gradients_equal_those_of_one_device(pattern: str, recompute: Any, parallel: ParallelConfig) -> None:
    """test_layouts_matrix.py has optimizers on stages whose layers differ in number."""
    count = 2 if "e" in pattern.lower() else 4
    assert_same_step(hybrid(pattern, recompute=recompute), parallel, alone=hybrid(pattern), microbatches=count)


@pytest.mark.slow
def test_no_result_depends_on_the_contents_of_buffers() -> None:
    """Rings of stages with fewer layers have places that are never written."""
    program = build_program(hybrid("M-*"), ParallelConfig(pipeline=2, data=1), microbatches=2)
    with within(program):
        inputs, batch = start(program).inputs, place(program, rows())
        lowered = jax.jit(lambda fill: program.grad_fn(fill=fill)(inputs, batch, np.float32(1))).lower(0.0)
        grads = lowered.compile(compiler_options=dict(QUICK))
        clean, filled = (jax.device_get(grads(fill).grads) for fill in (0.0, np.nan))
    assert all(np.isfinite(gradient).all() for gradient in filled.values())
    for path, expected in clean.items():
        np.testing.assert_array_equal(filled[path], expected, err_msg=path)
