"""Stacks of several patterns: how layers are divided into segments, without any change of numbers."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import LENGTH, ONE, QUICK, build_program, gpt, llama, place, rows, within

from megajax.batch import Grads
from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.layers.block.config import BlockConfig
from megajax.layers.param import bind, initial_values
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.mesh.config import ParallelConfig

A = replace(llama().stack.pattern[0], dropout=0.1)
B = replace(A, mlp=gpt().stack.pattern[0].mlp)
FSDP = ParallelConfig(data=2, tensor=2, data_sharding="fsdp", sequence=True)


def one_by_one(*blocks: BlockConfig) -> SegmentsConfig:
    return SegmentsConfig(segments=tuple(StackConfig(pattern=(block,), repeats=1) for block in blocks))


def first_loss(stack: StackConfig | SegmentsConfig) -> list[float]:
    """Training loss with the library's initial weights, and the norm of its gradients."""
    program = build_program(replace(llama(), stack=stack, dropout=0.1), ONE, microbatches=4)
    with within(program):
        arguments = program.fresh_state()().inputs, place(program, rows()), np.float32(1)
        compiled = jax.jit(program.grad_fn()).lower(*arguments).compile(compiler_options=dict(QUICK))
        grads: Grads = jax.device_get(compiled(*arguments))
    norm = np.sqrt(sum(np.square(gradient.astype(np.float64)).sum() for gradient in grads.grads.values()))
    return [float(np.divide(*grads.metrics["loss"])), float(norm)]


def losses(stack: StackConfig | SegmentsConfig, parallel: ParallelConfig = ONE, **settings: Any) -> list[float]:
    """Of three steps, from the library's own initial weights."""
    program = build_program(replace(llama(), stack=stack, dropout=0.1, **settings), parallel, microbatches=4)
    batch, reported = place(program, rows()), []
    with within(program):
        state = program.fresh_state()()
        step: Any = program.train_step
        step = step.lower(state, batch).compile(compiler_options=dict(QUICK))
        for _ in range(3):
            state, metrics = step(state, batch)
            reported.append(float(metrics["loss"]))
    return reported


@pytest.fixture(scope="module")
def repeated() -> list[float]:
    return losses(StackConfig(pattern=(A, B), repeats=2))


def test_a_repeated_pattern_equals_its_segments() -> None:
    """Dropout and initial values follow the number of the layer, wherever its block is."""
    first, second = (first_loss(stack) for stack in (one_by_one(A, A), StackConfig(pattern=(A,), repeats=2)))
    np.testing.assert_allclose(first, second, rtol=1e-5)


@pytest.mark.slow
def test_a_repeated_pattern_of_two_equals_its_segments(repeated: list[float]) -> None:
    np.testing.assert_allclose(losses(one_by_one(A, B, A, B)), repeated, rtol=1e-5)


@pytest.mark.slow
def test_segments_on_a_layout(repeated: list[float]) -> None:
    segments = (StackConfig(pattern=(A, B), repeats=1), *one_by_one(A, B).segments)
    np.testing.assert_allclose(losses(SegmentsConfig(segments=segments), FSDP), repeated, rtol=1e-4)
    np.testing.assert_allclose(losses(SegmentsConfig(segments=segments), recompute="full"), repeated, rtol=1e-5)


@pytest.mark.slow
def test_the_forward_pass_by_plain_jit() -> None:
    """The model as a notebook calls it, without a mesh."""
    models = []
    for stack in (StackConfig(pattern=(A, B), repeats=2), one_by_one(A, B, A, B)):
        program = build_program(replace(llama(), stack=stack), ONE, microbatches=4)
        models.append(bind(program.abstract, initial_values(program.declared, 3)))
    tokens = np.arange(2 * LENGTH, dtype=np.int32).reshape(2, LENGTH)
    first, second = (np.asarray(jax.jit(model)(tokens)) for model in models)
    np.testing.assert_allclose(second, first, atol=1e-5)


def test_segments_of_layers_have_the_fewest_blocks_to_compile() -> None:
    def letters(text: str) -> str:
        blocks = [replace(A, dropout=ord(letter) / 1000) for letter in text]
        segmented = SegmentsConfig.of(blocks)
        assert [block for part in segmented.segments for block in part.pattern * part.repeats] == blocks
        assert segmented.layers() == len(text)
        return " ".join(
            "".join(chr(round(block.dropout * 1000)) for block in part.pattern) + str(part.repeats)
            for part in segmented.segments
        )

    assert letters("AAAA") == "A4"
    assert letters("ABABABCC") == "AB3 C2"
    assert letters("AAAABBBBA") == "A4 B4 A1"
    assert letters("ABCABCD") == "ABC2 D1"


def test_weights_that_do_not_fit_are_refused() -> None:
    cfg = build_program(replace(llama(), stack=one_by_one(A, B)), ONE, microbatches=4).cfg
    with pytest.raises(ConfigError, match=r"parallel\.pipeline: 4 stages x 1 .* as many layers .* which has 2"):
        check(cfg.but(parallel=ParallelConfig(pipeline=4)), 8)
    with pytest.raises(ConfigError, match=r"parallel\.layers: 1,2 are 3 in all, the model's stack has 2"):
        check(cfg.but(parallel=ParallelConfig(pipeline=2, layers=(1, 2))), 8)
    invalid = replace(A, mixer=replace(A.mixer, causal=False))
    with pytest.raises(ConfigError, match=r"stack\.segments\.1\.pattern\.0\.mixer\.causal: shows a decoder"):
        check(cfg.but(model=replace(cfg.model, stack=one_by_one(A, invalid))), 8)
    with pytest.raises(ConfigError, match=r"recompute_layers: must be none for a stack of segments, got 2"):
        check(cfg.but(model=replace(cfg.model, recompute="full", recompute_layers=2)), 8)
    with pytest.raises(ConfigError, match=r"segments: needs at least one"):
        check(cfg.but(model=replace(cfg.model, stack=SegmentsConfig(segments=()))), 8)
