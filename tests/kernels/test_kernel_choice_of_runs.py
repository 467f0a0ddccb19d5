"""What a run reports about its attention kernels: errors before anything is built, and lines of the start banner."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from user_errors import user_error

from megajax.config import load
from megajax.config.errors import UserError
from megajax.job import banner
from megajax.kernels.attention.request import KernelDevice
from megajax.layers.attention.config import AttentionConfig, CrossAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.moe.config import MoEConfig
from megajax.layers.position.config import RelativeBiasConfig
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.facts import facts_of
from megajax.models.t5.config import T5Config
from megajax.training.program import demand_kernels

H100 = KernelDevice(name="NVIDIA H100", capability=(9, 0), cudnn=(9, 28, 0))
A100 = KernelDevice(name="NVIDIA A100", capability=(8, 0), cudnn=(9, 28, 0))
L40S = KernelDevice(name="NVIDIA L40S", capability=(8, 9), cudnn=(9, 28, 0))
MIXER = "model.stack.pattern.0.mixer"


def config(*settings: str):
    return load("llama3.py", *settings)


@pytest.fixture
def kernel_lines(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, KernelDevice], list[tuple[str, str]]]:
    """The banner's lines about kernels on a device."""

    def lines(cfg: Any, device: KernelDevice) -> list[tuple[str, str]]:
        for place in ("megajax.training.program", "megajax.job.banner"):
            monkeypatch.setattr(f"{place}.local_device", lambda: device)
        return banner._kernels(cfg.model, cfg.parallel, facts_of(cfg.model), demand_kernels(cfg))

    return lines


SIZES = {"hidden": 64, "vocabulary_size": 64, "sequence_length": 32}


def model_of(block: BlockConfig) -> DecoderConfig:
    return DecoderConfig(**SIZES, stack=StackConfig(pattern=(block,), repeats=2))


def parts(model: Any, **leaves: str) -> SimpleNamespace:
    """The parts of a run config that `demand_kernels` reads."""
    data, precision = SimpleNamespace(leaves=lambda: leaves), SimpleNamespace(compute="bfloat16")
    return SimpleNamespace(model=model, data=data, precision=precision, parallel=ParallelConfig())


ENCODER_ATTENTION, DECODER_ATTENTION = AttentionConfig(heads=4, causal=False), AttentionConfig(heads=4)
MLP = DenseMLPConfig(ffn=32)


def t5(
    encoder: AttentionConfig = ENCODER_ATTENTION, decoder: AttentionConfig = DECODER_ATTENTION, **cross: Any
) -> SimpleNamespace:
    across = CrossAttentionConfig(heads=4, **cross)
    blocks = BlockConfig(mixer=encoder, mlp=MLP), BlockConfig(mixer=decoder, cross=across, mlp=MLP)
    first, second = (StackConfig(pattern=(block,), repeats=2) for block in blocks)
    model = T5Config(**SIZES, encoder_length=48, encoder=first, stack=second)
    return parts(model, segment_ids="int32", encoder_segment_ids="int32")


def moe(**settings: Any) -> SimpleNamespace:
    experts = MoEConfig(experts=8, expert=GatedMLPConfig(ffn=128), **settings)
    return parts(model_of(BlockConfig(mixer=AttentionConfig(heads=4), mlp=experts)))


def test_every_kind_of_attention_has_a_kernel_and_a_line(kernel_lines) -> None:
    biased = replace(DECODER_ATTENTION, relative=RelativeBiasConfig(shared=True))
    cfg = t5(decoder=biased)
    choices = demand_kernels(cfg, A100)
    expected = "encoder self-attention pallas, decoder self-attention reference, decoder cross-attention pallas"
    assert ", ".join(f"{choice.place} {choice.kernel}" for choice in choices) == expected
    (_, kernels), (_, why) = kernel_lines(cfg, A100)
    assert kernels.startswith(expected)
    assert why == "decoder self-attention reference, because pallas, cudnn, cudnn_mask: has no bias of scores"
    model = cfg.model.with_kernels([choice.kernel for choice in choices])
    encoder, block = model.encoder.pattern[0].mixer, model.stack.pattern[0]
    assert (encoder.kernel, block.mixer.kernel, block.cross.kernel) == ("pallas", "reference", "pallas")


def test_an_unsupported_kernel_is_refused_in_every_section() -> None:
    refused = replace(ENCODER_ATTENTION, kernel="cudnn", dropout=0.1)
    with user_error():
        demand_kernels(t5(encoder=refused), H100)
    with user_error():
        cfg = t5(kernel="pallas")
        cfg.precision.compute = "float32"
        demand_kernels(cfg, H100)


CONTEXT, BECAUSE_FLOAT32 = "parallel.context=4", "reference, because cudnn, pallas, cudnn_mask:"


@pytest.mark.parametrize(
    ("device", "cfg", "line", "why"),
    [
        (H100, config(), "attention cudnn", None),
        (
            L40S,
            config(),
            "attention pallas",
            "pallas, because cudnn: isolates documents from compute capability 9.0 on",
        ),
        (L40S, config("data.isolate_documents=false"), "attention cudnn", None),
        (A100, config("data.isolate_documents=false"), "attention pallas", None),
        (H100, config("precision.compute=float32"), "attention reference", BECAUSE_FLOAT32),
        # Without a GPU there is no faster kernel to mention.
        (KernelDevice(name="cpu"), config(), "attention reference", None),
        (A100, moe(), "attention pallas, experts reference, cross-entropy", "experts reference, because mosaic: runs"),
        (H100, config(CONTEXT), "attention cudnn over context 4 by all_gather, cross", None),
        (
            H100,
            config(CONTEXT, "parallel.context_strategy=ring"),
            "attention pallas over context 4 by ring,",
            "pallas, because cudnn: isolates no documents",
        ),
        (
            H100,
            config(CONTEXT, "parallel.context_strategy=ring+all_to_all", f"{MIXER}.kernel=reference"),
            "attention reference over context 4 by ring+all_to_all in groups of 2,",
            None,
        ),
    ],
)
def test_the_banner_shows_the_kernel_and_the_reasons(device, cfg, line, why, kernel_lines) -> None:
    (name, kernels), *reasons = kernel_lines(cfg, device)
    assert name == "kernels" and kernels.startswith(line)
    assert len(reasons) == (why is not None)
    for name, text in reasons:
        assert name == ("experts" if why.startswith("experts") else "attention") and text.startswith(why)


def test_the_grouped_matmul_is_chosen_for_the_device_of_the_run_and_not_for_this_machine() -> None:
    choices = demand_kernels(moe(), H100)
    assert [(choice.layer, choice.kernel) for choice in choices] == [("attention", "cudnn"), ("experts", "mosaic")]
    (block,) = moe().model.with_kernels([choice.kernel for choice in choices]).stack.pattern
    assert (block.mixer.kernel, block.mlp.kernel) == ("cudnn", "mosaic")
    assert demand_kernels(moe(), KernelDevice(name="cpu"))[1].kernel == "reference"
    with user_error():
        demand_kernels(moe(kernel="mosaic"), A100)


def test_a_kernel_without_the_strategy_is_an_error_before_anything_is_built() -> None:
    cfg = config("parallel.context=4", "parallel.context_strategy=ring", f"{MIXER}.kernel=cudnn")
    with pytest.raises(UserError) as caught:
        demand_kernels(cfg, H100)
    assert str(caught.value) == (
        f"{MIXER}.kernel=cudnn: cuDNN's attention isolates no documents over parallel.context=4 with "
        f"parallel.context_strategy=ring. Set {MIXER}.kernel=pallas or auto."
    )


def problems(mixer: AttentionConfig, **settings: Any) -> list[str]:
    """Mesh problems of a block with this attention."""
    found = model_of(BlockConfig(mixer=mixer, mlp=MLP)).parallel_problems(ParallelConfig(data=1, **settings), None)
    return [f"{problem.setting}: {problem.message}; {problem.hint}" for problem in found]


EXCHANGE = {"context": 4, "context_strategy": "all_to_all"}


def test_heads_that_cannot_be_exchanged_are_a_config_error() -> None:
    (problem,) = problems(AttentionConfig(heads=8, kv_heads=2), **EXCHANGE, tensor=4)
    assert problem == (
        "stack.pattern.0.mixer.heads: heads=8 and 2 key-value heads over parallel.tensor=4, 2 and 1 on a device, "
        "cannot be exchanged over 4 devices (parallel.context_strategy); use parallel.context_strategy=all_gather or "
        "ring, or exchange heads over 2 devices: parallel.context_heads with ring+all_to_all, parallel.context with "
        "all_to_all"
    )
    # One of two key-value heads is copied to both devices that exchange; the four devices of `tensor` have copies too.
    assert not problems(AttentionConfig(heads=8, kv_heads=2), context=2, context_strategy="all_to_all", tensor=4)
    (problem,) = problems(AttentionConfig(heads=12, kv_heads=3), **EXCHANGE)
    assert "heads=12 and 3 key-value heads cannot be exchanged over 4 devices" in problem
    assert "exchange heads over 3, 6 or 12 devices" in problem
    # One head on a device: no number of devices can exchange it.
    (problem,) = problems(AttentionConfig(heads=4), **EXCHANGE, tensor=4)
    assert problem.endswith("; use parallel.context_strategy=all_gather or ring")
    assert not problems(AttentionConfig(heads=12, kv_heads=3), context=4, context_strategy="ring")


@pytest.mark.parametrize("strategy", ["ring", "all_to_all", "ring+all_to_all"])
def test_biases_of_scores_and_other_sections_need_gathered_keys(strategy) -> None:
    biased = AttentionConfig(heads=4, relative=RelativeBiasConfig())
    (refusal,) = problems(biased, context=4, context_strategy=strategy)
    assert "mixer.relative: biases need the keys of whole rows on each device, and parallel.context=4" in refusal
    assert refusal.endswith("set parallel.context_strategy=all_gather")
    assert not problems(biased, context=4)
    exchanging, ring = 1 if strategy == "ring" else 2, 4 if "ring" in strategy else 1
    sizes = {"tensor": 1, "context": 4, "exchanging": exchanging, "ring": ring}
    across = CrossAttentionConfig(heads=4)
    assert [problem.setting for problem in across.mesh_problems(sizes)] == ["kernel"]
    assert not [*across.mesh_problems(sizes | {"exchanging": 1, "ring": 1})]
