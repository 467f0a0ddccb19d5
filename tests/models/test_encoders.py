"""BERT and T5 have the losses of one device on every layout."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import LENGTH, ONE, READ, VOCABULARY, assert_same_step, build_program, rows, start, train

from megajax.batch import Batch
from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.layers.attention.config import AttentionConfig, CrossAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.norm.config import IdentityNormConfig, LayerNormConfig
from megajax.layers.param import bind
from megajax.layers.position.config import RelativeBiasConfig, RopeConfig
from megajax.layers.recompute import Recompute
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.bert.config import BertConfig
from megajax.models.decoder.config import DecoderConfig, PredictionConfig
from megajax.models.reduction import LossReduction, quotient
from megajax.models.t5.config import T5Config

MLP, NORM = DenseMLPConfig(ffn=48, bias=True), LayerNormConfig()
READING = BlockConfig(mixer=AttentionConfig(heads=4, bias=True, causal=False), mlp=MLP, norm=NORM)
WRITING = BlockConfig(
    mixer=AttentionConfig(heads=4, bias=True), cross=CrossAttentionConfig(heads=4, bias=True), mlp=MLP, norm=NORM
)


def bert(recompute: Recompute = "selective", *, dropout: float = 0.0) -> BertConfig:
    return BertConfig(
        hidden=32,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
        stack=StackConfig(pattern=(replace(READING, dropout=dropout),), repeats=2),
        dropout=dropout,
        recompute=recompute,
        init_std=0.06,
        loss_chunk=24,
    )


def t5(recompute: Recompute = "selective", *, dropout: float = 0.0) -> T5Config:
    return T5Config(
        hidden=32,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
        encoder_length=READ,
        encoder=StackConfig(pattern=(replace(READING, dropout=dropout),), repeats=2),
        stack=StackConfig(pattern=(replace(WRITING, dropout=dropout),), repeats=2),
        learned_positions=True,
        dropout=dropout,
        recompute=recompute,
        init_std=0.06,
        loss_chunk=24,
    )


def positioned(*, rope: bool) -> T5Config:
    """T5 with rotary positions, or with T5's own, and a gated MLP."""
    sections = []
    for (block,), both_ways in ((t5().encoder.pattern, True), (t5().stack.pattern, False)):
        bias = RelativeBiasConfig(buckets=8, distance=12, shared=True, both_ways=both_ways)
        mixer = replace(block.mixer, rope=RopeConfig()) if rope else replace(block.mixer, relative=bias)
        sections.append(
            StackConfig(
                pattern=(replace(block, mixer=mixer, mlp=GatedMLPConfig(ffn=48, activation="gelu_tanh")),), repeats=2
            )
        )
    return replace(t5(), encoder=sections[0], stack=sections[1], learned_positions=False)


def normalised_after() -> BertConfig:
    """BERT as first published."""
    parts = {"mixer": READING.mixer, "mlp": MLP, "norm": NORM}
    stack = StackConfig(pattern=(BlockConfig(norm_placement="post", **parts),), repeats=2)
    return replace(bert(), stack=stack, norm=IdentityNormConfig(), embedding_norm=NORM, head_norm=NORM)


WINDOW = AttentionConfig(heads=4, causal=False, window=4)
ONE_SIDED = AttentionConfig(heads=4, causal=False, relative=RelativeBiasConfig(both_ways=False))


def test_rows_without_labels_do_not_count_in_the_loss_of_the_sentence_order() -> None:
    """Such rows only fill the last batch of an evaluation."""
    program = build_program(bert(), ONE, microbatches=1)
    x = np.random.default_rng(0).normal(size=(3, LENGTH, 32)).astype(np.float32)
    batch = {name: leaf[:3] for name, leaf in rows().items()}
    batch["loss_mask"][2] = 0

    def order(batch: Batch, x: np.ndarray) -> float:
        model = bind(program.abstract, start(program).params)
        ctx, batch = model.context(batch), jax.tree.map(jnp.asarray, batch)
        return float(quotient(*model.loss(jnp.asarray(x), batch, ctx, LossReduction()).metrics["next_sentence_loss"]))

    without = order({name: leaf[:2] for name, leaf in batch.items()}, x[:2])
    assert order(batch, x) == pytest.approx(without, rel=1e-6)


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


FOUR_LAYERS = replace(bert(), stack=StackConfig(pattern=(READING,), repeats=4))
MIXED = ParallelConfig(data=2, tensor=2, sequence=True, data_sharding="zero1")
FSDP = ParallelConfig(data=4, tensor=2, data_sharding="fsdp")


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (bert(), ParallelConfig(pipeline=2, data=2, tensor=2, schedule="gpipe")),
        slow(t5("full"), MIXED),
        slow(FOUR_LAYERS, ParallelConfig(pipeline=2, data=2, schedule="interleaved", virtual_stages=2)),
        slow(bert(dropout=0.1), ParallelConfig(pipeline=2, data=2, tensor=2, sequence=True)),
        slow(t5(dropout=0.1), FSDP),
        slow(normalised_after(), ParallelConfig(data=4, tensor=2)),
        slow(positioned(rope=True), MIXED),
        slow(positioned(rope=False), FSDP),
    ],
)
def test_trains_like_one_device(model: DecoderConfig, parallel: ParallelConfig) -> None:
    assert_same_step(model, parallel, microbatches=6 if parallel.virtual_stages > 1 else 3, tolerance=1e-4, floor=1e-4)


CONTEXT = ParallelConfig(data=1, context=2)
CONTEXT_FSDP = ParallelConfig(data=1, context=2, tensor=2, sequence=True, data_sharding="fsdp")
CONTEXT_OF_FOUR = replace(CONTEXT, context=4)
ADAPTED = replace(t5(dropout=0.1), lora=LoRAConfig(rank=4, alpha=8.0, dropout=0.2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (bert(), replace(CONTEXT_OF_FOUR, context_strategy="ring+all_to_all")),
        (bert(dropout=0.1), replace(CONTEXT_FSDP, pipeline=2, schedule="1f1b")),
        (normalised_after(), replace(CONTEXT, context_strategy="ring")),
        (t5("full"), CONTEXT_FSDP),
        (positioned(rope=True), CONTEXT),
        (positioned(rope=False), CONTEXT_OF_FOUR),
        (ADAPTED, CONTEXT),
    ],
)
def test_sharded_rows_train_like_whole_ones(model: DecoderConfig, parallel: ParallelConfig) -> None:
    """Padded rows; sentences, which read a position that one device has; sections of different lengths."""
    assert_same_step(model, parallel, microbatches=3, floor=1e-3)


@pytest.mark.slow
def test_sharded_rows_weigh_the_same_in_both_averages() -> None:
    parts, settings = replace(CONTEXT, data=2), {"average": "microbatches", "steps": 1}
    sharded, single = train(bert(), parts, microbatches=2, **settings), train(bert(), ONE, microbatches=4, **settings)
    np.testing.assert_allclose(sharded.losses, single.losses, rtol=1e-5)
    np.testing.assert_allclose(sharded.norms, single.norms, rtol=1e-5)
    np.testing.assert_allclose(sharded.evaluation, single.evaluation, rtol=1e-5)


def test_t5_attends_to_gathered_keys() -> None:
    cfg = replace(build_program(t5(), CONTEXT, microbatches=1).cfg, parallel=replace(CONTEXT, context_strategy="ring"))
    with pytest.raises(ConfigError, match=r"set parallel\.context_strategy=all_gather"):
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
    with pytest.raises(ConfigError, match=rf"{part}.*heads=3 is not divisible by parallel.tensor=2"):
        check(cfg, 2)


def test_settings_of_decoders_are_refused() -> None:
    causal = replace(bert(), stack=StackConfig(pattern=(replace(READING, mixer=AttentionConfig(heads=4)),), repeats=2))
    plain = replace(t5(), stack=StackConfig(pattern=(READING,), repeats=2))
    for model, expected in ((causal, "set it to false"), (plain, "does not read the encoder")):
        cfg = replace(build_program(bert(), ONE, microbatches=1).cfg, model=model)
        with pytest.raises(ConfigError, match=expected):
            check(cfg, 1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (replace(t5(), prediction=PredictionConfig()), "prediction"),
        (replace(t5(), stack=StackConfig(pattern=(replace(WRITING, mixer=READING.mixer),), repeats=2)), "it predicts"),
        (
            replace(bert(), stack=StackConfig(pattern=(replace(READING, mixer=WINDOW),), repeats=2)),
            "window: needs causal attention",
        ),
        (
            replace(bert(), stack=StackConfig(pattern=(replace(READING, mixer=ONE_SIDED),), repeats=2)),
            "relative.both_ways: is needed",
        ),
    ],
)
def test_settings_without_effect_on_encoders_and_decoders_are_refused(model: DecoderConfig, message: str) -> None:
    cfg = replace(build_program(bert(), ONE, microbatches=1).cfg, model=model)
    with pytest.raises(ConfigError, match=message):
        check(cfg, 1)
