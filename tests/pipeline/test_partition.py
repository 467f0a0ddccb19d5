"""The layers of a stage, their storage order, and the corresponding weights."""

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import ONE, build_program, llama, pair, start, within

from megajax.layers.param import bind, initial_values
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.pipeline.partition import Partition
from megajax.training.program import Program


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_every_layer_is_on_one_stage_and_stages_are_consecutive(stages, chunks, data):
    repeats = data.draw(st.lists(st.integers(1, 4), min_size=stages * chunks, max_size=stages * chunks))
    partition = Partition(stages, chunks, tuple(repeats))
    numbers = partition.numbers().reshape(stages, chunks, partition.rows)
    # Chunk by chunk, stage by stage is the order of the layers.
    along = numbers.transpose(1, 0, 2).reshape(-1)
    assert along[along >= 0].tolist() == list(range(sum(repeats)))
    assert [(row >= 0).sum() for row in numbers.transpose(1, 0, 2).reshape(-1, partition.rows)] == repeats
    assert sorted(n for n in partition.order() if n >= 0) == list(range(sum(repeats)))
    # Rows of chunks with fewer layers are padded at their ends.
    assert partition.rows == max(repeats) and partition.padded() == (len(set(repeats)) > 1)
    assert (np.diff((numbers >= 0).astype(int), axis=-1) <= 0).all()


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 4))
def test_even_chunks_differ_by_at_most_one_layer(repeats, stages, chunks):
    repeats_of_chunks = Partition.even(repeats, stages, chunks).repeats
    assert sum(repeats_of_chunks) == repeats
    assert max(repeats_of_chunks) - min(repeats_of_chunks) <= 1
    assert list(repeats_of_chunks) == sorted(repeats_of_chunks, reverse=True)


def two_ways(model: DecoderConfig) -> tuple[Program, Program]:
    """Programs on one device, and on two stages with padding rows."""
    return build_program(model, ONE, microbatches=4), build_program(
        model, ParallelConfig(data=1, pipeline=2, layers=(1, 4)), microbatches=4
    )


def test_a_layer_has_the_same_initial_weights_anywhere():
    """Padding rows start as zeros; the others depend on the layer's number alone."""
    unsplit, split = two_ways(pair("none", 5, tied=True, learned_positions=True))
    order = np.array(split.partition.order())
    assert order.tolist() == [0, -1, -1, -1, 1, 2, 3, 4]
    paths = [f"stack.blocks.{block}.{name}" for block in (0, 1) for name in ("mixer.query", "mixer_norm.gain")]
    expected, actual = (
        initial_values({path: program.declared[path] for path in paths}, 3) for program in (unsplit, split)
    )
    assert split.declared[paths[2]].layers == (1, -1, -1, -1, 3, 5, 7, 9)
    for path in paths:
        rows = np.asarray(actual[path])
        assert not rows[order < 0].any()
        np.testing.assert_allclose(rows[order >= 0], expected[path], rtol=1e-6)
        assert np.asarray(expected[path]).any()


def test_a_model_with_permuted_rows_is_the_same_model():
    """A plain call, as in a notebook, uses rows in the order of the layers, and padding rows not at all."""
    tokens = np.arange(16, dtype=np.int32)[None]
    logits = []
    for program in two_ways(llama(repeats=5)):
        with within(program):
            weights = start(program).params
        logits.append(
            jax.jit(lambda weights, program=program: bind(program.abstract, weights)(tokens))(jax.device_get(weights))
        )
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-5, atol=1e-6)
