"""Bytes that layers save for the backward pass: by formula and in the traced program; and refusals."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tiny_runs import LENGTH, ONE, READ, build_program, gpt, llama, with_block

from megajax.config.compose import problems_of
from megajax.kernels.attention.request import KernelDevice, KernelRequest
from megajax.layers.attention.config import CrossAttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.context import Context
from megajax.layers.delta.config import GatedDeltaNetConfig
from megajax.layers.expert_facts import ExpertSharding
from megajax.layers.facts import Share
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig
from megajax.layers.recompute import NAMES, PARTS, SELECTIVE, Recomputing
from megajax.layers.stack.config import StackConfig
from megajax.layers.stack.spans import Span
from megajax.layers.stack.stack import BLOCKS
from megajax.models.decoder.config import DecoderConfig
from megajax.models.facts import block_facts
from megajax.models.memory import saved_bytes
from megajax.models.t5.config import T5Config
from megajax.pipeline.layer_forward_backward import differentiated
from megajax.training.program import Program

ROWS, FLOAT = 6, 4
"""Rows of a microbatch of 4, and bytes of a float32."""


def on_cpus(model: DecoderConfig) -> DecoderConfig:
    """The model with the kernels of CPUs."""
    return model.with_kernels(
        [choice.kernel for choice in model.kernel_choices(KernelRequest(), KernelDevice(name="cpu"))]
    )


def formula(model: DecoderConfig, width: int = FLOAT) -> list[tuple[float, float, float]]:
    """(layers, bytes on the device, bytes in host memory) for each way of saving."""
    residual_width = FLOAT if model.residual == "float32" else width
    share = Share(tokens=ROWS * LENGTH, width=width, residual_width=residual_width)
    section = on_cpus(model).section_facts()[-1]
    blocks = block_facts(section, section.stack.pattern, "float32")
    return [
        (layer_bytes.layers, layer_bytes.device, layer_bytes.host)
        for layer_bytes in saved_bytes(section.recomputing, blocks, share, section.stack.repeats)
    ]


def traced(model: DecoderConfig, compute: str = "float32") -> list[tuple[float, float, float]]:
    """The same by tracing the layers' gradients."""
    program = build_program(model, ONE, microbatches=4, compute=compute)
    stack, actual = program.abstract.stack, []
    for span in stack.spans():
        layers = span.repeats * len(span.places)
        avals = jax.make_jaxpr(lambda *args, span=span: differentiated(span.unit, *args)[1])(
            *arguments(program, span, compute)
        ).out_avals
        on_host = [aval.memory_space == jax.memory.Space.Host for aval in avals]
        # Constants, such as the frequencies of rotary positions, have fewer elements than there are tokens.
        sizes = [aval.size * aval.dtype.itemsize * (aval.size >= ROWS * LENGTH) / layers for aval in avals]
        host = sum(size for size, away in zip(sizes, on_host, strict=True) if away)
        actual.append((span.units * layers, sum(sizes) - host, host))
    return actual


def arguments(program: Program, span: Span, compute: str) -> tuple:
    """A unit's weights, common weights, numbers, x and context, without values."""
    stacked, several, like = {}, () if span.repeats == 1 else (span.repeats,), jax.ShapeDtypeStruct
    for path, spec in program.arrays.items():
        if path.startswith("stack." + BLOCKS):
            stacked[path.removeprefix("stack." + BLOCKS)] = like((*several, *spec.shape[1:]), jnp.dtype(compute))
    ints = like((ROWS, LENGTH), jnp.int32)
    ctx = Context(positions=ints, index=like((LENGTH,), jnp.int32), segments=ints)
    model = program.cfg.model
    if isinstance(model, T5Config):
        memory = like((ROWS, READ, model.hidden), jnp.dtype(compute))
        ctx = ctx._replace(memory=memory, memory_segments=like((ROWS, READ), jnp.int32))
    residual = jnp.dtype("float32" if model.residual == "float32" else compute)
    return stacked, {}, like(several, jnp.int32), like((ROWS, LENGTH, model.hidden), residual), ctx


def small(**changes: Any) -> DecoderConfig:
    return replace(gpt(dropout=0.0, repeats=4), **changes)


def latent(**changes: Any) -> DecoderConfig:
    """Latent attention whose queries have a latent of their own."""
    mixer = LatentAttentionConfig(heads=4, query_rank=12, key_value_rank=8, content_dim=6, position_dim=4, value_dim=5)
    return replace(with_block(llama(), mixer=mixer), **changes)


def reading(**changes: Any) -> T5Config:
    """A decoder that reads another section with rows of another length."""
    model, (block,) = llama(repeats=2), small().stack.pattern
    cross = CrossAttentionConfig(heads=4, kv_heads=2)
    across = BlockConfig(mixer=block.mixer, cross=cross, mlp=block.mlp, norm=block.norm)
    return T5Config(
        hidden=model.hidden,
        vocabulary_size=model.vocabulary_size,
        sequence_length=LENGTH,
        encoder_length=READ,
        encoder=StackConfig(pattern=(replace(block, mixer=replace(block.mixer, causal=False)),), repeats=2),
        stack=StackConfig(pattern=(across,), repeats=2),
        **changes,
    )


def recurrent(mixer: Any, **changes: Any) -> DecoderConfig:
    return replace(with_block(llama(), mixer=mixer), **changes)


MAMBA2 = Mamba2Config(heads=4, head_dim=6, state=5, groups=2)
DELTA = GatedDeltaNetConfig(heads=4, key_heads=2, head_dim=6, key_dim=5)


@pytest.mark.parametrize("build", [small, latent, reading, partial(recurrent, MAMBA2), partial(recurrent, DELTA)])
def test_every_part_saves_exactly_its_tensors(build: Any):
    for recompute in (SELECTIVE, ("residual", "mlp", "core_attention"), ("query_key_value", "gate", "latent")):
        model = build(recompute=recompute)
        assert formula(model) == traced(model), recompute


def test_offloaded_tensors_are_in_host_memory():
    model = small(recompute="selective", offload=("query_key_value", "mlp"))
    assert formula(model) == traced(model)
    ((_, device, host),) = formula(small(recompute="full", offload=("input",)))
    assert (device, host) == (0, ROWS * LENGTH * model.hidden * FLOAT)
    assert formula(small(recompute="full", offload=("input",))) == traced(small(recompute="full", offload=("input",)))


def test_some_layers_and_several_together():
    for changes in ({"recompute_layers": 1}, {"layers_per_checkpoint": 2}):
        model = small(recompute="full", **changes)
        assert formula(model) == traced(model), changes
    assert [layers for layers, _, _ in formula(small(recompute="full", recompute_layers=1))] == [1, 3]


def test_the_residual_stream_may_be_float32():
    """Arrays that are computed from it stay in bfloat16."""
    for parts in ((), ("residual",), ("norm", "query_key_value", "mlp")):
        recompute = tuple(part for part in PARTS if part not in ("input", *parts))
        for residual in ("compute", "float32"):
            model = small(residual=residual, recompute=recompute)
            assert formula(model, width=2) == traced(model, "bfloat16"), (parts, residual)


def test_without_recomputation_more_is_saved_than_the_named_tensors():
    ((_, device, _),) = formula(small(recompute="none"))
    ((_, everything, _),) = traced(small(recompute="none"))
    assert device < everything < 2 * device


def test_without_recomputation_experts_save_their_rows_and_no_activation_twice():
    """Gate, up and the input of `down` for each row; the activation before its factor is recomputed."""
    mixture = MoEConfig(experts=4, top_k=2, expert=GatedMLPConfig(ffn=56))
    model = replace(with_block(llama(), mlp=mixture), recompute="none")
    program = build_program(model, ONE, microbatches=4, compute="float32")
    (span,) = program.abstract.stack.spans()
    saved = jax.make_jaxpr(lambda *args: differentiated(span.unit, *args)[1])(*arguments(program, span, "float32"))
    rows = 2 * ROWS * LENGTH
    shapes = [aval.shape[-2:] for aval in saved.out_avals if aval.ndim > 1 and aval.dtype == jnp.float32]
    assert shapes.count((rows, 56)) == 3 and shapes.count((rows, model.hidden)) == 1
    section = on_cpus(model).section_facts()[-1]
    (facts,) = block_facts(section, section.stack.pattern, "float32")
    assert facts.on(ExpertSharding()).expert_inputs == 2 * model.hidden


def test_synonyms():
    assert Recomputing(recompute="selective").policy() == Recomputing(recompute=SELECTIVE).policy()
    everything = tuple(part for part in PARTS if part != "input")
    assert Recomputing(recompute="full").policy() == Recomputing(recompute=everything).policy()
    assert set(NAMES) == set(PARTS)


@pytest.mark.parametrize(
    ("changes", "setting", "message"),
    [
        ({"recompute": ("norm", "input")}, "recompute", "everything else is computed from"),
        ({"recompute": ("norm", "norm")}, "recompute", "norm twice"),
        ({"recompute": ()}, "recompute", "names no part"),
        ({"offload": ("norm",)}, "offload", "norm is recomputed with recompute=selective"),
        ({"recompute": "none", "offload": ("mlp",)}, "offload", "saves all without names"),
        ({"recompute": "none", "recompute_layers": 2}, "recompute_layers", "cannot be 2 with recompute=none"),
        ({"recompute_layers": 0}, "recompute_layers", "must be at least 1, got 0"),
        ({"layers_per_checkpoint": 2}, "layers_per_checkpoint", "cannot be 2 with recompute=selective"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], setting: str, message: str):
    problems = {problem.setting: problem.message for problem in problems_of(replace(llama(repeats=4), **changes))}
    assert list(problems) == [setting] and message in problems[setting]
