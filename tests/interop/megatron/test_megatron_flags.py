"""The table of Megatron-LM's flags: it is complete, its settings exist, and each flag has the effect of its row."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from flag_lines import CASES, CASES_OF, CHATS, FILES, FIM, LOCAL, MUP, REPLICATION, config, convert_line, line, problem

from megajax.checkpoint.config import LocalConfig
from megajax.config import field_types
from megajax.config.dump import flatten
from megajax.data.chat.config import ChatConfig
from megajax.data.text.config import FillInMiddleConfig
from megajax.interop.megatron.flags.reading import MappedFlag, Noted, Refused, Unnecessary
from megajax.interop.megatron.flags.translate import FLAGS, FLAGS_OF, ONE_OF, ONLY_WITH, SCRIPTS, convert
from megajax.models.bert.config import BertConfig
from megajax.models.llava.config import LlavaConfig
from megajax.models.t5.config import T5Config
from megajax.optim.config import LionConfig, MuonConfig, SGDConfig
from megajax.precision.config import ConstantScaleConfig, DynamicScaleConfig, Fp8BlocksConfig, Mxfp8Config, Nvfp4Config
from megajax.training.config import StepRampConfig
from megajax.training.run_config import RunConfig

ROWS = [*FLAGS.values(), *(row for rows in FLAGS_OF.values() for row in rows.values())]


def test_settings_of_the_table_exist() -> None:
    names = set(field_types.names(RunConfig))
    for model in (BertConfig, T5Config, LlavaConfig):
        names |= {f"model.{name}" for name in field_types.names(model)}
    mapped = [row for row in ROWS if isinstance(row.fate, MappedFlag)]
    missing = {row.name: settings for row in mapped if (settings := set(row.fate.settings) - names)}
    assert not missing


def test_rows_are_complete() -> None:
    for row in ROWS:
        match row.fate:
            case MappedFlag(settings, by):
                assert settings and (by is not None or len(settings) == 1), row.name
            case Unnecessary(reason) | Noted(reason) | Refused(reason):
                assert len(reason.split()) >= 3, row.name
        assert row.kind is not bool or row.default in (None, False) or isinstance(row.fate, Unnecessary), row.name
    for names in (*ONE_OF, *([name.partition("=")[0] for name in names] for names in ONLY_WITH)):
        assert all(name in FLAGS for name in names), names


def test_every_mapped_flag_has_a_case() -> None:
    assert {name for name, row in FLAGS.items() if isinstance(row.fate, MappedFlag)} == set(CASES)
    assert set(CASES_OF) == set(FLAGS_OF) < set(SCRIPTS)
    for script, rows in FLAGS_OF.items():
        assert set(rows) <= set(FLAGS), "other scripts refuse the flag, so they need a row for it"
        assert {name for name, row in rows.items() if isinstance(row.fate, MappedFlag)} == set(CASES_OF[script])


OF_SCRIPTS = [(script, name, case) for script, cases in CASES_OF.items() for name, case in cases.items()]


@cache
def settings_before(line: str) -> dict[str, Any]:
    return flatten(config(line))


@pytest.mark.parametrize(
    ("script", "name", "case"), [*(("", name, case) for name, case in CASES.items() if case is not None), *OF_SCRIPTS]
)
def test_a_mapped_flag_changes_its_settings(script: str, name: str, case: str) -> None:
    before, divided, more = case.partition(" | ")
    values_before, converted = settings_before(before if divided else ""), convert_line(f"{before} {more}")
    assert not converted.problems and not converted.refused, (converted.problems, converted.refused)
    assert converted.config is not None
    values_after = flatten(converted.config)
    settings = {**FLAGS, **FLAGS_OF.get(script, {})}[name].fate.settings
    changed = {key for key in {*values_before, *values_after} if values_before.get(key) != values_after.get(key)}
    touched = {key for key in changed if any(key == setting or key.startswith(f"{setting}.") for setting in settings)}
    assert touched or (settings == ("model.stack.pattern",) and changed), changed
    reported = [flag for flag, _ in converted.mapped if flag.split()[0] == f"--{name}"]
    assert reported, (name, converted.mapped, converted.idle)


def test_unknown_flags_are_errors_with_the_nearest_name() -> None:
    assert "did you mean --tensor-model-parallel-size?" in problem("--tensor-model-paralel-size 2")
    assert "did you mean --inprocess-soft-timeout?" in problem("--inprocess-soft-timeouts 3")
    assert "did you mean --virtual-pipeline" not in problem("--virtual-pipeline-model-parallel-sise 2")
    assert "is not a known flag" in problem("--frobnicate 7")
    # Underscores and dashes are equal, because some of Megatron-LM's flags mix them.
    assert config("--override-opt-param-scheduler").steps == 10
    assert "--hidden-size: expected a whole number, got wide" in problem("--hidden-size wide")
    assert "--bf16: takes no value, got 1: true" in problem("--bf16 true")
    assert "--seed: takes one value, got 0: none" in problem("--seed ")
    assert "before the first flag" not in problem("--seed 1 2")


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ("--fp16 --bf16", ("--fp16", "--bf16")),
        ("--train-samples 100", ("--train-iters 10", "--train-samples 100")),
        ("--rampup-batch-size 2 2 20 --step-batch-size-schedule 0:4", ("--rampup", "--step-batch-size-schedule 0:4")),
        ("--lr-warmup-fraction .01 --lr-warmup-iters 3", ("--lr-warmup-fraction 0.01", "--lr-warmup-iters 3")),
        ("--lr-decay-samples 7", ("--train-iters 10", "--lr-decay-samples 7")),
        ("--swiglu --squared-relu", ("--swiglu", "--squared-relu")),
        ("--data-path a", ("--mock-data", "--data-path a")),
        ("--weight-decay-incr-style constant --start-weight-decay 0", ("--start-weight-decay", "constant")),
        ("--recompute-activations --recompute-granularity full", ("--recompute-activations", "full")),
        ("--recompute-granularity selective --recompute-method block", ("--recompute-method block", "full")),
        ("--seq-length 64", ("--max-position-embeddings", "--seq-length 64")),
        ("--use-distributed-optimizer --use-torch-fsdp2", ("--use-distributed-optimizer", "--use-torch-fsdp2")),
        ("--save-interval 3 --save s --save-retain-interval 4", ("--save-interval 3", "--save-retain-interval 4")),
        ("--global-batch-size 9", ("--global-batch-size 9", "--micro-batch-size 2")),
    ],
)
def test_contradictions_name_both(changes: str, names: tuple[str, ...]) -> None:
    text = problem(changes)
    assert all(name in text for name in names), text


@pytest.mark.parametrize("name", ["num-layers", "hidden-size", "seq-length", "micro-batch-size", "train-iters", "lr"])
def test_required_flags(name: str) -> None:
    assert f"--{name}: must be given" in problem(f"--without {name}")


@pytest.mark.parametrize(
    "changes",
    [
        "--num-layers 0",
        "--num-layers -4",
        "--ffn-hidden-size 0",
        "--ffn-hidden-size 0 --swiglu",
        "--vocab-size 0",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 0",
        "--lr-decay-iters 0",
        "--position-embedding-type rope --rotary-seq-len-interpolation-factor 0",
    ],
)  # fmt: skip
def test_zero_does_not_count_as_not_given(changes: str) -> None:
    name, value = next(flag for flag in changes.split(" --") if flag[-1] in "04").removeprefix("--").split()
    assert f"--{name}: must be at least 1, got {value}" in problem(changes)


def test_no_position_embedding_needs_another_flag() -> None:
    assert "--position-embedding-type none" in problem("--no-position-embedding")
    assert not config("--no-position-embedding --use-rotary-position-embeddings").model.learned_positions
    assert not config("--no-position-embedding --position-embedding-type none").model.learned_positions


def test_flags_of_other_tokenizers() -> None:
    assert convert_line("--tiktoken-pattern v2").refused == ()
    refused = convert_line("--special-tokens <a>").refused
    assert [flag for flag, _ in refused] == ["--special-tokens <a>"] and "special tokens from its file" in refused[0][1]


def test_defaults_are_megatrons() -> None:
    cfg = config()
    block = cfg.model.stack.pattern[0]
    assert (block.mixer.dropout, block.dropout, cfg.model.dropout) == (0.1, 0.1, 0.1)
    assert (block.mlp.activation, block.mlp.ffn, block.mlp.bias) == ("gelu_tanh", 256, True)
    assert (cfg.model.tied, cfg.model.learned_positions, cfg.model.init_std) == (True, True, 0.02)
    assert (cfg.model.recompute, cfg.batch.loss_average) == ("none", "microbatches")
    assert (cfg.optimizer.weight_decay, cfg.optimizer.beta2, cfg.optimizer.clip) == (0.01, 0.999, 1.0)
    assert (cfg.schedule.style, cfg.schedule.min_lr, cfg.schedule.decay_steps) == ("linear", 0.0, None)
    assert (cfg.evaluation.batches, cfg.logging.every, cfg.seed) == (100, 100, 1234)
    assert (cfg.precision.compute, cfg.parallel.data_sharding) == ("float32", "replicate")
    assert (cfg.checkpoint.every, cfg.checkpoint.at_end, cfg.checkpoint.keep_last) == (None, False, None)
    assert convert_line("--without eval-interval").config.evaluation.every == 1000


RECOMPUTE = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full --recompute-method"
HALF = "--use-precision-aware-optimizer --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16"


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ("--lr-warmup-fraction .5 --lr-warmup-iters 0", {"schedule.warmup_fraction": 0.5}),
        ("", {"schedule.on_resume": "same"}),
        ("--override-opt_param-scheduler", {"schedule.on_resume": "config"}),
        ("--use-checkpoint-opt_param-scheduler", {"schedule.on_resume": "same"}),
        ("--disable-bias-linear", {"model.stack.pattern.0.mlp.activation": "gelu"}),
        ("--no-bias-gelu-fusion", {"model.stack.pattern.0.mlp.activation": "gelu"}),
        ("--swiglu --hidden-size 4096 --num-attention-heads 32", {"model.stack.pattern.0.mlp.ffn": 10880}),
        ("--exit-signal-handler", {"resilience.save_on_signal": True}),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", {"optimizer.offload": 0.5}),
        ("--optimizer-cpu-offload", {"optimizer.offload": 1}),
        ("--optimizer-offload-fraction 0.5", {"optimizer.offload": 0}),
        (HALF, {"optimizer.moments": "float16"}),
        ("--recompute-activations", {"model.recompute": "selective"}),
        (f"{RECOMPUTE} core_attn layernorm mlp", {"model.recompute": ("norm", "latent", "mlp", "activation")}),
        (f"{RECOMPUTE} mla_up_proj", {"model.recompute": ("norm", "query_key_value", "activation")}),
        (f"{FULL} uniform --recompute-num-layers 2",
         {"model.recompute": "full", "model.layers_per_checkpoint": 2, "model.recompute_layers": None}),
        (f"{FULL} block --recompute-num-layers 1",
         {"model.recompute": "full", "model.layers_per_checkpoint": 1, "model.recompute_layers": 1}),
        ("--fine-grained-activation-offloading --offload-modules moe_act core_attn qkv_linear attn_norm",
         {"model.recompute": "selective", "model.offload": ("query_key_value", "mlp", "input")}),
        ("--offload-modules core_attn", {"model.recompute": "none", "model.offload": ()}),
        ("--use-megatron-fsdp", {"model.recompute": "selective"}),
        ("--use-torch-fsdp2", {"model.recompute": "selective"}),
        ("--use-megatron-fsdp --recompute-granularity full", {"model.recompute": "full"}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim",
         {"model.recompute": "none", "parallel.data_sharding": "zero1"}),
        ("--optimizer lion", {"optimizer": LionConfig()}),
        ("--optimizer muon", {"optimizer": MuonConfig(momentum=0.9, nesterov=False, beta2=0.999)}),
        ("--without global-batch-size --step-batch-size-schedule 0:4 1K:8 2M:16",
         {"batch.global_size": 16, "batch.ramp": StepRampConfig(sizes="0:4 1K:8 2M:16")}),
        ("--train-iters 20 --profile", {"profile.steps": "11:12"}),
        ("--profile --profile-step-start 8 --profile-step-end 12", {"profile.steps": "9:10"}),
        ("--profile", {"profile.steps": None}),
        ("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", {"precision.matmul": Mxfp8Config()}),
        ("--bf16 --fp8-format hybrid --fp8-recipe blockwise", {"precision.matmul": Fp8BlocksConfig(format="hybrid")}),
        ("--bf16 --fp4-format e2m1 --first-last-layers-bf16 --num-layers-at-end-in-bf16 2",
         {"precision.matmul": Nvfp4Config(first_layers=1, last_layers=2)}),
    ],
)  # fmt: skip
def test_settings_of_lines(changes: str, settings: dict[str, Any]) -> None:
    cfg = config(changes)
    for name, expected in settings.items():
        value: Any = cfg
        for part in name.split("."):
            value = value[int(part)] if part.isdigit() else getattr(value, part)
        assert value == expected, name


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ("--optimizer soap", ["--optimizer soap"]),
        ("--optimizer muon --muon-tp-mode blockwise", ["--muon-tp-mode blockwise"]),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16", ["--exp-avg-sq-dtype"]),
        ("--use-precision-aware-optimizer --main-grads-dtype bf16 --main-params-dtype fp16",
         ["--main-grads-dtype bf16", "--main-params-dtype fp16"]),
        (HALF.replace("fp16", "fp8"), ["--exp-avg-dtype fp8", "--exp-avg-sq-dtype fp8"]),
        ("--dataloader-type external", ["--dataloader-type external"]),
        ("--eval-micro-batch-size 4", ["--eval-micro-batch-size 4"]),
        ("--hybrid-context-parallel", ["--hybrid-context-parallel"]),
        ("--without mock-data --data-path a --data-cache-path c --object-storage-cache-path d",
         ["--object-storage-cache-path d"]),
        ("--bf16 --fp8-format hybrid --fp8-recipe custom", ["--fp8-recipe custom"]),
    ],
)  # fmt: skip
def test_unsupported_values_are_refused(changes: str, refused: list[str]) -> None:
    assert [flag for flag, _ in convert_line(changes).refused] == refused


def test_vocabulary_is_padded_as_megatron_pads_it(tmp_path: Path) -> None:
    assert config("--tensor-model-parallel-size 4").model.padded_vocabulary() == 512
    assert config("--vocab-size 999 --padded-vocab-size 1008").model.padded_vocabulary() == 1008
    odd = convert_line("--make-vocab-size-divisible-by 1 --pipeline-model-parallel-size 3 --num-layers 6")
    assert odd.config.model.vocabulary_multiple == 3 and "--make-vocab-size-divisible-by" in dict(odd.remarks)
    file = tmp_path / "vocab.json"
    file.write_text('{"a": 0, "b": 6}', encoding="utf-8")
    assert config(f"{FILES} --vocab-file {file} --without vocab-size").model.vocabulary_size == 7
    unread = convert_line(f"{FILES} --without vocab-size")
    assert unread.config.model.vocabulary_size == 50257 and "--vocab-file" in dict(unread.remarks)
    hugging = "--tokenizer-type HuggingFaceTokenizer --without vocab-size --tokenizer-model"
    assert "--vocab-size: must be given" in problem(f"{hugging} absent")
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 8, "content": "</s>"}]}', encoding="utf-8"
    )
    assert config(f"{hugging} {tmp_path}").model.vocabulary_size == 9


def test_iterations_count_whole_batches_in_a_ramp() -> None:
    plain = config("--lr-decay-iters 8 --lr-warmup-iters 2").schedule
    assert (plain.decay_steps, plain.warmup_steps) == (8, 2)
    ramped = config("--lr-decay-iters 8 --lr-warmup-iters 2 --rampup-batch-size 2 2 20").schedule
    assert (ramped.decay_samples, ramped.warmup_samples) == (64, 16)
    assert config("--rampup-batch-size 2 2 20").schedule.decay_samples == 80


def test_samples_become_the_steps_that_megatron_counts() -> None:
    cfg = config("--without train-iters --train-samples 100 --rampup-batch-size 2 2 60")
    # 20 samples for each of 2, 4 and 6 rows; a step starts if at most the boundary is consumed: 10, 5 and 4 steps with
    # 64 samples, then 36 samples in batches of 8.
    assert (cfg.steps, cfg.schedule.decay_samples) == (10 + 5 + 4 + 4, 100)
    short = config("--without train-iters --train-samples 15 --rampup-batch-size 2 2 60")
    assert short.steps == 8
    plain = config("--without train-iters --train-samples 101 --lr-decay-samples 12")
    assert (plain.steps, plain.schedule.decay_samples) == (12, 12)
    stepped = "--without train-iters --without global-batch-size --train-samples 100 --step-batch-size-schedule"
    assert config(f"{stepped} 0:4,1K:8").steps == 8 + 68 // 8


def test_loss_scales() -> None:
    assert config("--fp16").precision.scale() == DynamicScaleConfig()
    assert config("--fp16 --hysteresis 3").precision.loss_scale == DynamicScaleConfig(hysteresis=3)
    assert config("--fp16 --loss-scale 256").precision.scale() == ConstantScaleConfig(value=256.0)
    assert config("--bf16 --accumulate-allreduce-grads-in-fp32").precision.gradients == "float32"
    assert config("--fp16 --loss-scale 0").precision.scale() == DynamicScaleConfig()
    assert config("--bf16 --loss-scale 0").precision.loss_scale is None
    assert "--hysteresis 3" in convert_line("--bf16 --hysteresis 3").idle


def test_layers_of_stages() -> None:
    stages = "--num-layers 10 --pipeline-model-parallel-size 4"
    ends = "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3"
    assert config(f"{stages} {ends}").parallel.layers == (1, 3, 3, 3)
    virtual = "--num-layers 12 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    cfg = config(f"{virtual} --decoder-first-pipeline-num-layers 4").parallel
    assert (cfg.layers, cfg.schedule, cfg.virtual_stages) == ((2, 4, 2, 4), "interleaved", 2)
    layout = config(
        "--num-layers 11 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E,t*3|(tt|)*2,(t)*4L"
    )
    assert (layout.parallel.layers, layout.parallel.virtual_stages) == ((3, 2, 2, 4), 2)
    empty = convert_line("--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tt|t|L")
    assert [flag.split()[0] for flag, _ in empty.refused] == ["--pipeline-model-parallel-layout"]
    assert "--num-layers-per-virtual-pipeline-stage" in problem(
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3"
    )
    end_flags = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    changes = f"--num-layers 6 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 {end_flags}"
    assert config(changes).parallel.virtual_stages == 2


def test_patterns_of_layers() -> None:
    def windows(text: str) -> list[int | None]:
        stack = config(f"--num-layers 6 --window-size 8,0 --window-attn-skip-freq {text}").model.stack
        return [block.mixer.window for block in stack.pattern * stack.repeats]

    assert windows("3") == [8, 8, None, 8, 8, None]
    assert windows("'([1]*2+[0])*2'") == windows("3")
    assert windows("[0,0,0,1,1,1]") == [None] * 3 + [8] * 3
    without = config("--num-layers 4 --position-embedding-type rope --no-rope-freq 2").model.stack
    assert [block.mixer.rope is None for block in without.pattern * without.repeats] == [False, True, False, True]
    assert windows("3 --window-size 32,0") == [None] * 6
    assert "a list of 2" in problem("--window-size 8,0 --window-attn-skip-freq [1,0]")
    assert "__import__" in problem("--window-size 8,0 --window-attn-skip-freq __import__('os')")


def test_blocks_of_multi_token_prediction_are_numbered_from_one() -> None:
    every = "--num-layers 4 --window-size 8,0 --window-attn-skip-freq 2"
    (block,) = config(f"{every} --mtp-num-layers 1").model.predicting_blocks()
    assert block.mixer.window == 8
    assert convert_line(f"{every} --mtp-num-layers 2").refused
    plain = config("--num-layers 4 --window-size 8,0 --mtp-num-layers 2").model.prediction
    assert plain.block is None and plain.reweighted == "rows"
    assert config("--mtp-num-layers 1 --calculate-per-token-loss").model.prediction.reweighted == "microbatches"


def test_the_strength_of_router_losses_with_the_per_token_flag_is_a_remark() -> None:
    experts, flag = "--num-experts 8 --disable-bias-linear", "--calculate-per-token-loss"
    for more in ("--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2", "--moe-z-loss-coeff 1e-3"):
        converted, plain = convert_line(f"{experts} {more} {flag}"), convert_line(f"{experts} {more}")
        assert "positions / labels" in dict(converted.remarks)[flag] and flag not in dict(plain.remarks)
        routers = [run.config.model.stack.pattern[0].mlp.router for run in (converted, plain)]
        assert routers[0] == routers[1] and converted.config.batch.loss_average == "tokens"
    assert flag not in dict(convert_line(f"{experts} {flag}").remarks)


def test_latent_attention_scales_scores_equally_with_and_without_mup() -> None:
    latent = "--multi-latent-attention --position-embedding-type rope --qk-head-dim 32 --qk-pos-emb-head-dim 32"
    yarn = f"{latent} --rotary-scaling-factor 40 --mscale-all-dim 0.5"
    plain, mup = (config(f"{yarn} {more}").model.stack.pattern[0].mixer for more in ("", "--use-mup"))
    assert plain.scale is None and plain.rope == mup.rope
    assert mup.scale == pytest.approx((0.1 * 0.5 * math.log(40) + 1) ** 2 / 8)


def test_width_scaling() -> None:
    model = config(f"{MUP} --mup-base-head-dim 8 --mup-attn-scale-power 0.5").model
    assert model.width_ratio() == 2 and model.logit_factor() == 0.5
    assert model.width_scaling.score_scale(16) == 8**0.5 / 4
    # An output factor of 1 means one over the ratio; without a base the ratio is 1.
    assert config(f"{MUP} --mup-output-mult 1").model.logit_factor() == 0.5
    assert config(f"{MUP} --mup-output-mult 0.25").model.logit_factor() == 0.25
    without_base = convert_line("--use-mup")
    assert without_base.config.model.width_ratio() == 1 and "--use-mup" in dict(without_base.remarks)
    assert config().model.width_scaling is None
    assert "--mup-embedding-mult 2.0" in convert_line("--mup-embedding-mult 2").idle


def test_harmless_flags() -> None:
    remarks = dict(convert_line("--use-checkpoint-opt_param-scheduler").remarks)
    assert "refused" in remarks["--use-checkpoint-opt_param-scheduler"]
    assert convert_line("--no-data-sharding").idle == ("--no-data-sharding",)
    sgd = convert_line("--optimizer sgd --adam-beta1 0.8")
    assert isinstance(sgd.config.optimizer, SGDConfig) and "--adam-beta1 0.8" in sgd.idle
    assert convert_line("--eval-global-batch-size 8 --dataloader-type single").refused == ()
    # A refused flag is accepted with its default value.
    defaults = "--outer-dp-sharding-strategy no_shard --timing-log-level 0"
    harmless = convert_line(f"{defaults} --megatron-fsdp-main-params-dtype fp32 --muon-scalar-optimizer adam")
    assert not harmless.refused and len(harmless.unnecessary) == 4
    assert convert_line("--context-parallel-size 1 --expert-model-parallel-size 1").refused == ()


@pytest.mark.parametrize(
    ("flags", "strategy", "heads"),
    [
        ("", "all_gather", 2),
        ("--cp-comm-type p2p", "ring", 2),
        ("--cp-comm-type p2p p2p p2p p2p", "ring", 2),
        ("--cp-comm-type allgather", "all_gather", 2),
        ("--cp-comm-type a2a", "all_to_all", 2),
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", "ring+all_to_all", 2),
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 1 4", "ring+all_to_all", 1),
    ],
)
def test_context_strategies(flags: str, strategy: str, heads: int) -> None:
    parallel = config(f"--attention-dropout 0 --context-parallel-size 4 {flags}").parallel
    assert (parallel.context, parallel.context_strategy, parallel.context_heads) == (4, strategy, heads)


def test_invalid_context_strategies() -> None:
    changes = "--attention-dropout 0 --context-parallel-size 4 --cp-comm-type"
    ((flag, reason),) = convert_line(f"{changes} p2p p2p a2a a2a").refused
    assert flag == "--cp-comm-type p2p p2p a2a a2a" and "one strategy" in reason
    levels = "--hierarchical-context-parallel-sizes"
    ((flag, reason),) = convert_line(f"{changes} a2a+p2p {levels} 2 2 1").refused
    assert "hierarchical" in flag and "not 3" in reason
    assert "2 x 4 = 8, but --context-parallel-size is 4" in problem(f"{changes} a2a+p2p {levels} 2 4")
    assert f"a2a+p2p needs {levels}" in problem(f"{changes} a2a+p2p")
    assert "expected one of p2p, all_gather, a2a, a2a+p2p, got a2b" in problem(f"{changes} a2b")
    # The strategy has no effect without context parallelism, nor do sizes of levels without two levels.
    assert convert_line("--cp-comm-type a2a").idle == ("--cp-comm-type a2a",)
    assert convert_line(f"{changes} p2p {levels} 2 2").idle == (f"{levels} 2 2",)


def test_fill_in_the_middle() -> None:
    data = config(f"{FIM} --fim-rate 0.9 --split 98,1,1").data
    assert isinstance(data, FillInMiddleConfig) and data.split == "98,1,1" and data.fragment_token is None
    assert (data.rate, data.spm_rate, data.sequential_draws) == (0.9, 0.5, False)
    assert "--fim-rate 0.9" in convert_line("--fim-rate 0.9").idle
    assert "--fim-fragment-rate" in problem(f"{FIM} --fim-split-sample <f>")


def test_conversations() -> None:
    data = config(f"{CHATS} --split 100,0,0").data
    assert data == ChatConfig(
        paths=("a.jsonl",), split="100,0,0", template="nemotron-h-aligned", packing="lines", cut_long=True,
        mask_pad=True, isolate_padding=False, end_token="template", pad_token="<SPECIAL_233>",
    )  # fmt: skip
    sft = "--without tokenizer-type --tokenizer-type SFTTokenizer --tokenizer-model folder --vocab-size 64"
    default = config(f"{CHATS} {sft} --sft-tokenizer-prompt-format default").data
    assert (default.loss, default.template) == ("all", "folder/tokenizer_config.json")
    identity = convert_line(f"{CHATS} --sft-tokenizer-prompt-format identity")
    assert identity.config is not None and identity.config.data.pad_token == "<unk>"
    assert "data.loss=all" in dict(identity.remarks)["--sft-tokenizer-prompt-format"]
    assert convert_line(f"{CHATS} --sft-tokenizer-prompt-format other").refused
    assert convert_line("--without mock-data --sft --data-path 0.5 a.jsonl 0.5 b.jsonl").refused


def test_a_split_may_have_quotes_and_spaces() -> None:
    # "--split '99,1,0'" keeps its quotes in an array that a script splits at spaces.
    argv = [*line("--without mock-data --data-path a").split(), "--split", "'99, 1,0'"]
    assert convert(argv).config.data.split == "99,1,0"


def test_data_comes_from_files_of_paths(tmp_path: Path) -> None:
    paths_file, splits = tmp_path / "words", tmp_path / "splits.json"
    paths_file.write_text("0.3 a\n0.7 b\n", encoding="utf-8")
    assert config(f"--without mock-data --data-args-path {paths_file}").data.paths == ("0.3", "a", "0.7", "b")
    splits.write_text('{"train": ["a", "b"], "valid": ["c"], "test": null}', encoding="utf-8")
    data = config(f"--without mock-data --per-split-data-args-path {splits}").data
    assert (data.train_paths, data.valid_paths, data.test_paths) == (("a", "b"), ("c",), ())
    assert "cannot be read" in problem("--without mock-data --data-args-path absent")
    assert "--data-path: no data" in problem("--without mock-data")


def test_the_checkpoint_to_load() -> None:
    resumed = config("--save s --load s --save-interval 5").checkpoint
    assert (resumed.load, resumed.every, resumed.keep_last, resumed.at_end) == (None, 5, None, True)
    retained = config("--save s --save-interval 5 --save-retain-interval 10").checkpoint
    assert (retained.keep_last, retained.keep_every) == (1, 10)
    missing = convert_line("--save s --load s --exit-on-missing-checkpoint")
    assert missing.refused[0][0] == "--exit-on-missing-checkpoint"
    converted = convert_line("--save s --load t --exit-on-missing-checkpoint")
    assert (converted.refused, converted.unnecessary[0][0]) == ((), "--exit-on-missing-checkpoint")
    assert config("--async-save").checkpoint.asynchronous


def test_checkpoints_on_local_disks() -> None:
    local = config(f"{LOCAL} {REPLICATION}").checkpoint.local
    assert local == LocalConfig(every=5, folder=Path("d"), replicas=2, jump=4)
    assert config(LOCAL).checkpoint.local == LocalConfig(every=5, folder=Path("d"))
    assert config("--replication-factor 2").checkpoint.local is None
    for changes, missing in (
        ("--non-persistent-save-interval 5 --non-persistent-ckpt-type global", "only local"),
        ("--non-persistent-save-interval 5 --non-persistent-ckpt-type local", "--non-persistent-local-ckpt-dir"),
        ("--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir d", "--non-persistent-save-interval"),
    ):
        ((name, why),) = convert_line(changes).refused
        assert name.startswith("--non-persistent-ckpt-type") and missing in why


def test_instances_of_the_optimizer_are_groups_of_devices() -> None:
    """Megatron-LM gives the number of groups, parallel.shards the devices of one; experts are a part of a group."""
    two = "--use-distributed-optimizer --num-distributed-optimizer-instances 2"
    assert config(f"{two} --tensor-model-parallel-size 2", devices=16).parallel.shards == 4
    fsdp = config("--use-megatron-fsdp --num-distributed-optimizer-instances 4", devices=8).parallel
    assert (fsdp.data_sharding, fsdp.shards) == ("fsdp", 2)
    experts = config(f"{two} --num-experts 4 --expert-model-parallel-size 2", devices=8).parallel
    assert (experts.sizes(8)["replica"], experts.shards, experts.expert) == (2, 2, 2)
    assert "the number of devices is unknown" in problem(two)
    assert "needs --use-distributed-optimizer" in problem("--num-distributed-optimizer-instances 2")
    (uneven,) = convert_line("--use-distributed-optimizer --num-distributed-optimizer-instances 3", devices=8).problems
    assert uneven.message == "does not divide the 8 data-parallel devices: 3"


def test_without_a_global_batch_the_number_of_devices_is_needed() -> None:
    changes = "--without global-batch-size --tensor-model-parallel-size 2"
    assert config(changes, devices=8).batch.global_size == 2 * 4
    assert "the number of devices is unknown" in problem(changes)


def test_separate_validation_sets() -> None:
    changes = "--without mock-data --train-data-path t --valid-data-path a/x b/x c --multiple-validation-sets"
    cfg = config(changes)
    paths = {name: data.valid_paths for name, data in cfg.evaluation.sets.items()}
    assert paths == {"x.0": ("a/x",), "x.1": ("b/x",), "c": ("c",)}
    assert (cfg.data.train_paths, cfg.data.valid_paths) == (("t",), ())
    assert "--multiple-validation-sets" in problem(changes.replace("a/x b/x c", "0.5 a 0.5 b"))


def test_embeddings_with_their_own_deviation_are_not_decayed() -> None:
    assert not config("--embedding-init-method-std 1").optimizer.decay_embeddings
    untied = config("--embedding-init-method-std 1 --untie-embeddings-and-output-weights").optimizer
    assert untied.decay_embeddings and [(g.match, g.decay) for g in untied.groups] == [("tokens", 0), ("positions", 0)]
