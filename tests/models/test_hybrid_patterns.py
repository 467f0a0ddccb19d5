"""Megatron-LM's patterns of hybrids: the resulting layers, and messages for invalid patterns."""

from dataclasses import replace

import pytest
from tiny_runs import ONE, build_program, llama
from user_errors import user_error

from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.presets.hybrids.hybrid import hybrid_pipeline, hybrid_prediction, hybrid_stack

BLOCKS = {
    "M": BlockConfig(mixer=AttentionConfig(heads=4, window=3)),
    "*": BlockConfig(mixer=AttentionConfig(heads=4)),
    "-": BlockConfig(mlp=GatedMLPConfig(ffn=32)),
}


def blocks(text: str) -> list:
    return [BLOCKS[letter] for letter in text]


@pytest.mark.parametrize("text", ["M-M*M-M*", "M-M*M-M*-", "M", "M*", "MMMM", "M-M-M*-|M-M-M*-", "M-M|*M-M*/*-/*-"])
def test_layers_are_those_of_the_pattern(text: str) -> None:
    stack = hybrid_stack(text, BLOCKS)
    letters = text.partition("/")[0].replace("|", "")
    times = [block for part in stack.parts() for block in part.pattern * part.repeats]
    assert times == blocks(letters)


def test_repeats_become_a_stack_and_others_segments() -> None:
    assert hybrid_stack("M-M*M-M*", BLOCKS) == StackConfig(pattern=tuple(blocks("M-M*")), repeats=2)
    assert isinstance(hybrid_stack("M-M*M-M*-", BLOCKS), SegmentsConfig)
    assert isinstance(hybrid_stack("M-M*M-|M*", BLOCKS), SegmentsConfig), "a pipeline cuts within the repeats"
    assert isinstance(hybrid_stack("M-M*|M-M*", BLOCKS), StackConfig)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "|",
        "M-||M-",
        "/*-",
        "M-*/",
        "M-*/*-/*",
        "M-G*",
        "M-x",
        "M- M",
    ],
)
def test_invalid_patterns(text: str) -> None:
    with user_error():
        hybrid_stack(text, BLOCKS)


def test_pipeline_boundaries() -> None:
    def cut(text: str, stages: int) -> dict:
        return hybrid_pipeline(text, hybrid_stack(text, BLOCKS), stages)

    assert cut("M-M*M-M*", 4) == {"pipeline": 4}
    assert cut("M-M*|M-M*", 2) == {"pipeline": 2, "virtual_stages": 1, "layers": (1, 1)}
    assert cut("M-M|*M-M*", 2) == {"pipeline": 2, "virtual_stages": 1, "layers": (3, 5)}
    four = {"pipeline": 2, "virtual_stages": 2, "layers": (2, 3, 1, 2), "schedule": "interleaved"}
    assert cut("M-|M*M|-|M*", 2) == four
    for stages in (1, 3):
        with user_error():
            cut("M-|M*M|-|M*", stages)
    text = "M-M|*M-M*"
    cfg = build_program(replace(llama(), stack=hybrid_stack(text, BLOCKS)), ONE, microbatches=4).cfg
    check(cfg.but(parallel=ParallelConfig(**cut(text, 2))), 2)
    with user_error("parallel.layers", kind=ConfigError):
        check(cfg.but(parallel=ParallelConfig(pipeline=2, layers=(3, 4))), 2)


def test_heads_that_predict_further_ahead() -> None:
    assert hybrid_prediction("M-M*", BLOCKS) is None
    prediction = hybrid_prediction("M-M*/*", BLOCKS, weight=0.3)
    assert prediction is not None and (prediction.depth, prediction.block, prediction.weight) == (1, BLOCKS["*"], 0.3)
    two = hybrid_prediction("M-M*/*-/*-", BLOCKS)
    assert two is not None and two.depth == 2
    assert two.block == BlockConfig(mixer=AttentionConfig(heads=4), mlp=GatedMLPConfig(ffn=32))
    with user_error():
        hybrid_prediction("M-M*/MM", BLOCKS)
