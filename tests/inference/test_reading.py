"""A model that reads a text with an encoder: steps give the logits of the trainer's forward over both."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from test_programs import CHUNK, HEADS, LENGTH, VOCABULARY, Logits, Step, loaded

from megajax.inference.programs import CacheSize, LoadedModel, Programs
from megajax.inference.step_arrays import Bucket, lengths_up_to
from megajax.layers.attention.config import CrossAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import LayerNormConfig, RMSNormConfig
from megajax.layers.param import bind
from megajax.layers.position.config import RelativeBiasConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.t5.config import T5Config

TEXT = 21
CROSS = CrossAttentionConfig(heads=4, kv_heads=2, kernel="reference", bias=True)
NORM = LayerNormConfig()
MLP = GatedMLPConfig(ffn=48)
FROM_BOTH_SIDES = replace(HEADS, causal=False, relative=RelativeBiasConfig(shared=True, both_ways=True))
T5 = T5Config(
    hidden=32,
    vocabulary_size=VOCABULARY,
    sequence_length=LENGTH,
    encoder_length=TEXT,
    encoder=StackConfig(pattern=(BlockConfig(mixer=FROM_BOTH_SIDES, mlp=MLP, norm=NORM),), repeats=1),
    stack=StackConfig(
        pattern=(
            BlockConfig(
                mixer=replace(HEADS, relative=RelativeBiasConfig(shared=True)), cross=CROSS, mlp=MLP, norm=NORM
            ),
            BlockConfig(
                mixer=replace(HEADS, relative=RelativeBiasConfig(shared=True)),
                cross=replace(CROSS, qk_norm=RMSNormConfig(), sink="learned"),
                mlp=MLP,
                norm=NORM,
            ),
        ),
        repeats=1,
    ),
    init_std=0.3,
)


@dataclass(eq=False)
class Row:
    memory: list[int]
    tokens: list[int]
    blocks: list[int]
    slot: int


def forward(model: LoadedModel, rows: list[Row]) -> np.ndarray:
    """Of the trainer's forward pass over texts and answers, [rows, positions, V]."""

    def padded(all_tokens: list[list[int]], length: int) -> np.ndarray:
        return np.asarray([tokens + [0] * (length - len(tokens)) for tokens in all_tokens], np.int32)

    lengths = np.asarray([len(row.memory) for row in rows])
    leaves = {"encoder_tokens": padded([row.memory for row in rows], TEXT)}
    leaves["encoder_segment_ids"] = (np.arange(TEXT)[None] < lengths[:, None]).astype(np.int32)
    leaves["tokens"] = padded([row.tokens for row in rows], CHUNK)
    leaves["segment_ids"] = np.ones_like(leaves["tokens"])
    with jax.set_mesh(model.mesh):
        return np.asarray(jax.jit(lambda weights: bind(model.model, weights)(**leaves))(model.weights))


@pytest.mark.parametrize("sizes", [{}, pytest.param({"data": 2, "tensor": 2}, marks=pytest.mark.slow)])
def test_rows_read_their_texts(sizes: dict[str, int]) -> None:
    model, draw = loaded(T5, sizes), np.random.default_rng(3)
    size = CacheSize(blocks=12, block=4, slots=2)
    programs = Programs(
        model,
        size,
        buckets=[Bucket(2, CHUNK)],
        choosers=[Logits()],
        length=LENGTH,
        dtype="float32",
        kernel="tiled",
    )
    assert not programs.prefix_sharing
    replicas = sizes.get("data", 1)

    def rows(text: int, tokens: int, blocks: list[int], slot: int) -> list[Row]:
        new = [[draw.integers(1, VOCABULARY, n).tolist() for n in (text, tokens)] for _ in range(replicas)]
        return [Row(*arguments, blocks, slot) for arguments in new]

    # The third rows take the slots and blocks of the first, as later requests do.
    first, second, third = rows(TEXT, 3, [0], 1), rows(5, 7, [3, 1], 0), rows(9, 3, [0], 1)
    work = [
        [Step(prompts=[(row, 0, 2)]) for row in first],
        [
            Step(decode=[(short_row, 2)], prompts=[(long_row, 0, 5)])
            for short_row, long_row in zip(first, second, strict=True)
        ],
        [
            Step(decode=[(long_row, 5)], prompts=[(short_row, 0, 1)])
            for short_row, long_row in zip(third, second, strict=True)
        ],
        [Step(decode=[(long_row, 6), (short_row, 1)]) for short_row, long_row in zip(third, second, strict=True)],
        [Step(decode=[(short_row, 2)]) for short_row in third],
    ]
    every = [*first, *second, *third]
    expected = dict(zip(every, forward(model, every), strict=True))
    for step in work:
        result = programs.run(step, Logits(), lambda _: ())
        logits = np.asarray(result.chosen)
        for replica, replica_step in enumerate(step):
            places = [(row, at, result.row(replica, number)) for number, (row, at) in enumerate(replica_step.decode)]
            places += [
                (row, at + count - 1, result.row(replica, 0, prompt=True)) for row, at, count in replica_step.prompts
            ]
            for row, at, place in places:
                scale = np.abs(expected[row]).max()
                np.testing.assert_allclose(logits[place, :VOCABULARY], expected[row][at], atol=1e-5 * scale)


def test_lengths_of_texts() -> None:
    assert lengths_up_to(0) == ()
    assert lengths_up_to(21) == (21,)
    assert lengths_up_to(300) == (64, 128, 256, 300)
