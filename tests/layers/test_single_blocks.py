"""Blocks with one sub-layer: two of them equal a block with both, in values, facts and plans."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_runs import LENGTH, ONE, ROWS, VOCABULARY, build_program, llama
from user_errors import user_error

from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.layers.block.config import BlockConfig
from megajax.layers.param import bind, initial_values
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.facts import count_flops
from megajax.models.memory import MemorySetting, memory_report
from megajax.models.presets.llama import llama3
from megajax.planning.compiled.devices import GPUS
from megajax.planning.cost.description import Description
from megajax.planning.cost.estimate import estimate


def halved(model: DecoderConfig) -> DecoderConfig:
    """The model with each block divided between its sub-layers."""
    pattern = []
    for block in model.stack.pattern:
        assert isinstance(block, BlockConfig)
        rest = {"norm": block.norm, "dropout": block.dropout}
        pattern += [BlockConfig(mixer=block.mixer, **rest), BlockConfig(mlp=block.mlp, **rest)]
    return replace(model, stack=StackConfig(pattern=tuple(pattern), repeats=model.stack.repeats))


def test_two_blocks_of_one_sub_layer_equal_one_block_of_two() -> None:
    paired = llama()
    tokens = np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH) % VOCABULARY
    first, second = (build_program(model, ONE, microbatches=4) for model in (paired, halved(paired)))
    weights = initial_values(first.declared, 3)
    renamed = {path.replace("blocks.0.mlp", "blocks.1.mlp"): weight for path, weight in weights.items()}
    stds = [
        {path.replace("blocks.0.mlp", "blocks.1.mlp"): spec.init for path, spec in built.declared.items()}
        for built in (first, second)
    ]
    assert stds[0] == stds[1], "initial values too: layers count by what they write to the residual stream"
    expected, actual = (
        jax.jit(bind(built.abstract, values))(tokens) for built, values in ((first, weights), (second, renamed))
    )
    np.testing.assert_array_equal(actual, expected)


def test_facts_of_the_halves_equal_those_of_the_whole() -> None:
    paired = llama3("8b")
    halves = halved(paired)
    assert halves.parameter_count() == paired.parameter_count()
    assert count_flops(halves) == count_flops(paired)
    machine = {"device": GPUS["h100"], "per_node": 8, "global_size": 64}
    for parallel in (ParallelConfig(data=8, data_sharding="fsdp"), ParallelConfig(tensor=2, pipeline=4, data=1)):
        actual, theirs = (
            estimate(Description(model=model, parallel=parallel, **machine)) for model in (halves, paired)
        )
        assert actual.matmul_seconds == pytest.approx(theirs.matmul_seconds)
        assert actual.memory.weights == pytest.approx(theirs.memory.weights)
        # Inputs of the second halves are saved whether or not they are named residual.
        assert actual.memory.activations == pytest.approx(theirs.memory.activations)
    (mixer, mlp), (block,) = halves.stack.pattern, paired.stack.pattern
    assert f"{mixer.summary(4096)}, {mlp.summary(4096)}" == block.summary(4096)
    for setting in (MemorySetting(), MemorySetting(tensor=2, sequence=True)):
        assert memory_report(halves, setting) is None, "Megatron-LM's report knows no hybrids"


def test_problems_name_the_sub_layer() -> None:
    cfg = build_program(halved(llama()), ONE, microbatches=4).cfg
    with pytest.raises(ConfigError) as caught:
        check(cfg.but(parallel=ParallelConfig(tensor=5)), 5)
    message = str(caught.value)
    assert "model.stack.pattern.0.mixer.heads" in message and "model.stack.pattern.1.mlp.ffn" in message
    invalid = replace(cfg.model.stack.pattern[0], dropout=1.0)
    with user_error("model.stack.pattern.0.dropout", kind=ConfigError):
        check(cfg.but(model=replace(cfg.model, stack=StackConfig(pattern=(invalid,), repeats=1))), 1)
