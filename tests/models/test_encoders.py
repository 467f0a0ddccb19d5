"""BERT and T5: losses of sentences, and refusals. tests/one_device.py has layouts."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_encoders import READING, WRITING, bert, t5
from tiny_runs import LENGTH, ONE, build_program, rows, start
from user_errors import user_error

from megajax.batch import Batch
from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.layers.attention.config import AttentionConfig, CrossAttentionConfig
from megajax.layers.param import bind
from megajax.layers.position.config import RelativeBiasConfig
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig, PredictionConfig
from megajax.models.reduction import LossReduction, quotient

WINDOW = AttentionConfig(heads=4, causal=False, window=4)
ONE_SIDED = AttentionConfig(heads=4, causal=False, relative=RelativeBiasConfig(both_ways=False))


def test_rows_without_labels_do_not_count_in_the_loss_of_the_sentence_order() -> None:
    """Such rows only fill the last batch of an evaluation."""
    program = build_program(bert(), ONE, microbatches=1)
    x = np.random.default_rng(0).normal(size=(3, LENGTH, 32)).astype(np.float32)
    batch = {name: leaf[:3] for name, leaf in rows().items()}
    batch["loss_mask"][2] = 0

    model = bind(program.abstract, start(program).params)

    def order(batch: Batch, x: np.ndarray) -> float:
        ctx = model.context(batch)
        losses = jax.jit(lambda batch, x: model.loss(x, batch, ctx, LossReduction()).metrics["next_sentence_loss"])
        return float(quotient(*losses(batch, x)))

    without = order({name: leaf[:2] for name, leaf in batch.items()}, x[:2])
    assert order(batch, x) == pytest.approx(without, rel=1e-6)


CONTEXT = ParallelConfig(data=1, context=2)


def test_t5_attends_to_gathered_keys() -> None:
    cfg = replace(build_program(t5(), CONTEXT, microbatches=1).cfg, parallel=replace(CONTEXT, context_strategy="ring"))
    with user_error("model.stack.pattern.0.cross.kernel", kind=ConfigError):
        check(cfg, 2)


@pytest.mark.parametrize("part", ["encoder", "cross"])
def test_heads_of_the_encoder_and_across_are_divided_too(part: str) -> None:
    reads, (writes,) = t5().encoder.pattern[0], t5().stack.pattern
    odd = AttentionConfig(heads=3, head_dim=8, causal=False)
    changes = {
        "encoder": {"encoder": StackConfig(pattern=(replace(reads, mixer=odd),), repeats=2)},
        "cross": {
            "stack": StackConfig(pattern=(replace(writes, cross=CrossAttentionConfig(heads=3, head_dim=8)),), repeats=2)
        },
    }
    cfg = build_program(t5(), ONE, microbatches=1).cfg
    cfg = replace(cfg, model=replace(t5(), **changes[part]), parallel=ParallelConfig(data=1, tensor=2))
    with user_error(kind=ConfigError):
        check(cfg, 2)


def test_settings_of_decoders_are_refused() -> None:
    causal = replace(bert(), stack=StackConfig(pattern=(replace(READING, mixer=AttentionConfig(heads=4)),), repeats=2))
    plain = replace(t5(), stack=StackConfig(pattern=(READING,), repeats=2))
    for model, expected in ((causal, "set it to false"), (plain, "does not read the encoder")):
        cfg = replace(build_program(bert(), ONE, microbatches=1).cfg, model=model)
        with pytest.raises(ConfigError, match=expected):
            check(cfg, 1)


@pytest.mark.parametrize(
    "model",
    [
        replace(t5(), prediction=PredictionConfig()),
        replace(t5(), stack=StackConfig(pattern=(replace(WRITING, mixer=READING.mixer),), repeats=2)),
        replace(bert(), stack=StackConfig(pattern=(replace(READING, mixer=WINDOW),), repeats=2)),
        replace(bert(), stack=StackConfig(pattern=(replace(READING, mixer=ONE_SIDED),), repeats=2)),
    ],
)
def test_settings_without_effect_on_encoders_and_decoders_are_refused(model: DecoderConfig) -> None:
    cfg = replace(build_program(bert(), ONE, microbatches=1).cfg, model=model)
    with user_error(kind=ConfigError):
        check(cfg, 1)
