"""The command line: its forms, --devices, --help, --print-config, and the errors of a program."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from config_samples import RunConfig
from user_errors import user_error

import megajax.command_line.parser as cli
from megajax.command_line import parser as command_line
from megajax.config import ConfigError, Problem, UserError
from megajax.processes.world import RANKS

pytestmark = pytest.mark.smoke

HERE = Path(__file__).resolve().parent
FLAGS = (cli.Flag("skip-train", help="Only evaluate."), cli.Flag("prompt", str), cli.Flag("count", int | None, 3))
FILE = (
    "from config_samples import *\ndef config():\n    return RunConfig(model=ModelConfig(hidden_size=768), steps=500)\n"
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (*RANKS, "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.py").write_text(FILE)
    return tmp_path


def parse(*argv, **options):
    return cli.parse(argv, verb="train", flags=FLAGS, root=RunConfig, **options)


def problems(*argv, **options):
    with pytest.raises(ConfigError) as error:
        parse(*argv, **options)
    return {problem.setting: f"{problem.message}\n{problem.hint}" for problem in error.value.problems}


def test_forms(capsys):
    command = parse(
        "--steps", "-1", "--config", "tiny", "--parallel.sequence", "--parallel.data-sharding=fsdp", "--seed=3"
    )
    assert command.config.steps == -1
    assert command.config.parallel.sequence is True
    assert command.config.parallel.data_sharding == "fsdp"
    assert parse("--config=tiny", "--parallel.sequence", "false").config.parallel.sequence is False
    assert capsys.readouterr().err == ""


def test_repeated_flags_warn_and_the_last_wins(capsys):
    assert parse("--config=tiny", "--data.paths=a", "--data.paths", "b").config.data.paths == ("b",)
    assert capsys.readouterr().err == "warning: --data.paths is given more than once; the last one counts (b)\n"


def test_flags_of_the_verb():
    assert parse("--config=tiny").flags == {"skip_train": False, "prompt": None, "count": 3}
    flags = parse("--config=tiny", "--skip_train", "--prompt", "hello", "--count=none").flags
    assert flags == {"skip_train": True, "prompt": "hello", "count": None}
    errors = problems("--config=tiny", "--skip-trian", "--count=x", "--prompt")
    assert "did you mean skip-train?" in errors["--skip-trian"]
    assert "expected a whole number or none, got 'x'" in errors["--count"]
    assert "needs a value" in errors["--prompt"]


def test_verbs_without_a_config():
    flags = (cli.Flag("input", str, required=True),)
    command = cli.parse(["--input=x"], verb="preprocess", flags=flags, with_config=False)
    assert (command.config, command.flags) == (None, {"input": "x"})
    with pytest.raises(ConfigError) as error:
        cli.parse(["--inptu=x"], verb="preprocess", flags=flags, with_config=False)
    assert "did you mean input?" in str(error.value)
    assert "--input: must be given" in str(error.value)


def test_all_problems_are_in_one_error():
    with pytest.raises(ConfigError) as error:
        parse("--config=tiny", "--paralel.tensor=2", "--steps=abc", "foo", "-steps=3", "--devices=gpu:4")
    message = str(error.value)
    assert message.startswith("5 problems in configs/tiny.py + command line:\n  paralel.tensor: no such setting\n")
    texts = ("did you mean parallel.tensor?", "got 'abc'", "foo: unexpected argument", "--steps=3?", "CUDA_VISIBLE")
    assert all(text in message for text in texts), message
    assert set(problems("--devices=x", "--config=toi")) == {"--devices", "--config"}
    assert set(problems("--steps=1")) == {"--config"}
    assert problems("--confg=tiny")["--confg"] == "no such flag or setting\ndid you mean --config?"


@pytest.mark.parametrize("devices", ["cpu:0", "cpu:", "cpu:x", "cpu:-1", "cpu:99999", "tpu", "8", "", "gpu:4", "CPU:8"])
def test_invalid_devices(devices):
    assert "expected cpu:N" in problems("--config=tiny", f"--devices={devices}")["--devices"]


def test_devices_are_set_before_jax_is_imported():
    code = (
        "import sys\nimport megajax.command_line.parser as cli\n"
        "cli.parse(sys.argv[1:], verb='train', root='config_samples:RunConfig')\n"
        "heavy = [name for name in ('jax', 'jaxlib', 'numpy', 'flax', 'optax', 'orbax') if name in sys.modules]\n"
        "assert not heavy, heavy\nimport jax\n"
        "print(len(jax.devices()), jax.devices()[0].platform)"
    )
    process = program(code, "--config=tiny", "--devices=cpu:3", "--parallel.tensor=3")
    assert (process.stdout, process.stderr) == ("3 cpu\n", "")
    process = program(code, "--config=tiny", "--devices=cpu:3", "--parallel.tensor=2")
    assert "2 does not divide 3 devices" in process.stderr


def program(code, *argv, **environment):
    path = os.pathsep.join([str(HERE.parent), str(HERE.parents[1])])
    env = {k: v for k, v in os.environ.items() if k not in RANKS} | {"PYTHONPATH": path} | environment
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, env=env, timeout=100)


def test_devices_after_the_import_of_jax():
    # The test session has imported jax with eight devices: only the same number is accepted.
    assert parse("--config=tiny", "--devices=cpu:8").devices == "cpu:8"
    assert "too late" in problems("--config=tiny", "--devices=cpu:4")["--devices"]


def test_the_device_count_is_per_process(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert parse("--config=tiny", "--devices=cpu:8", "--parallel.tensor=3").config.parallel.tensor == 3
    monkeypatch.delenv("SLURM_PROCID")
    wrong = problems("--config=tiny", "--devices=cpu:8", "--parallel.tensor=3")
    assert "3 does not divide 8" in wrong["parallel.tensor"]


def test_print_config_names_the_source_of_each_setting(capsys, folder):
    (folder / "configs" / "over.yaml").write_text("config: tiny.py\nseed: 5\noptimizer: {type: Muon}\n")
    with pytest.raises(SystemExit) as end:
        parse("--config=over.yaml", "--optimizer.lr=1", "--parallel.tensor=1", "--print-config")
    assert end.value.code == 0
    printed = capsys.readouterr().out
    noted = [" ".join(line.split()) for line in printed.splitlines() if "#" in line]
    assert noted == [
        "hidden_size: 768 # configs/tiny.py",
        "type: MuonConfig # configs/over.yaml",
        "lr: 1.0 # command line",
        "steps: 500 # configs/tiny.py",
        "seed: 5 # configs/over.yaml",
    ]
    (folder / "again.yaml").write_text(printed)
    assert parse("--config=again.yaml").config == parse("--config=over.yaml", "--optimizer.lr=1").config


def shown(capsys, *argv):
    with pytest.raises(SystemExit) as end:
        parse(*argv, description="Trains a model.")
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help(capsys):
    text = shown(capsys, "--help")
    for line in (
        "python -m megajax.train --config=FILE",
        "Trains a model.",
        "  --skip-train  true or false\n      Only evaluate.",
        "  --steps  a whole number = 1000\n      Optimizer steps in all.",
        "  --model.hidden_size  a whole number (must be given)\n      Width of the residual stream.",
        "  --parallel.data_sharding  one of replicate, zero1, fsdp = zero1",
        "  --optimizer.type  AdamWConfig or MuonConfig = AdamWConfig",
        "  --guard  GuardConfig or none = none\n      Watches the loss; none for no watch.",
        "  --model.pattern.0.attention.heads  a whole number = 12\n      Number of query heads.",
    ):
        assert line in text
    assert "--steps  a whole number = 500" in shown(capsys, "--config=tiny", "-h")


def test_help_of_one_part(capsys):
    text = shown(capsys, "--help=parallel")
    names = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert names == [f"--parallel.{name}" for name in ("tensor", "data", "sequence", "data_sharding")]
    assert "--optimizer.lr" in shown(capsys, "--help", "lr")
    with user_error("--help=optimizer.LionConfig", kind=ConfigError):
        parse("--help=optimizer.LionConfig")
    with user_error("--help=paralel.tensr", kind=ConfigError):
        parse("--help=paralel.tensr")


def test_help_shows_the_chosen_class_and_lists_the_others(capsys):
    def names(topic, *more):
        text = shown(capsys, f"--help={topic}", *more)
        return text, [line.split()[0][2:] for line in text.splitlines() if line.startswith("  --")]

    text, settings = names("optimizer")
    assert settings == ["optimizer.type", "optimizer.lr", "optimizer.betas"]
    assert "--help=optimizer.MuonConfig shows" in text and re.search("\n  MuonConfig +MuonConfig", text)
    for topic in ("optimizer.MuonConfig", "optimizer.muon"):
        assert names(topic)[1] == ["optimizer.lr", "optimizer.momentum"]
    assert names("guard")[1] == ["guard", "guard.window"]
    assert names("model.pattern.MambaConfig")[1] == names("model.pattern.0.mamba")[1] == ["model.pattern.0.state"]
    assert names("model.pattern.attention")[1] == [
        "model.pattern.0.attention.heads",
        "model.pattern.0.attention.window",
    ]
    assert "model.pattern.0.norm" in names("model.pattern")[1] and "state" not in names("model")[0]


def test_help_shows_common_settings_and_help_all_every_setting(capsys):
    common = ("steps", "optimizer.momentum", "data.paths")

    def names(*arguments):
        with pytest.raises(SystemExit):
            cli.parse(arguments, verb="train", root=RunConfig, common=common)
        text = capsys.readouterr().out
        return text, [line.split()[0][2:] for line in text.splitlines() if re.match("  --[a-z.]+  ", line)]

    text, shown_names = names("--help")
    assert shown_names == list(common)
    assert "--help=all shows every setting, --help=PART one part: model, parallel, optimizer, guard, data" in text
    assert "  --steps  a whole number = 500" in names("--help", "--config=tiny")[0]
    assert {"seed", "optimizer.lr", "steps", "data.paths"} <= set(names("--help=all")[1])
    assert names("--help=data")[1][:2] == ["data.paths", "data.blend"]


def test_front_door(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", "--config=tiny", "--steps=x"])
    for main, code in ((lambda argv: parse(*argv) and 0, 2), (lambda argv: 17, 17), (lambda argv: None, 0)):
        with pytest.raises(SystemExit) as end:
            cli.front_door(main)
        assert end.value.code == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "\n1 problem in configs/tiny.py + command line:\n  steps: expected a whole number, got 'x'\n\n"
    )
    with pytest.raises(ZeroDivisionError):
        cli.front_door(lambda argv: 1 // 0)


def test_ctrl_c_ends_a_verb_with_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plan"])
    with pytest.raises(SystemExit) as end:
        cli.front_door(lambda argv: signal.raise_signal(signal.SIGINT))
    assert (end.value.code, capsys.readouterr().err) == (cli.INTERRUPTED, "interrupted\n")


@pytest.mark.parametrize("variable", RANKS)
def test_other_processes_than_0_report_errors_in_a_line(capsys, monkeypatch, variable):
    """Process 0 may not have the error, such as of a file that one machine lacks."""
    monkeypatch.setenv(variable, "3")
    cli.report(ConfigError([Problem("steps", "must be above 0\nor none"), Problem("seed", "is odd")], "a.py"))
    assert capsys.readouterr().err == "process 3: steps: must be above 0 (and 1 more)\n"
    with monkeypatch.context() as launched:
        launched.setenv("MEGAJAX_LOCAL_PROCESSES", "4")
        cli.report(ConfigError([Problem("steps", "must be above 0")], "a.py"))
        assert capsys.readouterr().err == ""
    cli.report(UserError("this disk is full\nmore"))
    cli.report(UserError("process 3: this disk is full\nmore"))  # a reason that the processes have exchanged
    assert capsys.readouterr().err == "process 3: this disk is full\n" * 2
    monkeypatch.setenv(variable, "0")
    cli.report(UserError("this disk is full\nmore"))
    assert "more" in capsys.readouterr().err


def test_closed_output_ends_a_verb_quietly():
    code = (
        "from megajax.command_line.parser import front_door\n"
        "front_door(lambda argv: [print('x' * 99) for _ in range(9999)] and 0)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=HERE.parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.stdout.close()
    assert (process.wait(timeout=100), process.stderr.read()) == (cli.OUTPUT_CLOSED, "")
    process.stderr.close()


def test_an_interrupt_during_imports_prints_one_line(tmp_path):
    (tmp_path / "hashlib.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(HERE.parents[1])])}
    process = subprocess.run(
        [sys.executable, "-m", "megajax.train"], capture_output=True, text=True, env=environment, timeout=60
    )
    assert (process.returncode, process.stderr) == (-signal.SIGINT, "interrupted\n"), "a shell shows 130"


def test_warnings_have_no_line_of_code(capfd):
    """Warnings of other packages keep their file and line."""
    package_file = str(Path(command_line.__file__).with_name("data"))
    program = (
        "import sys, warnings; from megajax.command_line.parser import front_door\n"
        "def main(argv):\n"
        f"    warnings.warn_explicit('ours', UserWarning, {package_file!r}, 7)\n"
        "    warnings.warn_explicit('theirs', UserWarning, '/elsewhere.py', 8)\n"
        "front_door(main)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert capfd.readouterr().err.splitlines() == ["warning: ours", "/elsewhere.py:8: UserWarning: theirs"]
