"""Invalid settings of mixtures of experts: one message each, with both values and what to change."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from tiny_runs import llama

from megajax.config import load
from megajax.config.compose import problems_of
from megajax.job.banner import _blocks, _experts, _matmuls
from megajax.job.description import mixtures_of
from megajax.layers.expert_facts import ExpertSharding
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import CapacityConfig, DispatchConfig, MoEConfig, RouterConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.models.facts import block_facts
from megajax.precision.config import (
    Fp8BlocksConfig,
    Fp8CurrentConfig,
    Fp8DelayedConfig,
    Mxfp8Config,
    Nvfp4Config,
    PrecisionConfig,
)

EXPERT = GatedMLPConfig(ffn=6)


def moe(**settings) -> MoEConfig:
    return MoEConfig(**{"experts": 6, "expert": EXPERT} | settings)


ALONE = {
    "more experts a token than experts": (moe(top_k=7), "top_k: is 7, but there are experts=6; use at most 6"),
    "no experts": (moe(experts=0), "experts: must be at least 1, got 0"),
    "groups that do not divide": (moe(router=RouterConfig(groups=4, chosen_groups=2)),
        "router.groups: 4 groups do not divide 6 experts; groups can be 1, 2, 3, 6"),
    "more groups chosen than groups": (moe(router=RouterConfig(groups=3, chosen_groups=4)),
        "router.chosen_groups: must be between 1 and groups=3, got 4"),
    "chosen groups that do not divide top_k": (moe(top_k=3, router=RouterConfig(groups=3, chosen_groups=2)),
        "router.chosen_groups: 2 does not divide top_k=3; use one of its divisors, or set group_scores"),
    "too few experts in the chosen groups": (moe(top_k=4, router=RouterConfig(groups=6, chosen_groups=2)),
        "router.chosen_groups: 2 groups of 1 experts have fewer than top_k=4; use at least 4"),
    "more scores than a group has": (moe(router=RouterConfig(groups=3, chosen_groups=2, group_scores=3)),
        "router.group_scores: is 3, but a group has 2 experts; use 1 to 2"),
    "scores of no groups": (RouterConfig(group_scores=1),
        "group_scores: needs groups of experts, but groups=none; set groups, or set this to none"),
    "groups alone": (RouterConfig(groups=2), "groups: must be given together with chosen_groups; set both, or neither"),
    "no capacity": (CapacityConfig(factor=0.0), "factor: must be above 0, got 0"),
    "capacity below 0": (CapacityConfig(factor=-1.0), "factor: must be above 0, got -1"),
    "room below the mean": (DispatchConfig(room=0.5),
        "room: must be at least 1, got 0.5; 1.5 is usual, none drops nothing"),
    "no chunk": (DispatchConfig(chunks=0), "chunks: must be at least 1, got 0"),
    "negative loss": (RouterConfig(aux_loss=-0.1), "aux_loss: must be at least 0, got -0.1"),
    "jitter of all": (RouterConfig(jitter=1.0), "jitter: must be at least 0 and below 1, got 1"),
    "two ways to balance at once": (
        RouterConfig(sinkhorn=True, aux_loss=0.1),
        "sinkhorn: balances experts itself and excludes losses, groups and balance_rate; "
        "set these losses to 0, the others to none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ALONE)
def test_invalid_settings(case):
    config, expected = ALONE[case]
    assert [str(problem).replace("\n    ", "; ") for problem in problems_of(config)] == [expected]


ON_MESHES = {
    "experts the axis does not divide": (ParallelConfig(data=1, expert=4),
        "experts: experts=6 is not divisible by parallel.expert=4; they can be distributed over 1, 2, 3, 6 devices"),
    "whole experts over both axes": (
        ParallelConfig(data=1, expert=2, tensor=2, sequence=True, expert_tensor="whole"),
        "experts: experts=6 is not divisible by parallel.expert=2 x parallel.tensor=2; "
        "they can be distributed over 1, 2, 3, 6 devices",
    ),
    "a width that tensor does not divide": (ParallelConfig(data=1, expert=2, tensor=4),
        "expert.ffn: ffn=6 is not divisible by parallel.tensor=4; use ffn=4 or 8; parallel.tensor can be 1, 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", ON_MESHES)
def test_invalid_layouts(case):
    parallel, expected = ON_MESHES[case]
    model = llama()
    (block,) = model.stack.pattern
    model = replace(model, stack=replace(model.stack, pattern=(replace(block, mlp=moe()),)))
    problems = [replace(p, setting=p.setting.partition(".mlp.")[2]) for p in model.parallel_problems(parallel, 1)]
    assert [str(problem).replace("\n    ", "; ") for problem in problems] == [expected]


def test_whole_experts_need_sequence_parallelism():
    problems = ParallelConfig(data=1, tensor=2, expert_tensor="whole").problems()
    assert [problem.setting for problem in problems] == ["expert_tensor"]


def test_the_banner_shows_the_effective_dispatcher():
    """If ragged is emulated, if nothing is sent, and if the dispatcher is the configured one."""
    facts = moe(dispatch=DispatchConfig(way="ragged")).expert_facts(32)
    sharded, single = ExpertSharding(expert=2), ExpertSharding()
    assert "no ragged all-to-all" in facts.way_note(sharded, on_cpu=True)
    warning = facts.way_note(sharded, on_cpu=False)
    assert warning.startswith("dispatch.way=ragged: gradients of ragged exchanges were wrong by XLA's one-shot kernel")
    assert "sends more than gather" in warning and "ONLY=experts" in warning
    assert facts.way_note(single, on_cpu=False) == "all experts are on each device: dispatch.way=ragged sends nothing"
    assert moe().expert_facts(32).way_note(single, on_cpu=True) == ""
    assert moe(dispatch=DispatchConfig(way="capacity")).expert_facts(32).way_note(sharded, on_cpu=False) == ""


@pytest.mark.parametrize("experts", [True, False])
def test_the_banner_has_a_line_about_experts(experts):
    model = llama()
    (block,) = model.stack.pattern
    if experts:
        model = replace(model, stack=replace(model.stack, pattern=(replace(block, mlp=moe(experts=8)),)))
    parallel = ParallelConfig(data=1, expert=4)
    mesh = build_mesh(parallel, jax.devices()[:4])
    section = model.section_facts()[0]
    mixtures = mixtures_of(block_facts(section, section.stack.pattern, "bfloat16"), 16)
    fp8, device = PrecisionConfig(matmul=Fp8CurrentConfig()), jax.devices()[0]
    lines = [text for _, text in _experts(parallel, mesh, mixtures, known=True)]
    if experts:
        assert len(lines) == 1 and lines[0].startswith("2 of 8 experts on a device, gather; room for")
        note = mixtures[0][0].way_note(ExpertSharding.of(parallel), on_cpu=False)
        assert note.startswith("dispatch.way=auto is not ragged, which sends fewer bytes: gradients of ragged")
        assert _matmuls(fp8, device, ["reference"])[0][1].endswith(
            "rounded once a step; experts too, multiplied in bfloat16: no kernel multiplies groups in fewer bits"
        )
        assert "rounded for each microbatch;" in _matmuls(fp8, device, ["reference"], once=False)[0][1]
    else:
        assert lines == ["none: the 4 devices of expert split the rows, like those of data"]
        assert "experts" not in _matmuls(fp8, device, [])[0][1]


def test_the_banner_says_where_blocks_lie_on_two_devices():
    model = load("llama3.py:llama3_8b").model
    blocks = PrecisionConfig(matmul=Fp8BlocksConfig())
    assert not _blocks(blocks, 8, model) and not _blocks(PrecisionConfig(matmul=Mxfp8Config()), 16, model)
    [(name, text)] = _blocks(blocks, 32, model)
    assert name == "blocks" and text.startswith("each device rounds whole matrices")
    assert text.endswith("no multiples of 128: stack.pattern.0.mlp.ffn (448)"), text
    (block,) = model.stack.pattern
    block = replace(block, mixer=replace(block.mixer, head_dim=128))
    model = replace(model, hidden=4160, stack=replace(model.stack, pattern=(block,)))
    assert not _blocks(blocks, 8, model), "tensor does not divide hidden"


def test_the_banner_says_what_multiplies():
    device: Any = SimpleNamespace(device_kind="NVIDIA B200", compute_capability="10.0")
    lines = {
        (type(cfg).__name__, kind.device_kind): _matmuls(PrecisionConfig(matmul=cfg), kind, [])[0][1]
        for cfg in (Mxfp8Config(), Nvfp4Config(), Fp8BlocksConfig(scales="float32"), Fp8DelayedConfig(history=4))
        for kind in (device, jax.devices()[0])
    }
    assert lines["Mxfp8Config", "NVIDIA B200"] == "layers, MXFP8, blocks of 32; by cuDNN"
    assert "multiplied in bfloat16, because cpu has no products of blocks" in lines["Mxfp8Config", "cpu"]
    assert lines["Nvfp4Config", "NVIDIA B200"].endswith("; first 1 and last 1 layers in bfloat16")
    assert "multiplied in float32, because scales are float32" in lines["Fp8BlocksConfig", "NVIDIA B200"]
    hopper: Any = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
    kernel = "by the Mosaic kernel of 8-bit codes, where"
    for cfg, experts in ((Fp8BlocksConfig(scales="float32"), []), (Fp8CurrentConfig(), ["mosaic"])):
        line = _matmuls(PrecisionConfig(matmul=cfg), hopper, experts)[0][1]
        assert line.endswith(f"{kernel} {'' if experts else 'tokens and '}sides are multiples of 128")
    for cfg, end in (
        (Nvfp4Config(), "by the Mosaic kernel of scaled blocks, where sides are multiples of 128"),
        (Mxfp8Config(kernel="reference"), "multiplied in bfloat16: kernel=reference"),
        (Fp8BlocksConfig(scales="float32"), "multiplied in float32: no kernel multiplies groups in fewer bits"),
    ):
        assert _matmuls(PrecisionConfig(matmul=cfg), device, ["reference"])[0][1].endswith(f"; experts too, {end}")
    named = _matmuls(PrecisionConfig(matmul=Mxfp8Config(kernel="reference")), device, [])[0][1]
    assert named.endswith("rounded, then multiplied in bfloat16, because kernel=reference")
    assert "scales from previous steps (1), margin 0 bits" in lines["Fp8DelayedConfig", "cpu"]
