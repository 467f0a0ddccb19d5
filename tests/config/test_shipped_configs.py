"""The shipped configs: how they are found, and their debug twins; tests/release finds them in the wheel."""

from pathlib import Path

import pytest
from user_errors import user_error

from megajax.command_line.help import settings_help
from megajax.command_line.parser import parse
from megajax.config import ConfigError, UserError, load
from megajax.config.config_files import SHIPPED, advised, find, functions_of, twin_of
from megajax.training.run_config import RunConfig

REPOSITORY = Path(__file__).parents[2]
FAMILIES = (
    "bert.py", "cohere2.py", "deepseek.py", "dpo.py", "exaone4.py", "gemma.py", "glm4.py", "glm4_moe.py", "glue.py",
    "gpt2.py", "gpt3.py", "gpt_oss.py", "granite.py", "granite4.py", "grpo.py", "llama3.py", "mamba2.py",
    "minimax_m2.py", "mixtral.py", "nemotron_h.py", "olmo3.py", "olmoe.py", "phi.py", "qwen3_5.py", "qwen3_moe.py",
    "qwen3_next.py", "race.py", "sft.py", "smollm3.py", "squad.py", "t5.py",
)  # fmt: skip

PIPELINES = (
    "mixtral_8x7b", "mixtral_8x22b", "deepseek_v3", "llama3_70b", "llama3_405b", "gpt3_175b", "exaone4_32b",
    "olmo2_32b", "olmo3_32b",
)  # fmt: skip
SHARDING = ("pipeline", "virtual_stages", "expert", "context", "tensor")


def sizes(file: str) -> list[str]:
    names = (name for name in functions_of(SHIPPED / file) if name.startswith(file[:-3]))
    return [name for name in names if not name.endswith(("_debug", "_h200"))]


def test_names_are_searched_here_then_in_configs_then_in_shipped_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find("gpt3.py") == SHIPPED / "gpt3.py" == REPOSITORY / "configs" / "gpt3.py"
    assert find("gpt3") == SHIPPED / "gpt3.py"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "gpt3.py").touch()
    assert find("gpt3.py") == tmp_path / "configs" / "gpt3.py"
    (tmp_path / "gpt3.py").touch()
    assert find("gpt3.py") == tmp_path / "gpt3.py"


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("llama3_8b.py", "did you mean llama3.py:llama3_8b?"),
        ("llama3_8b", "did you mean llama3.py:llama3_8b?"),
        ("configs/gpt3_175b.py", "did you mean gpt3.py:gpt3_175b?"),
        ("gpt3_175b.py:debug", "did you mean gpt3.py:gpt3_175b_debug?"),
        ("quikstart.py", "did you mean quickstart.py?"),
        ("mine.py",
         "bench.py, bert.py, cohere2.py, deepseek.py, distill.py, dpo.py, exaone4.py, falcon_h1.py, gemma.py"),
        ("gpt3.py:gpt3_175", "did you mean gpt3_175b?"),
        ("gpt3.py:small", "(it has config, debug, gpt3_50m, gpt3_160m, gpt3_1_3b, gpt3_6_7b, gpt3_175b, "),
    ],
)  # fmt: skip
def test_a_missing_config_gets_a_hint(source, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        load(source)
    assert hint in str(refused.value)


@pytest.mark.parametrize("file", FAMILIES)
def test_every_size_has_its_own_twin_and_run_folder(file):
    names = sizes(file)
    assert names and {f"{name}_debug" for name in names} <= set(functions_of(SHIPPED / file))
    configs = {name: load(f"{file}:{name}") for name in names}
    twins = {f"{name}_debug": load(f"{file}:{name}_debug", devices=8) for name in names}
    assert all(cfg.run_dir == f"runs/{name}" for name, cfg in (configs | twins).items())
    default = next(name for name, cfg in configs.items() if cfg == load(file))
    assert load(f"{file}:debug", devices=8) == twins[twin_of(f"{file}:{default}").partition(":")[2]]


def test_twins_of_a_file():
    assert twin_of("gpt3.py") == twin_of("gpt3.py:config") == "gpt3.py:debug"
    assert twin_of("gpt3.py:gpt3_175b") == twin_of("gpt3.py:gpt3_175b_h200") == "gpt3.py:gpt3_175b_debug"
    assert twin_of("quickstart.py") is twin_of("nothing.py") is twin_of("gpt3.py:debug") is None


def test_a_layout_too_large_for_the_machine_names_the_twin_first():
    with pytest.raises(ConfigError) as refused:
        parse(["--config=gpt3.py:gpt3_175b", "--devices=cpu:8"], verb="train")
    problem, twin, smaller, virtual = str(refused.value).splitlines()[1:]
    assert problem.strip() == "parallel: the axes multiply to 64 devices (pipeline 16 x tensor 4), there are 8"
    assert "python -m megajax.train --config=gpt3.py:gpt3_175b_debug --devices=cpu:8" in twin
    assert smaller.strip() == "make parallel.pipeline or parallel.tensor smaller, or give more devices"
    assert "for a small model, --devices=cpu:64" in virtual
    assert parse(twin.split()[-2:], verb="train").config.run_dir == "runs/gpt3_175b_debug"


def test_other_errors_are_unchanged():
    with pytest.raises(ConfigError) as refused:
        load("gpt3.py:gpt3_175b", "parallel.tensor=7")
    assert advised(refused.value, "gpt3.py:gpt3_175b", "train") is refused.value


@pytest.mark.parametrize("name", PIPELINES)
def test_twins_of_pipelines_have_their_axes(name):
    """Its layout is that of the config for 80 GB: eight devices train every kind of parallelism of the large run."""
    file = f"{name.partition('_')[0]}.py"
    layouts = [load(f"{file}:{name}{end}").parallel for end in ("", "_debug")]
    large, twin = ({axis: getattr(layout, axis) > 1 for axis in SHARDING} for layout in layouts)
    assert large == twin and layouts[0].sequence == layouts[1].sequence
    assert layouts[0].schedule == layouts[1].schedule and layouts[0].data_sharding == layouts[1].data_sharding


def test_help_knows_classes_of_packages_above_the_field():
    assert "Answers of the model itself" in settings_help(RunConfig, None, "data.RolloutsConfig")
    with user_error("--help=data.AdamWConfig"):
        settings_help(RunConfig, None, "data.AdamWConfig")


def test_a_file_in_place_of_a_tokenizer():
    with user_error("tokenizer.type"):
        load("quickstart.py", "tokenizer=data/tokenizer.json")
