"""XLA options on the command line, in files and in the environment; variables that are set before jax starts."""

import pytest
from user_errors import user_error

from megajax.command_line.parser import parse
from megajax.config.compose import problems_of
from megajax.config.dump import flatten
from megajax.config.errors import ConfigError
from megajax.processes.xla_options import (
    GPU,
    Option,
    XlaConfig,
    add_flags,
    compiler_options,
    flag_names,
    memory_fraction,
    set_process,
)

CONFIG = "--config=quickstart.py"


def parsed(*arguments: str):
    return parse([CONFIG, "--devices=cpu:1", *arguments], verb="train")


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """`parse` sets the variables that jax reads at import."""
    for name in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr("megajax.command_line.parser.device_problems", lambda devices: [])


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--xla=a=1"], {"a": 1}),
        (
            ["--xla=a=1,b=true", "--xla", "c=FUSION,CUBLAS", "--xla=d="],
            {"a": 1, "b": True, "c": "FUSION,CUBLAS", "d": ""},
        ),
        (["--xla=a=1", "--xla=a=2"], {"a": 2}),
        (["--xla=--xla_one=false --xla_two=0.5"], {"xla_one": False, "xla_two": 0.5}),
    ],
)
def test_xla_options_may_be_repeated_and_become_settings(arguments, options, capsys):
    command = parsed(*arguments)
    assert dict(command.config.xla.options) == options
    assert "more than once" not in capsys.readouterr().err
    assert all(command.sources[f"xla.options.{name}"] == "command line" for name in options)
    assert {name: flatten(command.config)[f"xla.options.{name}"] for name in options} == options


def test_options_of_a_file_stay(tmp_path):
    lower = tmp_path / "lower.yaml"
    lower.write_text("config: quickstart.py\nxla: {options: {a: 1, b: 2}}\n")
    upper = tmp_path / "upper.yaml"
    upper.write_text("config: lower.yaml\nsteps: 3\n")
    command = parse([f"--config={upper}", "--devices=cpu:1", "--xla=b=3,c=4"], verb="train")
    assert dict(command.config.xla.options) == {"a": 1, "b": 3, "c": 4}


@pytest.mark.parametrize("arguments", ["--xla", "--xla=xla_gpu_autotune_level", "--xla==1", "--xla=a=1,b"])
def test_unknown_options_are_refused_or_taken_as_text(arguments):
    if arguments == "--xla=a=1,b":
        assert dict(parsed(arguments).config.xla.options) == {"a": "1,b"}
        return
    with user_error("--xla", kind=ConfigError):
        parsed(arguments)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"options": {"a b": 1}}, "options"),
        ({"options": {"a": [1]}}, "options.a"),
        ({"memory_fraction": 1.0}, "memory_fraction"),
        ({"memory_fraction": 0.0}, "memory_fraction"),
        ({"compile_cache_gib": 0.0}, "compile_cache_gib"),
    ],
)
def test_impossible_settings(changes, setting):
    assert [problem.setting for problem in problems_of(XlaConfig(**changes))] == [setting]


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({}, "0.92"),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, "0.5"),
        # The older name: jax refuses both at once.
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}, "0.6"),
    ],
)
def test_the_user_s_memory_fraction_is_kept(environment, share):
    set_process(XlaConfig(), environment)
    assert memory_fraction(environment) == share
    assert len(environment) == 1


def test_environment_variables_are_kept(monkeypatch):
    name = GPU[0].name
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=false --xla_other=1")
    assert flag_names() == {name, "xla_other"}
    assert compiler_options(*GPU) == {option.name: option.value for option in GPU[1:]}
    environment = {"XLA_FLAGS": "--xla_other=1"}
    add_flags([Option("xla_other", 2, ""), Option("xla_more", 3, "")], environment)
    assert environment == {"XLA_FLAGS": "--xla_other=1 --xla_more=3"}


def test_every_option_has_a_reason():
    assert all(len(option.why) > 20 for option in GPU)
