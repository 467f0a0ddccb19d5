"""Launch scripts of Megatron-LM's kind translate at the first try, and the runs fit where they fit with Megatron-LM.

The scripts beside this file are ours. They use every construct of Megatron-LM's examples with the same flags.
"""

from pathlib import Path

import pytest
from user_errors import user_error

from megajax.config import load
from megajax.config.errors import ConfigError
from megajax.interop.megatron.args import main
from megajax.layers.block.config import BlockConfig
from megajax.models.facts import demand_facts
from megajax.models.memory import MemorySetting, memory_report
from megajax.planning.compiled.devices import GIB, GPUS
from megajax.planning.cost.description import describe
from megajax.planning.cost.estimate import estimate
from megajax.training.run_config import RunConfig

SCRIPTS = Path(__file__).parent / "scripts"
ARGUMENTS = {
    "dense_fp8.sh": [],
    "experts.sh": ["saved", "llama.model", "corpus"],
    "windows.sh": ["--saved", "saved"],
    "hybrid.sh": ["corpus", "tokenizer.model", "--", "--vocab-size", "256000"],
    "job.sh": [],
}


def translated(name: str, output: Path, *options: str) -> RunConfig:
    main([f"--output={output}", "--force", *options, "--run-script", str(SCRIPTS / name), *ARGUMENTS[name]])
    return load(str(output))


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pretrain_gpt.py").touch()
    (tmp_path / "saved").mkdir()
    return tmp_path / "made.py"


def test_a_dense_script_with_conditions(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = translated("dense_fp8.sh", output)
    assert (config.model.stack.repeats, config.model.vocabulary_size) == (32, 128257)
    assert config.precision.matmul is not None and config.precision.gradients == "bfloat16"
    assert config.parallel.data_sharding == "zero1" and not config.parallel.sequence
    assert config.model.recompute == "selective"
    stderr = capsys.readouterr().err
    assert "--fp8-param-gather: weights are gathered and kept in precision.compute" in stderr
    # The other way of the condition on the tokenizer.
    places = ["saved", "board", "tokenizer.json", "corpus"]
    main([f"--output={output}", "--force", "--run-script", str(SCRIPTS / "dense_fp8.sh"), *places])
    assert load(str(output)).data.paths == ("corpus",)


def test_a_script_of_experts(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = translated("experts.sh", output)
    assert (config.parallel.pipeline, config.parallel.expert) == (4, 8)
    assert config.model.recompute == ("norm", "mlp", "activation") and config.logging.wandb is None
    stderr = capsys.readouterr().err
    assert "--no-load-optim: a run resumes" in stderr
    config = translated("experts.sh", output, "--define=WANDB_API_KEY=1")
    assert config.logging.wandb is not None and config.logging.wandb.project == "Mixture"


def test_a_script_that_reads_its_own_flags(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = translated("windows.sh", output)
    assert config.run_dir == "saved" and config.schedule.decay_samples == 1953125000 - 3906252
    assert sum(block.mixer.window is not None for block in config.model.stack.pattern) == 1
    assert config.model.recompute == "selective"
    with user_error():
        main(["--run-script", str(SCRIPTS / "windows.sh"), "--other"])
    capsys.readouterr()


def test_a_script_of_a_hybrid(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = translated("hybrid.sh", output)
    stack = config.model.stack
    assert stack.layers() == 48 and any(isinstance(block, BlockConfig) for block, _ in stack.stored())
    # As megatron-core 0.19.2 makes of these shares.
    assert "M-M-M--M-*M-M-M-M--*M-M-M-M-*M--M-M-M-*M-M--M-M-" in capsys.readouterr().err
    with user_error("--vocab-size", kind=ConfigError):
        main(["--run-script", str(SCRIPTS / "hybrid.sh"), "corpus", "tokenizer.model"])


def test_a_script_that_sends_a_job(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = translated("job.sh", output, "--define=CLUSTER=c", "--define=TOKENS=corpus")
    assert (config.parallel.tensor, config.parallel.pipeline, config.parallel.virtual_stages) == (4, 2, 4)
    assert config.parallel.sequence and config.batch.global_size == 32 and config.data.paths == ("corpus",)
    with user_error():
        translated("job.sh", output, "--define=CLUSTER=c")
    assert "TOKENS: Set TOKENS, a prefix" in capsys.readouterr().err
    with user_error():
        translated("job.sh", output, "--define=MODE=none")


def test_runs_fit_in_the_memory_that_they_need_with_megatron(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--num-layers 24 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    line += " --micro-batch-size 1 --global-batch-size 8 --train-iters 5 --lr 1e-3 --mock-data"
    line += " --tokenizer-type NullTokenizer --vocab-size 99"
    with user_error("--pipeline-model-parallel-size", kind=ConfigError) as raised:
        main(["--", *line.split(), "--pipeline-model-parallel-size", "16"])
    assert "give --pipeline-model-parallel-size 8" in str(raised.value)
    with user_error("--overlap-param-gather", kind=ConfigError):
        main(["--", *line.split(), "--overlap-param-gather", "--overlap-grad-reduce"])
    with user_error("--fp8-param-gather", kind=ConfigError):
        main(["--", *line.split(), "--bf16", "--fp8-format", "hybrid", "--fp8-param-gather"])
    capsys.readouterr()


@pytest.mark.parametrize("script", ["examples/multimodal/train.py", "train_rl.py", "examples/mimo/pretrain_mimo.py"])
def test_other_training_scripts_are_refused_by_name(script: str, tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(f"torchrun {script} --num-layers 2\n")
    with user_error():
        main([str(file)])


COMPILED = {"dense_fp8.sh": (8, 69.75), "experts.sh": (32, 41.80)}
"""H100s on which Megatron-LM runs these flags, and the peak of the compiled plan in GiB: jax 0.12.0.1, extra aot."""
MEGATRON = {"dense_fp8.sh": (56.09, 37.85), "experts.sh": (26.89, 17.92)}
"""Weights with optimizer, and activations, GiB, of megatron-core 0.19.2's theoretical_memory_usage.py."""


@pytest.mark.parametrize("name", COMPILED)
def test_runs_fit_where_they_do_with_megatron(name: str, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, (devices, peak) = translated(name, output), COMPILED[name]
    step = estimate(describe(config, GPUS["h100"], devices))
    assert step.fits and step.memory.peak / GIB == pytest.approx(peak, rel=0.03)
    parallel = config.parallel
    data = devices // parallel.pipeline
    setting = MemorySetting.of(parallel, "none", data=data, micro_size=1, microbatches=config.batch.global_size // data)
    report = memory_report(demand_facts(config.model), setting)
    assert report is not None
    weights, activations = MEGATRON[name]
    assert (report.weights / GIB, report.activations / GIB) == (
        pytest.approx(weights, rel=0.01),
        pytest.approx(activations, rel=0.01),
    )
    capsys.readouterr()
