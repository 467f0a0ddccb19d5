"""Config files: how they are found, run and read, and the errors if they can't be."""

import sys
from itertools import pairwise

import pytest
from config_samples import AdamWConfig, MuonConfig, RunConfig

from megajax.config import UserError, config_files
from megajax.config.config_files import load

BASE = """
from dataclasses import replace

from config_samples import ModelConfig, RunConfig

def config():
    return RunConfig(model=ModelConfig(hidden_size=768), steps=500)

def debug():
    return replace(config(), steps=5)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mini_124m.py").write_text(BASE)
    return tmp_path


def run(source, *settings):
    return load(source, *settings, root=RunConfig)


def refusal(source, *settings):
    with pytest.raises(UserError) as error:
        run(source, *settings)
    return str(error.value)


def test_found_by_name_and_by_path(folder, monkeypatch):
    for source in ("mini_124m.py", "mini_124m", "configs/mini_124m.py", str(folder / "configs" / "mini_124m.py")):
        assert run(source).steps == 500
    assert run("mini_124m.py:debug").steps == 5
    monkeypatch.setattr(config_files, "SHIPPED", folder / "configs")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert run("mini_124m").steps == 500


def test_a_script_in_the_working_folder_is_not_a_config(folder):
    (folder / "mini_124m.py").write_text("raise RuntimeError")
    assert run("mini_124m").steps == 500


def test_settings_over_a_file(folder):
    assert run("mini_124m.py", "parallel.tensor=2", "steps=1e3").parallel.tensor == 2
    problems = ("  paralel.tensor: no such setting", "      did you mean parallel.tensor?")
    problems += ("  steps: expected a whole number, got 'x'",)
    lines = refusal("mini_124m.py", "paralel.tensor=2", "steps=x").splitlines()
    assert lines == ["2 problems in configs/mini_124m.py + settings:", *problems]


def test_a_missing_file_or_function_names_similar_ones(folder):
    assert "did you mean mini_124m.py?" in refusal("mini_125m.py")
    assert "did you mean mini_124m.py?" in refusal("mini_12m")
    (folder / "folder.yaml").mkdir()
    assert "did you mean folder.yaml?" not in refusal("folder.yaml")
    assert "mini_124m.py" in refusal("zzzz")
    message = refusal("mini_124m.py:debgu")
    assert "has no function debgu (it has config, debug)" in message
    assert "did you mean debug?" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = x +\n", "configs/bad.py, line 2: invalid syntax\n    y = x +"),
        ("def config():\n    return nothing\n", "configs/bad.py, line 2: NameError: name 'nothing' is not defined"),
        (
            "import nothere\n",
            "configs/bad.py, line 1: the file failed to import nothere: there is no such module\n    imp",
        ),
        ("import megajx\n", "did you mean megajax?"),
        ("import torch_\n", f"install it for {sys.executable}"),
        ("from os import pathh\n", "did you mean path?"),
        ("def config():\n    return 3\n", "configs/bad.py: config() must return a RunConfig, got 3"),
        ("from config_samples import *\ndef config():\n    return RunConfig(step=1)\n", "did you mean steps?"),
    ],
)
def test_an_error_in_the_file_has_its_line(folder, text, message):
    (folder / "configs" / "bad.py").write_text(text)
    assert message in refusal("bad.py")


def test_a_file_may_import_files_of_its_folder(folder):
    child = (
        "import mini_124m as base\nfrom dataclasses import replace\n"
        "def config():\n    return replace(base.config(), seed=3)\n"
    )
    (folder / "configs" / "child.py").write_text(child)
    (folder / "other").mkdir()
    (folder / "other" / "mini_124m.py").write_text(BASE.replace("500", "600"))
    (folder / "other" / "child.py").write_text(child)
    assert (run("child").steps, run("child").seed) == (500, 3)
    assert run("other/child.py").steps == 600


def test_a_config_class_defined_in_the_file(folder):
    (folder / "configs" / "own.py").write_text(
        "from __future__ import annotations\nfrom config_samples import *\nfrom dataclasses import dataclass\n"
        "@dataclass(frozen=True, kw_only=True, slots=True)\nclass Own(RunConfig):\n    extra: int | None = 1\n"
        "def config():\n    return Own(model=ModelConfig(hidden_size=12))\n"
    )
    assert run("own", "extra=2").extra == 2


YAML = """
model: {hidden_size: 768}
optimizer:
  type: MuonConfig
  lr: 1e-4
steps: 1e3
guard: none
run_dir: none
"""


def test_yaml_and_json_read_numbers_by_the_fields_types(folder):
    (folder / "configs" / "a.yaml").write_text(YAML)
    config = run("a.yaml")
    assert config.optimizer == MuonConfig(lr=1e-4)
    assert (config.steps, config.guard, config.run_dir) == (1000, None, "none")
    (folder / "b.json").write_text('{"model": {"hidden_size": 768}, "optimizer": {"betas": [0.8, 0.9]}}')
    assert run("b.json").optimizer == AdamWConfig(betas=(0.8, 0.9))


def test_settings_may_add_what_a_file_lacks(folder):
    (folder / "a.yaml").write_text("steps: 5\n")
    assert "model: has no default and is not given" in refusal("a.yaml")
    assert run("a.yaml", "model.hidden_size=12").model.hidden_size == 12


def test_a_run_folder_stands_for_its_config(folder):
    (folder / "runs").mkdir()
    (folder / "runs" / "config.yaml").write_text(YAML)
    assert run("runs").steps == 1000


def test_yaml_over_a_base(folder):
    (folder / "configs" / "over.yaml").write_text(
        "config: mini_124m.py:debug\noptimizer: {type: Muon, momentum: 0.5}\nmodel: {pattern: {0: {norm: layer}}}\n"
        "data: {blend: {a: 0.5}}\n"
    )
    config = run("over.yaml", "optimizer.lr=1")
    assert (config.steps, config.optimizer) == (5, MuonConfig(momentum=0.5, lr=1.0))
    assert config.model.pattern[0].norm == "layer"
    (folder / "configs" / "more.yaml").write_text("config: over.yaml\noptimizer: AdamW\ndata: {blend: {b: 1}}\n")
    assert run("more.yaml").optimizer == AdamWConfig()
    assert run("more.yaml").data.blend == {"b": 1.0}
    assert run("more.yaml", "data.blend.b=2").data.blend == {"b": 2.0}
    (folder / "configs" / "loop.yaml").write_text("config: loop.yaml\n")
    assert "is based on itself" in refusal("loop.yaml")


ALIASES = "a: &a [1, 1]\n" + "".join(f"{y}: &{y} [*{x}, *{x}]\n" for x, y in pairwise("abcdefghijklmnopqr"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 1\nstep: 2\nmodel: {hidden_size: 4}\n", "step: no such setting\n      did you mean steps?"),
        ("steps: 1\nsteps: 2\n", "line 2: steps is given twice"),
        ("a: [1\n", "bad.yaml, line 2: "),
        ("steps: " + ":".join(["59"] * 50_000), "line 1: a number of 149999 characters, at most 100"),
        ("steps: " + ":".join(["59"] * 50_000) + ".5", "line 1: a number of 150001 characters"),
        ("steps: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("steps: " + "9" * 5000, "a number of 5000 characters"),
        (ALIASES, "bad.yaml: refused: 1,048,555 entries, at most 100,000 are read"),
        ("- 1\n", "expected settings, name: value; got list"),
        ("steps: !!python/object/apply:os.system [exit]\n", "could not determine a constructor for the tag"),
        ("steps: ${HOME}\n", "steps: expected a whole number, got '${HOME}'"),
        ("# " + "x" * (1 << 23), "refused: 8,388,610 bytes, at most 8,388,608 are read"),
        ("model: {hidden_size: 4}\nsteps:\n", "steps: expected a whole number, got None"),
        ("model: 4\n", "model: expected ModelConfig, got 4"),
        ("model: {hidden_size: 4, pattern: [{norm: no}]}\n", "add --model.pattern.0.type="),
        ("model: {hidden_size: 4}\nparallel: {data_sharding: on}\n", "put it in quotes"),
    ],
)
def test_faults_in_yaml(folder, text, message):
    (folder / "bad.yaml").write_text(text)
    assert message in refusal("bad.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"steps": 1, "steps": 2}', "bad.json: steps is given twice"),
        ('{"steps": ' + "[" * 3000 + "]" * 3000 + "}", "nested too deeply"),
        ('{"steps": ' + "9" * 5000 + "}", "Exceeds the limit (4300 digits)"),
        ('{"steps": 1,\n', "bad.json, line 2: "),
    ],
)
def test_faults_in_json(folder, text, message):
    (folder / "bad.json").write_text(text)
    assert message in refusal("bad.json")
