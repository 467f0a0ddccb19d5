"""Two key-value heads on four and eight devices of `tensor`: collectives, and use in a notebook."""

from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import (
    LENGTH,
    ONE,
    QUICK,
    VOCABULARY,
    assert_close,
    build_program,
    llama,
    rows,
    start,
    with_block,
    within,
)

from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.param import bind
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.planning.compiled.hlo import Collective, read

FSDP = ParallelConfig(data=2, tensor=4, sequence=True, data_sharding="fsdp")


def model(kv_heads: int = 2, **changes: Any) -> DecoderConfig:
    return with_block(llama(), mixer={"kv_heads": kv_heads, **changes})


FULL = model(qkv_bias=True, qk_norm=RMSNormConfig())
"""With biases of keys and values, and a gain on keys."""


def collectives(kv_heads: int) -> list[Collective]:
    program = build_program(model(kv_heads), FSDP, microbatches=2)
    with within(program):
        step: Any = program.train_step
        lowered = step.lower(program.state_like(), program.batch_like())
        text = lowered.compile(compiler_options=dict(QUICK)).as_text()
    return [*read(text, program.mesh.shape).collectives]


@pytest.mark.slow
def test_copies_cost_one_reduction_a_step_and_none_in_a_loop():
    """All other traffic is as with a head for each device, including that of data parallelism."""
    split, copied = collectives(4), collectives(2)

    def moved(actual: list[Collective]) -> list[tuple]:
        inside = [c for c in actual if c.place.path]
        return sorted((c.place.path, c.kind, c.groups.name, c.elements) for c in inside)

    def summed(actual: list[Collective]) -> int:
        """Elements summed over `tensor` once a step."""
        outside = [c for c in actual if not c.place.path and c.groups.name == "tensor"]
        return sum(c.elements for c in outside if c.kind == "all-reduce")

    assert moved(copied) == moved(split)
    size = 2 * 2 * 32 * 2 * 4 // FSDP.data  # Keys and values, of two layers.
    squares = 2  # Of sharded gradients, for the norm.
    assert summed(copied) - summed(split) == size - squares


def test_a_model_is_called_with_weights_at_rest():
    """A plain jax.jit calls and differentiates it, as in a notebook."""
    tokens = rows()["tokens"][:4]
    actual = []
    for parallel in (ONE, FSDP):
        program = build_program(FULL, parallel, microbatches=2)

        def loss(params, tokens, program=program):
            logits = bind(program.abstract, params)(tokens)
            return (logits**2).mean(), logits

        with within(program):
            (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(start(program).params, tokens)
        assert logits.shape == (4, LENGTH, VOCABULARY)
        actual.append((np.asarray(logits), jax.device_get(grads)))
    np.testing.assert_allclose(actual[1][0], actual[0][0], atol=1e-5)
    assert_close(actual[1][1], actual[0][1], floor=1e-6)
