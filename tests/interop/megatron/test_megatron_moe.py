"""Command lines of mixtures of experts and hybrids, from Megatron-LM's examples."""

import pytest
from flag_lines import HYBRID, MOE, config, convert_line, problem

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.moe.config import CapacityConfig, DispatchConfig, MoEConfig, RouterConfig
from megajax.layers.stack.config import SegmentsConfig
from megajax.models.presets.deepseek import deepseek
from megajax.models.presets.hybrids.mamba_models import nemotron_h
from megajax.models.presets.llama import mixtral

BIG = (
    "--without mock-data --data-path a --disable-bias-linear --normalization RMSNorm --hidden-dropout 0"
    " --attention-dropout 0 --untie-embeddings-and-output-weights"
)


def experts(changes: str) -> MoEConfig:
    layer = config(changes).model.stack.pattern[-1].mlp
    assert isinstance(layer, MoEConfig)
    return layer


def test_mixtral_8x7b_is_the_preset() -> None:
    """The flags are those of examples/mixtral on 64 GPUs."""
    run = config(
        f"{BIG} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --swiglu"
        " --group-query-attention --num-query-groups 8 --position-embedding-type rope --no-position-embedding"
        " --rotary-base 1000000 --seq-length 4096 --max-position-embeddings 32768 --vocab-size 31999"
        " --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.02"
        " --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall --overlap-grad-reduce"
        " --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8"
        " --num-layers-per-virtual-pipeline-stage 8 --use-distributed-optimizer --bf16 --micro-batch-size 1"
        " --global-batch-size 256"
    )
    assert run.model.stack == mixtral("8x7b").stack
    assert run.model.parameter_count().total == 46_702_792_704
    assert (run.parallel.pipeline, run.parallel.expert, run.parallel.data) == (4, 8, None)


def test_deepseek_v3_is_the_preset() -> None:
    run = config(
        f"{BIG} --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --swiglu"
        " --norm-epsilon 1e-6 --seq-length 4096 --max-position-embeddings 4096 --multi-latent-attention"
        " --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128"
        " --qk-layernorm --position-embedding-type rope --rope-type rope --mtp-num-layers 1"
        " --mtp-loss-scaling-factor 0.3 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048"
        " --moe-shared-expert-intermediate-size 2048 --moe-shared-expert-overlap --moe-router-topk 8"
        " --moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-num-groups 8"
        " --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias"
        " --moe-router-bias-update-rate 1e-3 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4"
        " --moe-router-dtype fp32 --moe-token-dispatcher-type flex --moe-enable-deepep --moe-grouped-gemm"
        " --expert-model-parallel-size 64 --use-megatron-fsdp --bf16 --vocab-size 129279"
    )
    expected = deepseek("v3")
    assert run.parallel.expert == 64 and run.model.prediction.weight == 0.3
    assert [part.repeats for part in run.model.stack.parts()] == [3, 58]
    for part, expected_part in zip(run.model.stack.parts(), expected.stack.parts(), strict=True):
        assert part.pattern[0].mlp == expected_part.pattern[0].mlp
    assert run.model.parameter_count().total == expected.parameter_count().total


def test_layers_of_several_kinds_are_reported_with_their_flag() -> None:
    mapped = dict(convert_line(f"{MOE} --moe-layer-freq [0]*1+[1]*3").mapped)
    assert mapped["--num-layers 4"] == mapped["--moe-layer-freq [0]*1+[1]*3"] == "model.stack.segments"


def test_an_integer_frequency_begins_with_the_first_layer() -> None:
    layers = [isinstance(block.mlp, MoEConfig) for block in config(f"{MOE} --moe-layer-freq 2").model.stack.pattern]
    assert layers == [True, False]
    assert "a list of 4 zeros and ones (--num-layers)" in problem(f"{MOE} --moe-layer-freq [1,0]")
    assert len(convert_line(f"{MOE} --moe-layer-freq [1,0]").problems) == 1
    assert "leaves no layer with experts" in problem(f"{MOE} --moe-layer-freq [0]*4")


def test_the_defaults_are_megatron_lms() -> None:
    layer = experts(MOE)
    assert (layer.top_k, layer.expert.ffn, layer.shared, layer.latent) == (2, 256, None, None)
    # Routers have biases if all matrices have them.
    assert layer.router == RouterConfig(bias=True) and layer.dispatch == DispatchConfig()
    assert experts(f"{MOE} --disable-bias-linear").router == RouterConfig()


def test_kinds_of_balancing_go_together() -> None:
    kinds = f"{MOE} --moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss"
    router = experts(f"{kinds} --moe-aux-loss-coeff 0.01 0.02 0.03").router
    assert (router.aux_loss, router.row_loss, router.global_loss) == (0.01, 0.02, 0.03)
    router = experts(f"{kinds} --moe-aux-loss-coeff 0.01").router
    assert (router.aux_loss, router.row_loss, router.global_loss) == (0.01, 0.01, 0.01)
    assert "2 coefficients for 3 kinds" in problem(f"{kinds} --moe-aux-loss-coeff 0.01 0.02")
    assert "expected numbers, got x" in problem(f"{MOE} --moe-aux-loss-coeff x")
    none = f"{MOE} --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.01"
    assert experts(none).router == RouterConfig(bias=True)
    quantile = convert_line(f"{MOE} --moe-router-load-balancing-type quantile_balancing")
    assert [flag for flag, _ in quantile.refused] == ["--moe-router-load-balancing-type quantile_balancing"]


def test_capacity_is_off_below_zero() -> None:
    assert experts(f"{MOE} --moe-expert-capacity-factor -1").router.capacity is None
    capacity = experts(f"{MOE} --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity").router.capacity
    assert capacity == CapacityConfig(factor=1.5)


@pytest.mark.parametrize(
    ("changes", "expert", "kind"),
    [
        ("--expert-model-parallel-size 4", 4, "cut"),
        ("--expert-model-parallel-size 4 --expert-tensor-parallel-size 2", 4, "cut"),
        ("--expert-model-parallel-size 4 --expert-tensor-parallel-size 1", 2, "whole"),
    ],
)
def test_devices_of_experts(changes: str, expert: int, kind: str) -> None:
    """Megatron-LM's size of the expert axis includes the tensor axis if experts are not sharded over it."""
    layout = config(f"{MOE} --tensor-model-parallel-size 2 --sequence-parallel {changes}").parallel
    assert (layout.expert, layout.expert_tensor, layout.tensor) == (expert, kind, 2)


def test_unsupported_layouts_of_experts_are_refused() -> None:
    tensor = f"{MOE} --tensor-model-parallel-size 4 --sequence-parallel"
    cases = (
        ("--expert-tensor-parallel-size 2", "or none: 4 or 1"),
        ("--expert-tensor-parallel-size 1 --expert-model-parallel-size 2", "not divisible by the tensor axis of 4"),
    )
    for changes, reason in cases:
        (refused,) = convert_line(f"{tensor} {changes}").refused
        assert reason in refused[1]
    for script in ("pretrain_bert.py", "pretrain_t5.py"):
        assert "only causal text models" in dict(convert_line(f"{script} {MOE}").refused)["--num-experts 4"]


NEMOTRON = (
    f"pretrain_mamba.py {BIG} --without num-layers --is-hybrid-model --position-embedding-type none --squared-relu"
    " --hidden-size 4096 --ffn-hidden-size 21504 --num-attention-heads 32 --group-query-attention"
    " --num-query-groups 8 --kv-channels 128 --mamba-num-heads 128 --mamba-head-dim 64 --mamba-state-dim 128"
    " --mamba-num-groups 8 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 131071"
    " --hybrid-override-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    " --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --bf16 --use-mcore-models"
)


def test_nemotron_h_8b_is_the_preset() -> None:
    run, preset = config(NEMOTRON), nemotron_h("8b")
    assert run.model.stack == preset.stack and run.model.norm == preset.norm
    assert not run.model.learned_positions
    assert run.model.parameter_count().total == preset.parameter_count().total


def test_letters_of_a_pattern() -> None:
    line = "--without num-layers --mamba-num-groups 2 --num-experts 4 --multi-latent-attention"
    stack = config(f"{line} --hybrid-layer-pattern ME+-").model.stack
    assert isinstance(stack, SegmentsConfig)
    parts = [next(iter(block.parts().values())) for block in stack.pattern]
    assert [type(part) for part in parts[:3]] == [Mamba2Config, MoEConfig, LatentAttentionConfig]
    # Twice the hidden size in heads of 64.
    assert parts[0].heads == 2
    for letter, word in (("G", "gated delta"), ("D", "sparse attention")):
        assert f"there is no block for '{letter}' ({word}" in problem(f"{HYBRID} --hybrid-layer-pattern M{letter}")
    assert "there is no block for 'x'" in problem(f"{HYBRID} --hybrid-layer-pattern Mx")
    assert "--num-experts: must be given" in problem("--without num-layers --hybrid-layer-pattern ME")
    assert "leave it out" in problem(f"--num-layers 3 {HYBRID.replace('--without num-layers ', '')}")


def test_a_pattern_cuts_the_pipeline() -> None:
    """Chunks are those of stage 0, 1, 0 and 1."""
    line = f"{HYBRID} --pipeline-model-parallel-size 2 --hybrid-layer-pattern M*M*"
    layout = config(line.replace("M*M*", "M*|M*|M*M*|M*")).parallel
    assert (layout.pipeline, layout.virtual_stages, layout.layers) == (2, 2, (1, 1, 2, 1))
    assert config(line).parallel.layers is None
    assert "does not divide them" in problem(line.replace("M*M*", "M*|M*|M*"))


def test_multi_token_prediction_of_a_hybrid() -> None:
    model = config(f"{HYBRID} --hybrid-layer-pattern M*M*/*-/*- --mtp-num-layers 2").model
    assert model.prediction.depth == 2 and isinstance(model.prediction.block.mixer, AttentionConfig)
    older = f"{HYBRID} --mtp-num-layers 2 --mtp-hybrid-override-pattern *-"
    assert config(older).model.prediction == model.prediction
