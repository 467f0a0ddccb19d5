"""Overrides on a tree: nested names, unions, list entries; all problems in one error."""

from dataclasses import FrozenInstanceError

import pytest
from config_samples import AdamWConfig, GuardConfig, MambaConfig, ModelConfig, MuonConfig, RunConfig
from user_errors import user_error

from megajax.config import ConfigError
from megajax.config.compose import check, override

pytestmark = pytest.mark.smoke

RUN = RunConfig(model=ModelConfig(hidden_size=768))


def problems(*settings, config=RUN, devices=None):
    with pytest.raises(ConfigError) as error:
        override(config, *settings, devices=devices)
    return {problem.setting: problem for problem in error.value.problems}


def test_nested_names_and_dashes():
    changed = override(RUN, "parallel.tensor=2", "--parallel.data-sharding=fsdp", "steps=1e3")
    assert (changed.parallel.tensor, changed.parallel.data_sharding, changed.steps) == (2, "fsdp", 1000)
    assert RUN.parallel.tensor == 1
    with pytest.raises(FrozenInstanceError):
        changed.steps = 3


def test_entries_of_a_list_by_number():
    changed = override(RUN, "model.pattern=BlockConfig,Mamba", "model.pattern.0.attention.heads=8")
    assert changed.model.pattern[0].attention.heads == 8
    assert changed.model.pattern[1] == MambaConfig()
    result = override(changed, "model.pattern.1.state=16")
    assert result.model.pattern[0] == changed.model.pattern[0]
    assert result.model.pattern[1].state == 16
    assert "0 to 1" in problems("model.pattern.2.state=3", config=result)["model.pattern.2"].hint


def test_entries_of_a_mapping_by_name():
    run = override(RUN, "data.parts={web-a: {window: 3}, code: {}}")
    assert run.data.parts == {"web-a": GuardConfig(window=3), "code": GuardConfig()}
    changed = override(run, "data.parts.web-a.window=4")
    assert changed.data.parts == {"web-a": GuardConfig(window=4), "code": GuardConfig()}
    assert problems("data.parts.cod.window=4", config=run)["data.parts.cod"].hint == "did you mean code?"


@pytest.mark.parametrize("name", ["MuonConfig", "Muon", "muon"])
def test_switching_a_union_starts_from_the_new_members_defaults_in_any_order(name):
    run = override(RUN, "optimizer.lr=1")
    assert run.optimizer == AdamWConfig(lr=1.0)
    assert override(run, f"optimizer.type={name}").optimizer == MuonConfig()
    assert override(run, f"optimizer={name}").optimizer == MuonConfig()
    assert override(run, "optimizer.momentum=0.5", f"optimizer.type={name}").optimizer == MuonConfig(momentum=0.5)
    assert override(run, f"optimizer={name}", "optimizer.momentum=0.5").optimizer == MuonConfig(momentum=0.5)
    assert override(run, "optimizer={type: muon, lr: 1e-4}").optimizer == MuonConfig(lr=1e-4)


def test_naming_the_current_member_keeps_its_settings():
    assert override(override(RUN, "optimizer.lr=1"), "optimizer.type=AdamW").optimizer == AdamWConfig(lr=1.0)


def test_a_setting_of_another_member_names_that_member():
    assert "add --optimizer.type=MuonConfig" in problems("optimizer.momentum=0.5")["optimizer.momentum"].hint


def test_optional_config():
    run = override(RUN, "guard.window=5")
    assert run.guard == GuardConfig(window=5)
    assert override(run, "guard=none").guard is None
    assert override(RUN, "guard=GuardConfig").guard == GuardConfig()


def test_all_problems_at_once_with_the_nearest_names():
    actual = problems(
        "paralel.tensor=2",
        "steps=abc",
        "tensor=2",
        "model.pattern.0.atention.heads=3",
        "parallel.data_sharding=zero",
        "optimizer.type=Lion",
        "model.pattern.0.attention.heads=7",
        "seed",
    )
    assert actual["paralel.tensor"].message == "no such setting"
    assert actual["paralel.tensor"].hint == actual["tensor"].hint == "did you mean parallel.tensor?"
    assert actual["steps"].message == "expected a whole number, got 'abc'"
    assert actual["model.pattern.0.atention.heads"].hint == "did you mean model.pattern.0.attention.heads?"
    assert actual["parallel.data_sharding"].hint == "did you mean zero1?"
    assert actual["optimizer.type"].message == "expected AdamWConfig or MuonConfig, got 'Lion'"
    assert actual["model.pattern.0.attention.heads"].message == "hidden_size=768 is not divisible by heads=7"
    assert actual["model.pattern.0.attention.heads"].hint == "divisors near 7: 6, 8"
    assert actual["seed"].message == "needs a value"
    assert len(actual) == 8


def test_cross_checks_of_root_and_parts():
    actual = problems("parallel.tensor=3", "model.pattern.0.attention.heads=0", devices=8)
    assert actual["parallel.tensor"].message == "3 does not divide 8 devices"
    assert actual["model.pattern.0.attention.heads"].message == "must be at least 1, got 0"
    assert "model" not in actual  # the division by it is no crash, and has its reason listed already
    check(RUN, 8)
    with user_error("parallel.tensor", kind=ConfigError):
        check(override(RUN, "parallel.tensor=2"), 7)


def test_hints_skip_settings_of_other_union_members():
    """AdamW has betas; the chosen Muon has no similar setting."""
    problem = problems("optimizer.type=Muon", "optimizer.beta=0.9")["optimizer.beta"]
    assert problem.message == "no such setting" and "optimizer.betas" not in problem.hint
