"""Two tiny models, one batch, and training them for a few steps on any layout."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from megajax.batch import LMBatch
from megajax.layers.config import (
    AttentionConfig,
    BlockConfig,
    DenseMLPConfig,
    GatedMLPConfig,
    LayerNormConfig,
    RopeConfig,
    StackConfig,
)
from megajax.layers.param import Normal, ParamSpec, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.rules import Plan
from megajax.models.config import DecoderConfig
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.optim.optimizer import AdamW
from megajax.precision.config import PrecisionConfig
from megajax.training.grads import Weights, accumulate, batch_specs, forward_sums
from megajax.training.loss import LanguageModelLoss
from megajax.training.state import TrainState, fresh_state, state_shardings
from megajax.training.step import make_eval_step, make_train_step

ROWS, LENGTH, VOCABULARY = 8, 16, 250


def llama(recompute: str = "selective") -> DecoderConfig:
    """Grouped queries, rotary positions, gated MLP, a head of its own."""
    block = BlockConfig(mixer=AttentionConfig(heads=4, kv_heads=2, rope=RopeConfig()), mlp=GatedMLPConfig(ffn=48))
    return DecoderConfig(
        hidden=32,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
        stack=StackConfig(pattern=(block,), repeats=2),
        recompute=recompute,
        loss_chunk=24,
    )


def gpt(recompute: str = "none", dropout: float = 0.1) -> DecoderConfig:
    """Learned positions, biases everywhere, dropout everywhere, a tied head."""
    block = BlockConfig(
        mixer=AttentionConfig(heads=4, bias=True, dropout=dropout),
        mlp=DenseMLPConfig(ffn=64),
        norm=LayerNormConfig(),
        dropout=dropout,
    )
    return DecoderConfig(
        hidden=32,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
        stack=StackConfig(pattern=(block,), repeats=2),
        learned_positions=True,
        norm=LayerNormConfig(),
        tied=True,
        dropout=dropout,
        recompute=recompute,
        loss_chunk=24,
    )


def rows(seed: int = 0) -> LMBatch:
    """Leaves [ROWS, LENGTH]: up to three documents a row, a fifth of the labels masked, unevenly over the rows."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, VOCABULARY, (ROWS, LENGTH + 1), dtype=np.int32)
    segments = np.sort(rng.integers(0, 3, (ROWS, LENGTH), dtype=np.int32), axis=1)
    mask = (rng.random((ROWS, LENGTH)) < np.linspace(0.6, 1, ROWS)[:, None]).astype(np.float32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    sample = np.arange(40, 40 + ROWS, dtype=np.uint32)
    return LMBatch(text[:, :-1].copy(), text[:, 1:].copy(), mask, positions, segments, sample)


class Trained(NamedTuple):
    """What a few steps came to."""

    before: float
    """Evaluation on the rows of training before the first step."""
    losses: np.ndarray
    norms: np.ndarray
    evaluation: float
    """Loss on other rows after the last step."""
    state: TrainState
    counted: float
    """Tokens the evaluation counted."""


def _fresh(declared: Mapping[str, ParamSpec], optimizer: AdamW) -> TrainState:
    """Weights and optimizer state on the host; drawn by numpy, for compiling the library's own takes seconds."""
    rng = np.random.default_rng(0)
    abstract = jax.eval_shape(lambda: fresh_state(declared, optimizer, 0))
    empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
    params = {}
    for path, spec in declared.items():
        spread = spec.init.std if isinstance(spec.init, Normal) else 0.1
        params[path] = rng.normal(spec.role == "gain", spread, spec.shape).astype(np.float32)
    return replace(empty, params=params, loss_scale=np.float32(1))


@cache
def train(
    model: DecoderConfig,
    parallel: ParallelConfig,
    *,
    microbatches: int,
    steps: int = 3,
    average: str = "tokens",
    compute: str = "float32",
    isolated: bool = True,
) -> Trained:
    """Train on the same rows every step, in float32 unless told otherwise."""
    mesh, layout = build_mesh(parallel), Layout(Plan.of(parallel))
    abstract = nnx.eval_shape(lambda: model.build(layout))
    declared = specs(abstract)
    optimizer = AdamWConfig().build(declared)
    schedule = ScheduleConfig(lr=1e-2).build(steps=10, global_size=ROWS)
    shardings = state_shardings(declared, optimizer, layout.plan, mesh)
    loss = LanguageModelLoss(isolated, average)
    weights = Weights(abstract, declared, layout, PrecisionConfig(compute=compute))
    key = jax.random.key(7) if model.has_dropout() else None
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        step = make_train_step(accumulate(weights, loss, key, mesh), optimizer, schedule, shardings)
        evaluate = make_eval_step(forward_sums(weights, loss, mesh))
        state = jax.device_put(_fresh(declared, optimizer), shardings)
        placed, other = (_place(rows(seed), microbatches, layout, mesh) for seed in (0, 1))
        before = np.divide(*evaluate(state.params, placed)["loss"]).item()
        reported = []
        for _ in range(steps):
            state, metrics = step(state, placed)
            reported.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        total, counted = (float(part) for part in evaluate(state.params, other)["loss"])
    losses, norms = np.array(reported).reshape(steps, 2).T
    return Trained(before, losses, norms, total / counted, state, counted)


def _place(batch: LMBatch, microbatches: int, layout: Layout, mesh: jax.sharding.Mesh) -> LMBatch:
    cut = [leaf.reshape(microbatches, ROWS // microbatches, *leaf.shape[1:]) for leaf in batch]
    return jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), LMBatch(*cut), batch_specs(layout)
    )
