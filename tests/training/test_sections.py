"""A model of two sections, the second of which reads the first, has the gradients of plain differentiation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_runs import ONE, QUICK, VOCABULARY, build_program, differentiate, llama, place, rows, start, within

from megajax.batch import Leaf
from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.module import Attention
from megajax.layers.context import Context
from megajax.layers.param import LayerSettings, Normal, bind, param
from megajax.layers.recompute import Recompute, Recomputing
from megajax.layers.stack.config import StackConfig
from megajax.layers.stack.stack import Stack
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.models.decoder.config import text_schema
from megajax.models.protocol import ModelConfig
from megajax.models.reduction import LossReduction
from megajax.training.gradients.staged import forward


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingConfig(AttentionConfig):
    """Attention that also adds the output of the section before for the row."""

    def build(self, settings: LayerSettings) -> "Reading":
        return Reading(self, settings)


class Reading(Attention):
    def __init__(self, cfg: ReadingConfig, settings: LayerSettings):
        super().__init__(cfg, settings)
        self.read = param((settings.hidden, settings.hidden), ("embed", None), init=Normal(settings.std))

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        memory = self.layout.act(ctx.memory, "batch", "seq", "embed")
        read = jnp.tanh(jnp.einsum("btd,de->bte", memory, self.read[...])).mean(1, keepdims=True)
        return super().__call__(x, ctx) + self.layout.act(jnp.broadcast_to(read, x.shape), *RESIDUAL)


RESIDUAL = ("batch", "seq_residual", "embed")


@dataclass(frozen=True, kw_only=True)
class TwoTowersConfig(ModelConfig):
    stack: StackConfig
    reader: StackConfig
    hidden: int = 32
    recompute: Recompute = "selective"

    def stacks(self) -> Mapping[str, StackConfig]:
        return {"reader": self.reader, "writer": self.stack}

    def schema(self) -> dict[str, Leaf]:
        return text_schema(16, VOCABULARY)

    def build(self, layout: Layout) -> "TwoTowers":
        return TwoTowers(self, layout)


class Tower(nnx.Module):
    def __init__(self, cfg: TwoTowersConfig, stack: StackConfig, layout: Layout):
        settings = LayerSettings(layout=layout, hidden=cfg.hidden, std=0.1, output_std=0.1)
        self.layout = layout
        self.table = param((VOCABULARY, cfg.hidden), (None, "embed"), init=Normal(0.1))
        self.out = param((cfg.hidden, cfg.hidden), ("embed", None), init=Normal(0.1))
        self.stack = Stack(stack, settings, recomputing=Recomputing(recompute=cfg.recompute))

    def context(self, batch: Mapping[str, Any], key: Any) -> Context:
        return Context(batch["positions"], jnp.arange(batch["tokens"].shape[1]), batch.get("segment_ids"))

    def embed(self, batch: Mapping[str, Any]) -> jax.Array:
        return self.layout.act(self.table[...][batch["tokens"]], *RESIDUAL)

    def enter(self, x: jax.Array, ctx: Context) -> jax.Array:
        return x if ctx.memory is None else self.layout.act(x + jnp.sin(ctx.memory), *RESIDUAL)

    def leave(self, x: jax.Array, ctx: Context) -> jax.Array:
        return self.layout.act(jnp.einsum("bsd,de->bse", x, self.out[...]), *RESIDUAL)


class TwoTowers(nnx.Module):
    def __init__(self, cfg: TwoTowersConfig, layout: Layout):
        self.reader, self.writer = Tower(cfg, cfg.reader, layout), Tower(cfg, cfg.stack, layout)

    @property
    def sections(self) -> Mapping[str, Tower]:
        return {"reader": self.reader, "writer": self.writer}

    def loss(self, x: jax.Array, batch: Mapping[str, Any], ctx: Context, reduction: LossReduction) -> Any:
        logits = jnp.einsum("bsd,vd->bsv", x @ self.writer.out[...], self.writer.table[...]).astype(jnp.float32)
        log_probabilities = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], axis=-1)[..., 0]
        return reduction(-log_probabilities, batch["loss_mask"])


def two_towers(recompute: Recompute = "selective") -> TwoTowersConfig:
    reader = llama().stack
    (block,) = reader.pattern
    cross_block = replace(block, mixer=ReadingConfig(heads=8, kv_heads=4))
    return TwoTowersConfig(reader=reader, stack=replace(reader, pattern=(cross_block,)), recompute=recompute)


@pytest.mark.slow
def test_gradients_and_evaluation_equal_plain_differentiation():
    program = build_program(two_towers("full"), ONE, microbatches=2)

    def plain(params: Any, piece: Any) -> jax.Array:
        return forward(bind(program.abstract, params), piece, None, LossReduction()).loss_sum

    with within(program):
        params, batch = start(program).params, place(program, rows())
        actual = jax.jit(program.grad_fn(), compiler_options=dict(QUICK))(params, batch, np.float32(1))
        differentiated = jax.jit(jax.value_and_grad(plain), compiler_options=dict(QUICK))
        pieces = (jax.tree.map(lambda leaf, number=number: leaf[number], batch) for number in range(2))
        of_pieces = [differentiated(params, piece) for piece in pieces]
        total, gradients = jax.tree.map(lambda one, other: np.asarray(one) + np.asarray(other), *of_pieces)
        evaluated = jax.device_get(program.eval_step(params, batch)["loss"])
    np.testing.assert_allclose([actual.loss_sum, evaluated[0]], [total, total], rtol=1e-6)
    assert actual.grads.keys() == gradients.keys()
    for path, expected in gradients.items():
        scale = np.abs(expected).max()
        assert scale > 0, f"{path} has no part in the loss"
        np.testing.assert_allclose(actual.grads[path], expected, atol=1e-5 * scale, err_msg=path)


@pytest.mark.slow  # tests/models/test_llava.py trains two sections on a layout by default.
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(data=2, tensor=2, sequence=True, data_sharding="zero1"),
        ParallelConfig(data=2, tensor=4, data_sharding="fsdp"),
    ],
    ids=["data, tensor, sequence, zero1", "fsdp, tensor"],
)
def test_losses_equal_those_of_one_device(parallel):
    one, actual = (differentiate(two_towers(), layout, microbatches=3) for layout in (ONE, parallel))
    np.testing.assert_allclose(actual.loss, one.loss, rtol=1e-5)
    for path, expected in one.gradients.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(actual.gradients[path], expected, atol=1e-4 * scale, err_msg=path)


def test_a_pipeline_is_refused_and_the_nearest_layout_named():
    cfg = replace(build_program(two_towers(), ONE, microbatches=2).cfg, parallel=ParallelConfig(pipeline=2))
    with pytest.raises(ConfigError, match=r"several sections \(reader, writer\)[^\n]*\n[^\n]*use 1 and parallel.data="):
        check(cfg, 8)
