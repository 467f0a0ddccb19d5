"""Stacks of several patterns: how layers are divided into segments and runs, without any change of numbers."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import ONE, QUICK, build_program, gpt, llama, place, rows, within
from user_errors import user_error

from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.layers.block.config import BlockConfig
from megajax.layers.stack.config import SegmentsConfig, StackConfig, split_patterns
from megajax.mesh.config import ParallelConfig
from megajax.pipeline.partition import Partition, common_runs

A = replace(llama().stack.pattern[0], dropout=0.1)
B = replace(A, mlp=gpt().stack.pattern[0].mlp)


def one_by_one(*blocks: BlockConfig) -> SegmentsConfig:
    return SegmentsConfig(segments=tuple(StackConfig(pattern=(block,), repeats=1) for block in blocks))


def first_loss(stack: StackConfig | SegmentsConfig) -> float:
    """With the library's own initial weights."""
    program = build_program(replace(llama(), stack=stack, dropout=0.1), ONE, microbatches=1)
    with within(program):
        arguments = program.fresh_state()().inputs, place(program, rows()), np.float32(1)
        lowered = jax.jit(lambda *given: program.grad_fn()(*given).metrics["loss"]).lower(*arguments)
        return float(np.divide(*lowered.compile(compiler_options=dict(QUICK))(*arguments)))


def test_a_repeated_pattern_equals_its_segments() -> None:
    """Dropout and initial values follow the number of the layer, wherever its block is."""
    np.testing.assert_allclose(
        first_loss(one_by_one(A, A)), first_loss(StackConfig(pattern=(A,), repeats=2)), rtol=1e-6
    )


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
    with user_error("parallel.pipeline", kind=ConfigError):
        check(cfg.but(parallel=ParallelConfig(pipeline=4)), 8)
    with user_error("parallel.layers", kind=ConfigError):
        check(cfg.but(parallel=ParallelConfig(pipeline=2, layers=(1, 2))), 8)
    invalid = replace(A, mixer=replace(A.mixer, causal=False))
    with user_error("model.stack.segments.1.pattern.0.mixer.causal", kind=ConfigError):
        check(cfg.but(model=replace(cfg.model, stack=one_by_one(A, invalid))), 8)
    with user_error("model.recompute_layers", kind=ConfigError):
        check(cfg.but(model=replace(cfg.model, recompute="full", recompute_layers=2)), 8)
    with user_error("model.stack.segments", kind=ConfigError):
        check(cfg.but(model=replace(cfg.model, stack=SegmentsConfig(segments=()))), 8)


NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


def numbers(text: str) -> list[int]:
    return [text.index(letter) for letter in text]


def chunks(text: str, count: int) -> list[list[int]]:
    return [numbers(text)[span.start : span.stop] for span in Partition.even(len(text), count, 1).layers()[0]]


def test_an_aperiodic_stack_has_few_blocks_to_compile() -> None:
    assert len(NEMOTRON_H_8B) == 52
    runs = split_patterns(numbers(NEMOTRON_H_8B))
    assert [number for pattern, count in runs for number in pattern * count] == numbers(NEMOTRON_H_8B)
    assert [len(pattern) for pattern, _ in runs] == [11, 2]


@pytest.mark.parametrize(
    ("text", "count", "compiled"),
    [
        (NEMOTRON_H_8B, 2, 10),
        (NEMOTRON_H_8B, 4, 7),
        (NEMOTRON_H_8B, 26, 6),
        ("DDD" + "E" * 58, 4, 2),
        ("DDD" + "E" * 58, 16, 2),
        ("M-M*", 4, 3),
        ("M-M*-M-M*-", 2, 5),
    ],
)
def test_one_program_runs_chunks_that_differ(text: str, count: int, compiled: int) -> None:
    """Each chunk's runs are its own layers, and the patterns are few."""
    parts = chunks(text, count)
    runs = common_runs(parts)
    for chunk, layers in enumerate(parts):
        assert [number for run in runs for number in run.pattern * run.counts[chunk]] == layers
    assert sum(len(run.pattern) for run in runs) == compiled


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=5))
def test_any_layers_can_be_cut_anywhere(parts: list[list[int]]) -> None:
    runs = common_runs(parts)
    for chunk, layers in enumerate(parts):
        assert [number for run in runs for number in run.pattern * run.counts[chunk]] == layers


def test_rows_of_a_weight_that_only_some_layers_have() -> None:
    """Nine layers in chunks of 3, 2, 2 and 2, two on each stage: stage 0 has chunks 0 and 2."""
    partition = Partition.even(9, 2, 2)
    assert [list(chunk) for chunk in partition.stored()] == [[0, 1, 2], [5, 6], [3, 4], [7, 8]]
    assert partition.order_of((0, 2, 4, 7)) == (0, 1, -1, -1, 2, -1, 3, -1)
    assert Partition.even(9, 1, 1).order_of((0, 2, 4, 7)) == (0, 1, 2, 3)
