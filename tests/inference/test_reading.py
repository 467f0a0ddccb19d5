"""A model that reads a text with an encoder: steps give the logits of the trainer's forward over both."""

from dataclasses import replace

import numpy as np
import pytest
from compiled_steps import CHUNK, Logits, Row, Step, loaded, programs_of, step_logits, whole_logits
from test_programs import HEADS, LENGTH, VOCABULARY

from megajax.inference.loaded_model import LoadedModel
from megajax.inference.step_arrays import lengths_up_to
from megajax.layers.attention.config import CrossAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import LayerNormConfig, RMSNormConfig
from megajax.layers.position.config import RelativeBiasConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.t5.config import T5Config

TEXT = 21
CROSS = CrossAttentionConfig(heads=4, kv_heads=2, kernel="reference", bias=True)
NORM = LayerNormConfig()
MLP = GatedMLPConfig(ffn=48)
FROM_BOTH_SIDES = replace(HEADS, causal=False, relative=RelativeBiasConfig(shared=True, both_ways=True))
DECODING = BlockConfig(mixer=replace(HEADS, relative=RelativeBiasConfig(shared=True)), cross=CROSS, mlp=MLP, norm=NORM)
NORMS_AND_SINKS = replace(CROSS, qk_norm=RMSNormConfig(), sink="learned")
T5 = T5Config(
    hidden=32,
    vocabulary_size=VOCABULARY,
    sequence_length=LENGTH,
    encoder_length=TEXT,
    encoder=StackConfig(pattern=(BlockConfig(mixer=FROM_BOTH_SIDES, mlp=MLP, norm=NORM),), repeats=1),
    stack=StackConfig(pattern=(DECODING, replace(DECODING, cross=NORMS_AND_SINKS)), repeats=1),
    init_std=0.3,
)


def forward(model: LoadedModel, rows: list[Row]) -> np.ndarray:
    """The logits of the trainer's forward pass over texts and answers, [rows, positions, V]."""

    def padded(all_tokens: list[list[int]], length: int) -> np.ndarray:
        return np.asarray([tokens + [0] * (length - len(tokens)) for tokens in all_tokens], np.int32)

    lengths = np.asarray([len(row.memory) for row in rows])
    leaves = {"encoder_tokens": padded([row.memory for row in rows], TEXT)}
    leaves["encoder_segment_ids"] = (np.arange(TEXT)[None] < lengths[:, None]).astype(np.int32)
    leaves["tokens"] = padded([row.tokens for row in rows], CHUNK)
    return whole_logits(model, **leaves, segment_ids=np.ones_like(leaves["tokens"]))


@pytest.mark.parametrize(
    ("sizes", "drafts"), [({}, 1), pytest.param({"data": 2, "tensor": 2}, 0, marks=pytest.mark.slow)]
)
def test_rows_read_their_texts(sizes: dict[str, int], drafts: int) -> None:
    """Steps have drafts, all of which are wrong."""
    model, draw = loaded(T5, sizes), np.random.default_rng(3)
    programs = programs_of(model, [Logits()], rows=2, blocks=12, drafts=drafts)
    assert not programs.prefix_sharing
    replicas = sizes.get("data", 1)

    def rows(text: int, tokens: int, blocks: list[int], slot: int) -> list[Row]:
        new = [[draw.integers(1, VOCABULARY, n).tolist() for n in (text, tokens)] for _ in range(replicas)]
        return [Row(answer, blocks, slot, memory, draft=[7] * drafts) for memory, answer in new]

    # The third rows take the slots and blocks of the first, as later requests do.
    first, second, third = rows(TEXT, 3, [0], 1), rows(5, 7, [3, 1], 0), rows(9, 3, [0], 1)
    begun, ended = list(zip(first, second, strict=True)), list(zip(third, second, strict=True))
    work = [
        [Step(prompts=[(row, 0, 2)]) for row in first],
        [Step(decode=[(short, 2)], prompts=[(long, 0, 5)]) for short, long in begun],
        [Step(decode=[(long, 5)], prompts=[(short, 0, 1)]) for short, long in ended],
        [Step(decode=[(long, 6), (short, 1)]) for short, long in ended],
        [Step(decode=[(short, 2)]) for short in third],
    ]
    every = [*first, *second, *third]
    expected = dict(zip(every, forward(model, every), strict=True))
    for steps in work:
        for row, at, logits in step_logits(programs, steps):
            scale = np.abs(expected[row]).max()
            np.testing.assert_allclose(logits[:VOCABULARY], expected[row][at], atol=1e-5 * scale)


def test_lengths_of_texts() -> None:
    assert lengths_up_to(0) == ()
    assert lengths_up_to(21) == (21,)
    assert lengths_up_to(300) == (64, 128, 256, 300)
