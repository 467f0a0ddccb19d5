"""The table of Megatron-LM's flags: complete, pointing at settings that exist, each doing what its row says."""

import math
from pathlib import Path
from typing import Any

import pytest
from flag_lines import CASES, CASES_OF, CHATS, FILES, FIM, LOCAL, MUP, REPLICATION, config, line, made, problem

from megajax.checkpoint.local.config import LocalConfig
from megajax.config import schema
from megajax.config.dump import flatten
from megajax.data.config import ChatConfig, FillInMiddleConfig
from megajax.models.config import BertConfig, LlavaConfig, T5Config
from megajax.optim.config import LionConfig, MuonConfig, SGDConfig
from megajax.precision.config import ConstantScaleConfig, DynamicScaleConfig
from megajax.tools.flags import Flag, Mapped, Refused, Unnecessary, Word
from megajax.tools.megatron_flags import FLAGS, FLAGS_OF, ONE_OF, ONLY_WITH, SCRIPTS, convert
from megajax.training.config import StepRampConfig
from megajax.training.run_config import RunConfig

ROWS = [*FLAGS.values(), *(row for rows in FLAGS_OF.values() for row in rows.values())]


def test_settings_of_the_table_exist() -> None:
    known = set(schema.names(RunConfig))
    for model in (BertConfig, T5Config, LlavaConfig):
        known |= {f"model.{name}" for name in schema.names(model)}
    missing = {
        (row.name, setting)
        for row in ROWS
        if isinstance(row.fate, Mapped)
        for setting in row.fate.settings
        if setting not in known
    }
    assert not missing


def test_rows_are_whole() -> None:
    for row in ROWS:
        match row.fate:
            case Mapped(settings, by):
                assert settings and (by is not None or len(settings) == 1), row.name
            case Unnecessary(reason) | Refused(reason):
                assert len(reason.split()) >= 3, row.name
        assert row.kind is not bool or row.default in (None, False) or isinstance(row.fate, Unnecessary), row.name
    for names in (*ONE_OF, *((one, other) for one, other, _ in ONLY_WITH)):
        assert all(name in FLAGS for name in names), names


def test_every_mapped_flag_has_a_case() -> None:
    assert {name for name, row in FLAGS.items() if isinstance(row.fate, Mapped)} == set(CASES)
    assert set(CASES_OF) == set(FLAGS_OF) < set(SCRIPTS)
    for script, rows in FLAGS_OF.items():
        assert set(rows) <= set(FLAGS), "a flag of no other script is refused by them"
        assert {name for name, row in rows.items() if isinstance(row.fate, Mapped)} == set(CASES_OF[script])


OF_SCRIPTS = [(script, name, case) for script, cases in CASES_OF.items() for name, case in cases.items()]


@pytest.mark.parametrize(
    ("script", "name", "case"), [*(("", name, case) for name, case in CASES.items() if case is not None), *OF_SCRIPTS]
)
def test_a_mapped_flag_changes_its_settings(script: str, name: str, case: str) -> None:
    before, divided, more = case.partition(" | ")
    old, converted = flatten(config(before if divided else "")), made(f"{before} {more}")
    assert not converted.problems and not converted.refused and converted.config is not None, (
        converted.problems,
        converted.refused,
    )
    new = flatten(converted.config)
    settings = {**FLAGS, **FLAGS_OF.get(script, {})}[name].fate.settings
    changed = {key for key in {*old, *new} if old.get(key) != new.get(key)}
    touched = {key for key in changed if any(key == one or key.startswith(f"{one}.") for one in settings)}
    assert touched or (settings == ("model.stack.pattern",) and changed), changed
    told = [flag for flag, _ in converted.mapped if flag.split()[0] == f"--{name}"]
    assert told, (name, converted.mapped, converted.idle)


def test_unknown_flags_are_errors_with_the_nearest_name() -> None:
    assert "did you mean --tensor-model-parallel-size?" in problem("--tensor-model-paralel-size 2")
    assert "no such flag is known" in problem("--frobnicate 7")
    # Underscores and dashes are one, as some of Megatron-LM's own flags mix them.
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
def test_what_must_be_given(name: str) -> None:
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
)
def test_zero_is_not_taken_for_what_is_not_given(changes: str) -> None:
    name, value = next(word for word in changes.split(" --") if word[-1] in "04").removeprefix("--").split()
    assert f"--{name}: must be at least 1, got {value}" in problem(changes)


def test_no_position_embedding_wants_to_know_what_else() -> None:
    assert "--position-embedding-type none" in problem("--no-position-embedding")
    assert not config("--no-position-embedding --use-rotary-position-embeddings").model.learned_positions
    assert not config("--no-position-embedding --position-embedding-type none").model.learned_positions


def test_flags_of_tokenizers_that_are_not_read_are_harmless_beside_others() -> None:
    assert made("--tiktoken-pattern v2").refused == ()
    refused = made("--special-tokens <a>").refused
    assert [flag for flag, _ in refused] == ["--special-tokens <a>"] and "the tokenizer's own file" in refused[0][1]


def test_a_warm_up_of_zero_is_none() -> None:
    assert config("--lr-warmup-fraction .5 --lr-warmup-iters 0").schedule.warmup_fraction == 0.5


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
    assert made("--without eval-interval").config.evaluation.every == 1000


def test_gelu_is_exact_where_nothing_is_fused() -> None:
    assert config("--disable-bias-linear").model.stack.pattern[0].mlp.activation == "gelu"
    assert config("--no-bias-gelu-fusion").model.stack.pattern[0].mlp.activation == "gelu"
    assert config("--swiglu --hidden-size 4096 --num-attention-heads 32").model.stack.pattern[0].mlp.ffn == 10880


def test_vocabulary_is_padded_as_megatron_pads_it(tmp_path: Path) -> None:
    assert config("--tensor-model-parallel-size 4").model.padded_vocabulary() == 512
    assert config("--vocab-size 999 --padded-vocab-size 1008").model.padded_vocabulary() == 1008
    odd = made("--make-vocab-size-divisible-by 1 --pipeline-model-parallel-size 3 --num-layers 6")
    assert odd.config.model.vocabulary_multiple == 3 and "--make-vocab-size-divisible-by" in dict(odd.remarks)
    file = tmp_path / "vocab.json"
    file.write_text('{"a": 0, "b": 6}', encoding="utf-8")
    assert config(f"{FILES} --vocab-file {file} --without vocab-size").model.vocabulary_size == 7
    unread = made(f"{FILES} --without vocab-size")
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
    # 20 samples each of 2, 4 and 6 rows, begun while no more are consumed than the border: 10, 5 and 4 steps of them,
    # 64 samples; then 36 in whole batches of 8.
    assert (cfg.steps, cfg.schedule.decay_samples) == (10 + 5 + 4 + 4, 100)
    short = config("--without train-iters --train-samples 15 --rampup-batch-size 2 2 60")
    assert short.steps == 8
    plain = config("--without train-iters --train-samples 101 --lr-decay-samples 12")
    assert (plain.steps, plain.schedule.decay_samples) == (12, 12)
    stepped = "--without train-iters --without global-batch-size --train-samples 100 --step-batch-size-schedule"
    assert config(f"{stepped} 0:4,1K:8").steps == 8 + 68 // 8


def test_a_step_schedule_ends_at_its_last_size() -> None:
    cfg = config("--without global-batch-size --step-batch-size-schedule 0:4 1K:8 2M:16")
    assert (cfg.batch.global_size, cfg.batch.ramp) == (16, StepRampConfig(sizes="0:4 1K:8 2M:16"))


def test_loss_scales() -> None:
    assert config("--fp16").precision.scale() == DynamicScaleConfig()
    assert config("--fp16 --hysteresis 3").precision.loss_scale == DynamicScaleConfig(hysteresis=3)
    assert config("--fp16 --loss-scale 256").precision.scale() == ConstantScaleConfig(value=256.0)
    assert config("--bf16 --accumulate-allreduce-grads-in-fp32").precision.gradients == "float32"
    assert config("--fp16 --loss-scale 0").precision.scale() == DynamicScaleConfig()
    assert config("--bf16 --loss-scale 0").precision.loss_scale is None
    assert "--hysteresis 3" in made("--bf16 --hysteresis 3").idle


def test_layers_of_stages() -> None:
    stages = "--num-layers 10 --pipeline-model-parallel-size 4"
    assert config(
        f"{stages} --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3"
    ).parallel.layers == (1, 3, 3, 3)
    virtual = "--num-layers 12 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    cfg = config(f"{virtual} --decoder-first-pipeline-num-layers 4").parallel
    assert (cfg.layers, cfg.schedule, cfg.virtual_stages) == ((2, 4, 2, 4), "interleaved", 2)
    layout = config(
        "--num-layers 11 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E,t*3|(tt|)*2,(t)*4L"
    )
    assert (layout.parallel.layers, layout.parallel.virtual_stages) == ((3, 2, 2, 4), 2)
    empty = made("--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tt|t|L")
    assert [flag.split()[0] for flag, _ in empty.refused] == ["--pipeline-model-parallel-layout"]
    assert "--num-layers-per-virtual-pipeline-stage" in problem(
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3"
    )
    ends = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    cut = f"--num-layers 6 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 {ends}"
    assert config(cut).parallel.virtual_stages == 2


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


def test_blocks_that_predict_further_are_numbered_from_one_on() -> None:
    every = "--num-layers 4 --window-size 8,0 --window-attn-skip-freq 2"
    (one,) = config(f"{every} --mtp-num-layers 1").model.predicting_blocks()
    assert one.mixer.window == 8
    assert made(f"{every} --mtp-num-layers 2").refused
    plain = config("--num-layers 4 --window-size 8,0 --mtp-num-layers 2").model.prediction
    assert plain.block is None and plain.reweighted == "rows"
    assert config("--mtp-num-layers 1 --calculate-per-token-loss").model.prediction.reweighted == "microbatches"


def test_latent_attention_scales_scores_alike_with_and_without_mup() -> None:
    latent = "--multi-latent-attention --position-embedding-type rope --qk-head-dim 32 --qk-pos-emb-head-dim 32"
    yarn = f"{latent} --rotary-scaling-factor 40 --mscale-all-dim 0.5"
    plain, mup = (config(f"{yarn} {more}").model.stack.pattern[0].mixer for more in ("", "--use-mup"))
    assert plain.scale is None and plain.rope == mup.rope
    assert mup.scale == pytest.approx((0.1 * 0.5 * math.log(40) + 1) ** 2 / 8)


def test_optimizers() -> None:
    assert isinstance(config("--optimizer sgd").optimizer, SGDConfig)
    assert config("--optimizer lion").optimizer == LionConfig()
    muon = config("--optimizer muon").optimizer
    assert muon == MuonConfig(momentum=0.9, nesterov=False, beta2=0.999)
    assert "--adam-beta1 0.8" in made("--optimizer sgd --adam-beta1 0.8").idle
    assert [flag for flag, _ in made("--optimizer soap").refused] == ["--optimizer soap"]
    blockwise = made("--optimizer muon --muon-tp-mode blockwise")
    assert [flag for flag, _ in blockwise.refused] == ["--muon-tp-mode blockwise"]
    odd = made("--use-precision-aware-optimizer --exp-avg-dtype bf16")
    assert [flag for flag, _ in odd.refused] == ["--exp-avg-sq-dtype"]
    half = made("--use-precision-aware-optimizer --main-grads-dtype bf16 --main-params-dtype fp16")
    assert {flag for flag, _ in half.refused} == {"--main-grads-dtype bf16", "--main-params-dtype fp16"}


def test_moments_in_sixteen_bits() -> None:
    half = "--use-precision-aware-optimizer --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16"
    assert config(half).optimizer.moments == "float16"
    assert [flag for flag, _ in made(half.replace("fp16", "fp8")).refused] == [
        "--exp-avg-dtype fp8",
        "--exp-avg-sq-dtype fp8",
    ]


def test_a_wide_model_takes_over_the_settings_of_a_narrow_one() -> None:
    model = config(f"{MUP} --mup-base-head-dim 8 --mup-attn-scale-power 0.5").model
    assert model.width_ratio() == 2 and model.logit_factor() == 0.5
    assert model.width_scaling.score_scale(16) == 8**0.5 / 4
    # An output factor of 1 stands for one over the ratio; without a base the ratio is 1.
    assert config(f"{MUP} --mup-output-mult 1").model.logit_factor() == 0.5
    assert config(f"{MUP} --mup-output-mult 0.25").model.logit_factor() == 0.25
    alone = made("--use-mup")
    assert alone.config.model.width_ratio() == 1 and "--use-mup" in dict(alone.remarks)
    assert config().model.width_scaling is None
    assert "--mup-embedding-mult 2.0" in made("--mup-embedding-mult 2").idle


def test_whose_schedule_counts_after_a_resume() -> None:
    assert config().schedule.on_resume == "same"
    assert config("--override-opt_param-scheduler").schedule.on_resume == "config"
    theirs = made("--use-checkpoint-opt_param-scheduler")
    assert theirs.config.schedule.on_resume == "same"
    assert "refused" in dict(theirs.remarks)["--use-checkpoint-opt_param-scheduler"]


def test_refused_values_and_harmless_ones() -> None:
    assert [flag for flag, _ in made("--dataloader-type external").refused] == ["--dataloader-type external"]
    assert made("--no-data-sharding").idle == ("--no-data-sharding",)
    assert [flag for flag, _ in made("--eval-micro-batch-size 4").refused] == ["--eval-micro-batch-size 4"]
    assert made("--eval-global-batch-size 8 --dataloader-type single").refused == ()
    # A flag that is refused may still be given with the value it has anyway.
    harmless = made("--num-distributed-optimizer-instances 1 --timing-log-level 0")
    assert not harmless.refused and len(harmless.unnecessary) == 2
    assert made("--context-parallel-size 1 --expert-model-parallel-size 1").refused == ()
    assert [flag for flag, _ in made("--hybrid-context-parallel").refused] == ["--hybrid-context-parallel"]


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
def test_how_rows_are_exchanged(flags: str, strategy: str, heads: int) -> None:
    parallel = config(f"--attention-dropout 0 --context-parallel-size 4 {flags}").parallel
    assert (parallel.context, parallel.context_strategy, parallel.context_heads) == (4, strategy, heads)


def test_exchanges_of_rows_that_cannot_be() -> None:
    cut = "--attention-dropout 0 --context-parallel-size 4 --cp-comm-type"
    ((flag, why),) = made(f"{cut} p2p p2p a2a a2a").refused
    assert flag == "--cp-comm-type p2p p2p a2a a2a" and "in one way" in why
    ((flag, why),) = made(f"{cut} a2a+p2p --hierarchical-context-parallel-sizes 2 2 1").refused
    assert "hierarchical" in flag and "not 3" in why
    assert "2 x 4 devices are 8, and --context-parallel-size is 4" in problem(
        f"{cut} a2a+p2p --hierarchical-context-parallel-sizes 2 4"
    )
    assert "a2a+p2p needs --hierarchical-context-parallel-sizes" in problem(f"{cut} a2a+p2p")
    assert "expected one of p2p, all_gather, a2a, a2a+p2p, got a2b" in problem(f"{cut} a2b")
    # Without a cut the way says nothing, and sizes of levels say nothing without two levels.
    assert made("--cp-comm-type a2a").idle == ("--cp-comm-type a2a",)
    assert made(f"{cut} p2p --hierarchical-context-parallel-sizes 2 2").idle == (
        "--hierarchical-context-parallel-sizes 2 2",
    )


def test_fill_in_the_middle() -> None:
    data = config(f"{FIM} --fim-rate 0.9 --split 98,1,1").data
    assert isinstance(data, FillInMiddleConfig) and data.split == "98,1,1" and data.fragment_token is None
    assert (data.rate, data.spm_rate, data.sequential_draws) == (0.9, 0.5, False)
    assert "--fim-rate 0.9" in made("--fim-rate 0.9").idle
    assert "--fim-fragment-rate" in problem(f"{FIM} --fim-split-sample <f>")


def test_conversations() -> None:
    data = config(f"{CHATS} --split 100,0,0").data
    assert data == ChatConfig(
        paths=("a.jsonl",), split="100,0,0", template="nemotron-h-aligned", packing="lines", cut_long=True,
        mask_pad=True, isolate_padding=False,
    )  # fmt: skip
    sft = "--without tokenizer-type --tokenizer-type SFTTokenizer --tokenizer-model folder --vocab-size 64"
    default = config(f"{CHATS} {sft} --sft-tokenizer-prompt-format default").data
    assert (default.loss, default.template) == ("all", "folder/tokenizer_config.json")
    assert made(f"{CHATS} --sft-tokenizer-prompt-format other").refused
    assert made("--without mock-data --sft --data-path 0.5 a.jsonl 0.5 b.jsonl").refused


def test_a_split_may_keep_quotes_and_blanks() -> None:
    # "--split '99,1,0'" in an array that a script splits at blanks keeps its quotes.
    words = [*line("--without mock-data --data-path a").split(), "--split", "'99, 1,0'"]
    assert convert([Word(word) for word in words]).config.data.split == "99,1,0"


def test_data_comes_from_files_of_paths(tmp_path: Path) -> None:
    words, splits = tmp_path / "words", tmp_path / "splits.json"
    words.write_text("0.3 a\n0.7 b\n", encoding="utf-8")
    assert config(f"--without mock-data --data-args-path {words}").data.paths == ("0.3", "a", "0.7", "b")
    splits.write_text('{"train": ["a", "b"], "valid": ["c"], "test": null}', encoding="utf-8")
    data = config(f"--without mock-data --per-split-data-args-path {splits}").data
    assert (data.train_paths, data.valid_paths, data.test_paths) == (("a", "b"), ("c",), ())
    assert "cannot be read" in problem("--without mock-data --data-args-path absent")
    assert "--data-path: no data" in problem("--without mock-data")


def test_where_a_run_starts_from() -> None:
    same = config("--save s --load s --save-interval 5").checkpoint
    assert (same.load, same.every, same.keep_last, same.at_end) == (None, 5, None, True)
    kept = config("--save s --save-interval 5 --save-retain-interval 10").checkpoint
    assert (kept.keep_last, kept.keep_every) == (1, 10)
    assert made("--save s --load s --exit-on-missing-checkpoint").refused[0][0] == "--exit-on-missing-checkpoint"
    converted = made("--save s --load t --exit-on-missing-checkpoint")
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
        ((name, why),) = made(changes).refused
        assert name.startswith("--non-persistent-ckpt-type") and missing in why


def test_a_run_ends_by_a_signal() -> None:
    assert config("--exit-signal-handler").resilience.save_on_signal


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("--recompute-activations", {"recompute": "selective"}),
        (
            "--recompute-granularity selective --recompute-modules core_attn layernorm mlp",
            {"recompute": ("norm", "latent", "mlp", "activation")},
        ),
        (
            "--recompute-granularity selective --recompute-modules mla_up_proj",
            {"recompute": ("norm", "query_key_value", "activation")},
        ),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            {"recompute": "full", "layers_per_checkpoint": 2, "recompute_layers": None},
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
            {"recompute": "full", "layers_per_checkpoint": 1, "recompute_layers": 1},
        ),
        (
            "--fine-grained-activation-offloading --offload-modules moe_act core_attn qkv_linear attn_norm",
            {"recompute": "selective", "offload": ("query_key_value", "mlp", "input")},
        ),
        ("--offload-modules core_attn", {"recompute": "none", "offload": ()}),
    ],
)
def test_what_is_kept_and_where(words: str, settings: dict[str, Any]) -> None:
    model = config(words).model
    assert {name: getattr(model, name) for name in settings} == settings


def test_moments_in_host_memory() -> None:
    assert config("--optimizer-cpu-offload --optimizer-offload-fraction 0.5").optimizer.offload == 0.5
    assert config("--optimizer-cpu-offload").optimizer.offload == 1
    assert config("--optimizer-offload-fraction 0.5").optimizer.offload == 0


def test_weights_that_are_spread_are_gathered_again() -> None:
    for name in ("--use-megatron-fsdp", "--use-torch-fsdp2"):
        converted = made(name)
        assert converted.config.model.recompute == "selective" and name in dict(converted.remarks)
    assert config("--use-megatron-fsdp --recompute-granularity full").model.recompute == "full"
    kept = config("--use-megatron-fsdp --data-parallel-sharding-strategy optim")
    assert (kept.model.recompute, kept.parallel.data_sharding) == ("none", "zero1")


def test_to_map_a_flag_is_to_change_its_row() -> None:
    words = [Word(word) for word in f"{line()} --sample-rate 7".split()]
    assert [text for text, _ in convert(words).refused] == ["--sample-rate 7.0"]
    table = {**FLAGS, "sample-rate": Flag("sample-rate", int, Mapped(("schedule.decay_steps",)))}
    converted = convert(words, table=table)
    assert converted.config.schedule.decay_steps == 7 and not converted.refused
    assert ("--sample-rate 7", "schedule.decay_steps=7") in converted.mapped


def test_without_a_global_batch_the_launcher_must_say_how_many_devices() -> None:
    alone = "--without global-batch-size --tensor-model-parallel-size 2"
    assert config(alone, devices=8).batch.global_size == 2 * 4
    assert "how many devices share the work is not known" in problem(alone)


def test_validation_sets_apart() -> None:
    apart = "--without mock-data --train-data-path t --valid-data-path a/x b/x c --multiple-validation-sets"
    cfg = config(apart)
    assert {name: data.valid_paths for name, data in cfg.evaluation.sets.items()} == {
        "x.0": ("a/x",),
        "x.1": ("b/x",),
        "c": ("c",),
    }
    assert (cfg.data.train_paths, cfg.data.valid_paths) == (("t",), ())
    assert "--multiple-validation-sets" in problem(apart.replace("a/x b/x c", "0.5 a 0.5 b"))


def test_the_steps_that_megatron_profiles() -> None:
    assert config("--train-iters 20 --profile").profile.steps == "11:12"
    assert config("--profile --profile-step-start 8 --profile-step-end 12").profile.steps == "9:10"
    assert made("--profile").config.profile.steps is None


def test_embeddings_with_a_spread_of_their_own_are_not_decayed() -> None:
    assert not config("--embedding-init-method-std 1").optimizer.decay_embeddings
    untied = config("--embedding-init-method-std 1 --untie-embeddings-and-output-weights").optimizer
    assert untied.decay_embeddings and [(g.match, g.decay) for g in untied.groups] == [("tokens", 0), ("positions", 0)]
