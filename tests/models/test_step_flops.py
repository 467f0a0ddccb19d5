"""FLOPs of a step: closed forms, and the matrix products of traced gradients with respect to trained weights."""

from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.interpreters.partial_eval import dce_jaxpr
from small_jobs import run_config
from tiny_encoders import t5
from tiny_runs import LENGTH, READ, llama

from benchmarks.roofline import roof_of
from benchmarks.stopwatch import Spread
from benchmarks.training.train_speed import speeds
from megajax.job.steps import step_rate
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.param import path_of
from megajax.layers.stack.config import StackConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.facts import flops_of, summarize
from megajax.optim.config import AdamWConfig
from megajax.planning.compiled.devices import GPUS
from megajax.planning.cost.description import describe
from megajax.planning.cost.estimate import estimate, to_dict
from megajax.planning.show import layout as layout_of_plan
from megajax.training.session import row_work
from tests.models.test_section_facts import layout, products

pytestmark = pytest.mark.smoke

S, D, V, L, F = 8192, 512, 32_000, 6, 1024


def decoder(*masks: dict[str, int], length: int = S) -> DecoderConfig:
    """Six layers whose masks repeat."""
    mixers = [AttentionConfig(heads=8, **mask) for mask in masks]
    blocks = tuple(BlockConfig(mixer=mixer, mlp=GatedMLPConfig(ffn=F)) for mixer in mixers)
    stack = StackConfig(pattern=blocks, repeats=L // len(blocks))
    return DecoderConfig(hidden=D, vocabulary_size=V, sequence_length=length, stack=stack)


def keys(mask: dict[str, int]) -> float:
    """Keys of the mean query of a row, counted one by one."""
    window, chunk = mask.get("window", S), mask.get("chunk", S)
    return sum(min(place % chunk, window) + 1 for place in range(S)) / S


MASKS: dict[str, tuple[dict[str, int], ...]] = {
    "causal": ({},),
    "window of 127 on every second": ({"window": 127}, {}),
    "window of 511 on five of six": ({"window": 511},) * 5 + ({},),
    "chunk of 1024": ({"chunk": 1024},),
    "chunk that leaves a rest": ({"chunk": 3000}, {"window": 0}),
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_only_pairs_that_the_mask_leaves_count(masks: tuple[dict[str, int], ...]) -> None:
    """6 per multiply-add; without a mask, every query has all keys; Megatron-LM takes half of them."""
    weights = L * (4 * D * D + 3 * D * F) + D * V
    seen = L / len(masks) * sum(map(keys, masks))
    actual = flops_of(decoder(*masks))
    assert actual is not None and actual.causal == pytest.approx(6 * (weights + 2 * D * seen), rel=1e-12)
    assert actual.full == 6 * (weights + 2 * D * L * S)
    assert actual.megatron == 6 * (weights + D * L * S)


def test_adapters_do_without_the_gradients_of_frozen_matrices() -> None:
    """Forward pass and gradients of inputs, of the adapters those of weights; the lowest layer's input has none."""
    rank, length = 8, 1024
    model = replace(decoder({}, length=length), lora=LoRAConfig(rank=rank))
    layer, pairs = 4 * D * D + 3 * D * F, 2 * D * (length + 1) / 2
    a, b = 6 * rank * D + rank * F, 4 * rank * D + 2 * rank * F + rank * D
    frozen = 2 * (L * layer + D * V) - 3 * D * D
    adapters = 3 * L * (a + b) - 3 * rank * D
    actual, full = flops_of(model), flops_of(replace(model, lora=None))
    assert actual is not None and full is not None
    assert actual.causal == pytest.approx(2 * (frozen + adapters + 3 * L * pairs), rel=1e-12)
    assert 0.66 < actual.causal / full.causal < 0.75 and actual.megatron == full.megatron


def once(body: Any, carry: Any, inputs: Any, **settings: Any) -> Any:
    """A scan over one row, without the loop: its gradient would reach every carry, needed or not."""
    del settings
    carry, outputs = body(carry, jax.tree.map(lambda leaf: leaf[0], inputs))
    return carry, jax.tree.map(lambda leaf: leaf[None], outputs)


def traced(model: Any, trainable: tuple[str, ...], **leaves: Any) -> float:
    """FLOPs of the matrix products of the forward pass and of the gradients of trained weights, by JAX itself."""
    graph, state = nnx.split(nnx.eval_shape(lambda: model.build(layout())))
    flat = {path_of(parts, leaf): leaf for parts, leaf in nnx.to_flat_state(state)}
    parts = {path_of(parts, leaf): parts for parts, leaf in nnx.to_flat_state(state)}

    def is_trained(path: str) -> bool:
        if path.endswith((".a", ".b", "lora_a", "lora_b")):
            return True
        of_adapters = model.lora is not None and trainable == ("*",)
        return not of_adapters and any(fnmatchcase(path, pattern) for pattern in trainable)

    names = [path for path in flat if is_trained(path)]
    frozen = {path: leaf for path, leaf in flat.items() if path not in names}

    def loss(trained: dict[str, Any], frozen: dict[str, Any]) -> Any:
        whole = nnx.from_flat_state([(parts[path], leaf) for path, leaf in {**trained, **frozen}.items()])
        return jnp.sum(nnx.merge(graph, whole)(**leaves) ** 2)

    with mock.patch("jax.lax.scan", once):
        grad = jax.make_jaxpr(jax.value_and_grad(loss))({path: flat[path] for path in names}, frozen)
    needed, _ = dce_jaxpr(grad.jaxpr, [True] * len(grad.jaxpr.outvars))
    return sum(products(needed))


def with_kernels(block: BlockConfig) -> BlockConfig:
    """With kernels whose products JAX sees."""
    mixers: dict[str, Any] = {name: replace(mixer, kernel="reference") for name, mixer in block.mixers().items()}
    return replace(block, **mixers)


def three(**more: Any) -> DecoderConfig:
    """Three blocks with names of their own."""
    base = llama("none", repeats=1)
    (block,) = base.stack.pattern
    return replace(base, stack=StackConfig(pattern=(with_kernels(block),) * 3, repeats=1), **more)


TRAINED: dict[str, tuple[str, ...]] = {
    "all": ("*",),
    "a layer in the middle": ("stack.blocks.1.*",),
    "one matrix": ("stack.blocks.1.mlp.down",),
    "norms": ("*.mlp_norm.*",),
    "the table": ("tokens",),
    "all but the table": ("stack.*", "norm.*", "head"),
}
TOKENS = jnp.zeros((1, LENGTH), jnp.int32)


@pytest.mark.parametrize("trainable", TRAINED.values(), ids=TRAINED)
def test_what_is_trained_decides_which_gradients_count(trainable: tuple[str, ...]) -> None:
    model, flops = three(), flops_of(three(), trainable)
    assert flops is not None and flops.full * LENGTH == pytest.approx(traced(model, trainable, tokens=TOKENS), rel=1e-9)


@pytest.mark.parametrize("trainable", [("*",), ("encoder.*",), ("stack.*", "head")], ids=str)
def test_an_encoder_counts_as_traced(trainable: tuple[str, ...]) -> None:
    """Keys and values of cross-attention read the encoder, whose gradients count if something in it is trained."""
    model = t5("none")
    stacks = {}
    for name in ("encoder", "stack"):
        blocks = tuple(with_kernels(block) for block in getattr(model, name).pattern)
        stacks[name] = StackConfig(pattern=blocks, repeats=1)
    model, read = replace(model, **stacks), jnp.zeros((1, READ), jnp.int32)
    flops = flops_of(model, trainable)
    expected = traced(model, trainable, tokens=TOKENS, encoder_tokens=read)
    assert flops is not None and flops.full * LENGTH == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("targets", [("*.blocks.*",), ("*.mlp.down",)])
def test_adapters_count_as_traced(targets: tuple[str, ...]) -> None:
    model = three(lora=LoRAConfig(rank=2, targets=targets))
    flops = flops_of(model)
    assert flops is not None and flops.full * LENGTH == pytest.approx(traced(model, ("*",), tokens=TOKENS), rel=1e-9)


def test_every_place_says_the_same(tmp_path: Path) -> None:
    """Plan, banner, metrics and benchmark agree on a model with windows, adapters and a trained matrix beside them."""
    model = replace(decoder({"window": 127}, {}, length=1024), lora=LoRAConfig(rank=8))
    optimizer = AdamWConfig(trainable=("head",))
    cfg = run_config(tmp_path, model=model, optimizer=optimizer)
    expected = flops_of(model, ("head",))
    assert expected is not None and expected != flops_of(model)
    plan = estimate(describe(cfg, GPUS["h100"], 1))
    assert plan.flops == expected and ("FLOPs per token", expected.text()) in layout_of_plan(plan)
    figures = to_dict(plan)
    assert (figures["flops_per_token_causal"], figures["flops_per_token_full"]) == (expected.causal, expected.full)
    summary = summarize(model, cfg.optimizer.trainable)
    run: Any = SimpleNamespace(
        program=SimpleNamespace(summary=summary), mesh=SimpleNamespace(size=1, devices=np.array(jax.devices()[:1]))
    )
    rate = step_rate(run)
    assert (rate.flops_per_token_causal, rate.flops_per_token_full) == (expected.causal, expected.full)
    figures = speeds(cfg, 1, roof_of("cpu", "cpu"), Spread(2.0, 2.0, 2.0, 1), 1024)
    assert figures["flops_per_token"] == asdict(expected)
    work = row_work(summary)
    assert work.of_row(np.array([1024])) == pytest.approx(1024 * expected.causal)
