"""The whole tool: scripts, command lines and files of flags become config files that start a run."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from user_errors import user_error

from megajax.checkpoint.config import CheckpointConfig
from megajax.config import load
from megajax.config.dump import diff
from megajax.config.errors import UserError
from megajax.data.text.config import BlendConfig, MockConfig
from megajax.interop.megatron.args import find_training, main
from megajax.interop.megatron.expanded_commands import read_commands
from megajax.interop.megatron.toy import toy_words
from megajax.job.notebook import set_up
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.moe.config import MoEConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.metrics.config import LoggingConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.precision.config import DynamicScaleConfig, PrecisionConfig
from megajax.tokenizers.config import GPT2TokenizerConfig, NullTokenizerConfig
from megajax.training.config import BatchConfig, EvaluationConfig, LinearRampConfig
from megajax.training.run_config import RunConfig

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 255 --eval-interval 5"
)


def gpt3_175b() -> RunConfig:
    """The config of the 175B script, written by hand, with Megatron-LM's defaults where they differ from ours."""
    block = BlockConfig(
        mixer=AttentionConfig(heads=96, bias=True, dropout=0.1),
        mlp=DenseMLPConfig(ffn=49152, activation="gelu_tanh", bias=True),
        norm=LayerNormConfig(epsilon=1e-5, zero_centred=False),
        dropout=0.1,
    )
    return RunConfig(
        model=DecoderConfig(
            hidden=12288,
            vocabulary_size=50257,
            sequence_length=2048,
            stack=StackConfig(pattern=(block,), repeats=96),
            vocabulary_multiple=128 * 8,
            learned_positions=True,
            norm=LayerNormConfig(epsilon=1e-5, zero_centred=False),
            tied=True,
            dropout=0.1,
            init_std=0.006,
            recompute="none",
        ),
        data=BlendConfig(paths=("data/gpt_text_document",), split="949,50,1", surplus=0.005),
        tokenizer=GPT2TokenizerConfig(vocabulary="data/vocab.json", merges="data/merges.txt"),
        parallel=ParallelConfig(
            pipeline=16, tensor=8, sequence=False, data_sharding="replicate", schedule="1f1b", virtual_stages=1
        ),
        precision=PrecisionConfig(compute="float16", params="float32", gradients="float32"),
        optimizer=AdamWConfig(weight_decay=0.1, clip=1.0, moments="float32", beta1=0.9, beta2=0.95, epsilon=1e-8),
        schedule=ScheduleConfig(
            lr=6e-5, min_lr=6e-6, style="cosine", warmup_fraction=0.001, warmup_start=0.0, decay_samples=430_000 * 1536
        ),
        batch=BatchConfig(
            global_size=1536,
            micro_size=1,
            loss_average="microbatches",
            ramp=LinearRampConfig(start=16, increment=16, samples=5_859_375),
        ),
        evaluation=EvaluationConfig(every=1000, batches=10),
        checkpoint=CheckpointConfig(every=10_000, keep_last=None, at_end=True),
        logging=LoggingConfig(every=100, tensorboard=True),
        steps=500_000,
        seed=1234,
        run_dir="runs/gpt3",
    )


def test_the_175b_script_becomes_the_expected_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "gpt3.py"
    places = ["runs/gpt3", "runs/board", "data/vocab.json", "data/merges.txt", "data/gpt_text_document"]
    assert main([f"--output={output}", "--run-script", str(HERE / "gpt3_175b.sh"), *places]) == 0
    config = load(str(output))
    assert diff(gpt3_175b(), config) == []
    assert config == gpt3_175b()
    # Megatron-LM's derived values: rows of the vocabulary, loss scale, samples of the schedule.
    assert config.model.padded_vocabulary() == 51200
    assert config.precision.scale() == DynamicScaleConfig(initial=2.0**32, floor=1.0, window=1000, hysteresis=2)
    length = {"steps": config.steps, "global_size": 1536}
    assert config.schedule.decay(**length) == 660_480_000
    assert config.schedule.warmup(**length) == pytest.approx(660_480)
    stderr = capsys.readouterr().err
    assert "--tensor-model-parallel-size 8 -> parallel.tensor=8" in stderr
    assert "--lr-decay-iters 430000 -> schedule.decay_samples=660480000" in stderr
    assert "refused" not in stderr


def test_the_file_is_in_the_formatters_style_and_starts_a_run(tmp_path: Path) -> None:
    output = tmp_path / "small.py"
    swiglu = "--swiglu --window-size 7,0 --window-attn-skip-freq [1,0] --load some/run"
    main([f"--output={output}", "--", *SMALL.split(), *swiglu.split()])
    for check in (["check", "--select", "E,F,I"], ["format", "--check"]):
        process = subprocess.run(
            [sys.executable, "-m", "ruff", *check, str(output)], cwd=REPOSITORY, capture_output=True
        )
        assert process.returncode == 0, process.stdout
    command = [sys.executable, "-m", "megajax.train", f"--config={output}", "--print-config"]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    printed = yaml.safe_load(process.stdout)
    assert printed["model"]["hidden"] == 64
    assert [block["mixer"]["window"] for block in printed["model"]["stack"]["pattern"]] == [7, None]
    assert printed["data"]["type"] == "MockConfig"
    assert printed["checkpoint"]["load"] == "some/run"


COMMANDS = r"""#!/bin/bash
# It's a comment: $HOME
export CUDA_DEVICE_MAX_CONNECTIONS=1; mkdir -p logs
+ torchrun --nproc_per_node 8 --nnodes=2 src/pretrain_gpt.py --a 'b c' --d "e\"f" \
    --g \$h# \
    --i '$j ([0]*3+[1]*58)' 2>&1 | tee log  # --k
python tools/preprocess_data.py --input x >> log"""


def test_expanded_commands_are_read(tmp_path: Path) -> None:
    commands = read_commands(COMMANDS, "file")
    training = find_training(commands, "file")
    assert (training.script, training.devices) == ("src/pretrain_gpt.py", 16)
    assert training.words == ("--a", "b c", "--d", 'e"f', "--g", "$h#", "--i", "$j ([0]*3+[1]*58)")
    assert commands[-1] == ("python", "tools/preprocess_data.py", "--input", "x")
    with user_error("file"):
        find_training(read_commands("python a.py --b 1 --c\npython a.py --b 2 --c", ""), "file")
    assert find_training(read_commands("python a.py --b 1; python a.py --b 2", ""), "", 2).words == ("--b", "2")
    trace = "+ [[ abc =~ ^(x|y)$ ]]\r\n" + "".join(
        f"+ torchrun --rank {rank} a.py $'b\\n\\'' \\\r\n c\r\n" for rank in (0, 1)
    )
    assert find_training(read_commands(trace, ""), "").words == ("b\n'", "c")
    with user_error():
        find_training(read_commands("python pretrain_gpt.py --a \\\n # --b \\\n --c", ""), "")


@pytest.mark.parametrize(
    "text",
    [
        "\npython a.py $A",
        'A=1\n\npython a.py "--b ${A}"',
        "python a.py `date`",
        "if true; then python a.py; fi",
        "for i in 1 2; do python a.py --i; done",
        "bash <<EOF\npython a.py\nEOF",
        "python a.py 'b",
        "python a.py \\ \n --b",
    ],
)
def test_a_text_that_needs_a_shell_is_refused(text: str) -> None:
    with user_error():
        read_commands(text, "f")


def test_inputs_of_the_tool() -> None:
    tool, script = [sys.executable, "-m", "megajax.interop.megatron.args"], str(HERE / "gpt3_175b.sh")
    command = "torchrun pretrain_gpt.py " + SMALL.replace(" --lr", " \\\n --lr")
    words = [*tool, "-", "--", "--seed", "7"]
    read = subprocess.run(words, input=command, cwd=REPOSITORY, capture_output=True, text=True)
    assert read.returncode == 0 and "seed=7" in read.stdout, read.stderr
    refused = subprocess.run([*tool, script], cwd=REPOSITORY, capture_output=True, text=True)
    assert refused.returncode == 2 and "--run-script SCRIPT [ARGUMENTS]" in refused.stderr
    for arguments, message in (
        (["--assume=3=true", script], "--assume was removed: bash decides the conditions of a script"),
        ([script, "runs/gpt3"], "A script is given by --run-script SCRIPT ARGUMENTS"),
        (["--run-script"], "--run-script needs a value"),
    ):
        with pytest.raises(UserError, match=message):
            main(arguments)


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    output = tmp_path / "small.py"
    output.write_text("mine", encoding="utf-8")
    with user_error():
        main([f"--output={output}", "--", *SMALL.split()])
    assert output.read_text(encoding="utf-8") == "mine"
    main([f"--output={output}", "--force", "--", *SMALL.split()])
    assert load(str(output)).model.hidden == 64


def test_an_unwritable_output_is_an_error(tmp_path: Path) -> None:
    for place in (tmp_path / "none" / "made.py", tmp_path):
        with user_error("--output"):
            main([f"--output={place}", "--force", "--", *SMALL.split()])


def test_refused_flags_exit_with_code_2_unless_partial(tmp_path: Path) -> None:
    tool = [sys.executable, "-m", "megajax.interop.megatron.args"]
    flags = ["--", "torchrun", "--nproc_per_node", "2", "pretrain_gpt.py", *SMALL.split(), "--moe-use-upcycling",
             "--hybrid-context-parallel", "--no-such-flag"]  # fmt: skip
    unknown = subprocess.run([*tool, *flags], cwd=REPOSITORY, capture_output=True, text=True)
    assert unknown.returncode == 2 and unknown.stdout == ""
    assert "--no-such-flag: is not a known flag" in unknown.stderr
    refused = subprocess.run([*tool, *flags[:-1]], cwd=REPOSITORY, capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stdout == ""
    assert "--moe-use-upcycling: leave out --load: checkpoint.weights makes experts from" in refused.stderr
    assert "--hybrid-context-parallel: all rows are sharded over the same devices" in refused.stderr
    assert "2 flags refused" in refused.stderr
    partial = subprocess.run([*tool, "--partial", *flags[:-1]], cwd=REPOSITORY, capture_output=True, text=True)
    assert partial.returncode == 0, partial.stderr
    file = tmp_path / "partial.py"
    file.write_text(partial.stdout, encoding="utf-8")
    assert load(str(file)).parallel.context == 1
    assert "Left out: --moe-use-upcycling" in partial.stdout


def test_help_is_quick_and_complete() -> None:
    program = "import sys, megajax.interop.megatron.args as t; t.main(['--help'])\n"
    program += "assert not {'jax', 'numpy', 'flax', 'grain'} & set(sys.modules), sorted(sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    for flag in ("--output", "--force", "--partial", "--define", "--run-script"):
        assert flag in process.stdout


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_files_of_flags(tmp_path: Path, suffix: str, nested: bool) -> None:
    texts = SMALL.split()
    flags = {"swiglu": True, "--bf16": True, "sequence-parallel": False, "rampup-batch-size": [2, 2, 40]}
    for text, after in pairwise([*texts, "--"]):
        if text.startswith("--"):
            flags[text] = True if after.startswith("--") else after
    file, output = tmp_path / f"flags.{suffix}", tmp_path / "made.py"
    content = {"ENV_VARS": {"A": 1}, "MODEL_ARGS": flags} if nested else flags
    file.write_text(json.dumps(content) if suffix == "json" else yaml.safe_dump(content), encoding="utf-8")
    main([f"--output={output}", str(file)])
    config = load(str(output))
    assert config.batch.ramp == LinearRampConfig(start=2, increment=2, samples=40)
    assert (config.model.stack.pattern[0].mlp.ffn, config.precision.compute) == (128, "bfloat16")
    assert config.data == MockConfig() and config.tokenizer == NullTokenizerConfig(vocabulary_size=256)


def test_a_string_in_a_file_may_hold_several_values(tmp_path: Path) -> None:
    texts = [text for text in SMALL.split() if text != "--mock-data"]
    pairs = zip(texts[::2], texts[1::2], strict=True)
    flags = {**dict(pairs), "data-path": "0.3 a 0.7 b", "rampup-batch-size": "2 2 40"}
    file, output = tmp_path / "flags.yaml", tmp_path / "made.py"
    file.write_text(yaml.safe_dump(flags), encoding="utf-8")
    main([f"--output={output}", str(file)])
    config = load(str(output))
    assert config.data == BlendConfig(paths=("0.3", "a", "0.7", "b"))
    assert config.batch.ramp == LinearRampConfig(start=2, increment=2, samples=40)


def test_the_tools_flags_are_separate_from_megatrons() -> None:
    for arguments, message in (
        (SMALL.split(), "Give Megatron-LM's flags after --"),
        (["--parital", "--", "--bf16"], "did you mean partial"),
        (["--partial", "--", "python", "x/pretrain_ict.py", *SMALL.split()], r"pretrain_ict\.py is not supported"),
        (["no/such/script.sh"], "cannot be read"),
        (["s3://bucket/run"], "s3://bucket/run is a URL"),
    ):
        with pytest.raises(UserError, match=message):
            main(arguments)


def test_a_pipe_on_the_command_line_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shell makes one of `megajax.interop.megatron.args <(grep -v wandb train.sh)`."""
    reading, writing = os.pipe()
    os.write(writing, f"python pretrain_gpt.py {SMALL}".encode())
    os.close(writing)
    main([f"--output={tmp_path / 'config.py'}", f"/dev/fd/{reading}"])
    os.close(reading)
    assert load(str(tmp_path / "config.py")).model.hidden == 64


def test_values_are_escaped_in_the_file(tmp_path: Path) -> None:
    output = tmp_path / "odd.py"
    text = 'a"""\nimport os\n\\'
    main([f"--output={output}", "--", *SMALL.split(), "--save", text, "--wandb-project", 'it\'s "mine"'])
    config = load(str(output))
    assert config.run_dir == text
    assert config.logging.wandb is not None and config.logging.wandb.project == 'it\'s "mine"'


@pytest.mark.parametrize(
    ("flags", "layers", "experts"),
    [
        ("--fp16 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --save ck --vocab-file v.json", 2, 0),
        ("--bf16 --num-experts 256 --moe-router-topk 8 --moe-layer-freq=([0]*3+[1]*93) --moe-ffn-hidden-size=2048"
         " --expert_model_parallel_size 64 --rampup-batch-size 16 16 100", 2, 1),
    ],
)  # fmt: skip
def test_a_toy_is_a_twin_for_one_device(tmp_path: Path, flags: str, layers: int, experts: int) -> None:
    """The same kinds of layers, and no file or device of the cluster; that of experts trains."""
    sizes = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --lr 6e-5 --swiglu"
    batch = "--max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 1536 --train-iters 500000"
    file, words = tmp_path / "toy.py", [*f"{sizes} {batch} --data-path a b {flags}".split()]
    assert main(["--toy", f"--output={file}", "--", *words]) == 0
    cfg: Any = load(str(file), devices=1)
    assert (cfg.parallel, cfg.steps) == (ParallelConfig(data_sharding="replicate"), 20) and cfg.batch.global_size == 8
    assert cfg.model.stack.layers() == layers and cfg.model.parameter_count().total < 1_000_000
    blocks = [block for part in cfg.model.stack.parts() for block in part.pattern]
    assert sum(isinstance(block.mlp, MoEConfig) for block in blocks) == experts
    assert cfg.logging.every == 1
    if not experts:
        return
    run = set_up(cfg, devices=jax.devices()[:1])
    (info,) = run.steps(1)
    run.close()
    assert not info.skipped and np.isfinite(info.loss)


def test_a_toy_keeps_each_kind_of_layer() -> None:
    """Latent attention, the layers that are predicted from, layers without experts; and top-1."""
    pattern = "--hybrid-layer-pattern=M-M+|M+-E/ME/ME --num-layers 8"
    for flags, expected in (
        (pattern, "--hybrid-layer-pattern M-+E/ME --num-layers 4"),
        ("--moe-layer-freq 2", "--moe-layer-freq ([0]*1+[1]*1)"),
        ("--moe-layer-freq [1]*10", "--moe-layer-freq 1"),
        ("--moe-router-topk 1", "--moe-router-topk 1"),
        ("--moe-router-topk 8", "--moe-router-topk 2"),
    ):
        assert " ".join(toy_words(flags.split())).startswith(f"{expected} --log-interval 1 "), flags


def test_scripts_whose_data_is_text_have_no_toy() -> None:
    with user_error():
        main(["--toy", "--", "pretrain_bert.py", *SMALL.split()])
