"""Settings of optimizers and schedules that are refused, and a user's own optimizer class."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from user_errors import user_error

from megajax.config import load
from megajax.config.compose import problems_of
from megajax.config.errors import ConfigError, Problem
from megajax.mesh.mesh import build_mesh
from megajax.optim.config import (
    AdamWConfig,
    GroupConfig,
    LionConfig,
    MuonConfig,
    ScheduleConfig,
    SGDConfig,
    UpdateConfig,
)
from megajax.optim.optimizer import RuleOptimizer, SignOfAverage
from megajax.training.program import Program


@pytest.mark.parametrize(
    ("cfg", "setting", "message"),
    [
        (AdamWConfig(beta1=1.0), "beta1", "must be at least 0 and below 1, got 1"),
        (AdamWConfig(clip=0.0), "clip", "must be above 0, got 0"),
        (AdamWConfig(epsilon=-1e-8), "epsilon", "must be above 0, got -1e-08"),
        (AdamWConfig(weight_decay=-1.0), "weight_decay", "must be at least 0, got -1"),
        (AdamWConfig(embedding_lr=1e-3, embedding_min_lr=1e-2), "embedding_min_lr", "above embedding_lr"),
        (AdamWConfig(offload=1.5), "offload", ""),
        (AdamWConfig(moments="bfloat16"), "moments", "beta2=0.999"),
        (AdamWConfig(moments="float16", beta2=0.9995), "moments", "beta2=0.9995"),
        (SGDConfig(momentum=1.0), "momentum", "below 1"),
        (LionConfig(beta1=-0.1), "beta1", "at least 0"),
        (MuonConfig(iterations=7), "iterations", "7 is not a multiple of quintic's 5"),
        (MuonConfig(iterations=5, coefficients="polar_express"), "iterations", "leaves some out"),
        (MuonConfig(iterations=0), "iterations", "at least 1"),
        (MuonConfig(extra_scale=0.0), "extra_scale", "above 0"),
        (GroupConfig(match=""), "match", ""),
        (GroupConfig(match="a", lr=1.0, min_lr=2.0), "min_lr", ""),
        (ScheduleConfig(warmup_steps=1, warmup_samples=1), "warmup_samples", "warmup_steps and warmup_samples are"),
        (ScheduleConfig(decay_steps=9, decay_samples=9), "decay_samples", "decay_steps and decay_samples are both set"),
        (ScheduleConfig(lr=-1.0, min_lr=-1.0), "lr", "must be at least 0"),
        (ScheduleConfig(min_lr=1.0), "min_lr", "min_lr=1.0 is above lr=0.0003"),
        (ScheduleConfig(warmup_fraction=1.5), "warmup_fraction", "must be between 0 and 1, got 1.5"),
        (ScheduleConfig(warmup_start=1.0), "warmup_start", "warmup_start=1.0 is above lr=0.0003"),
        (ScheduleConfig(style="wsd"), "anneal_steps", "is needed with style=wsd"),
        (ScheduleConfig(style="wsd", anneal_steps=0), "anneal_steps", "must be at least 1, got 0"),
        (ScheduleConfig(anneal_samples=5), "anneal_samples", "has no meaning with style=cosine"),
        (ScheduleConfig(style="wsd", anneal_samples=5, anneal_steps=5), "anneal_samples", "are both set"),
        (ScheduleConfig(weight_decay_start=-1.0), "weight_decay_start", "must be at least 0"),
    ],
)
def test_problems(cfg: Any, setting: str, message: str) -> None:
    problem = problems_of(cfg)[0]
    assert problem.setting == setting
    assert message in problem.message


def test_of_two_exclusive_settings_the_hint_keeps_either() -> None:
    (problem,) = ScheduleConfig(warmup_steps=1, warmup_samples=1).problems()
    assert problem.hint == (
        "--schedule.warmup_samples=none keeps warmup_steps, --schedule.warmup_steps=none keeps warmup_samples"
    )


def test_settings_without_a_problem() -> None:
    for cfg in (AdamWConfig(clip=None), AdamWConfig(moments="bfloat16", beta2=0.95), AdamWConfig(moments="float16")):
        assert cfg.problems() == []


FILE = str(Path(__file__))


@dataclass(frozen=True, kw_only=True, slots=True)
class SignConfig(UpdateConfig):
    """The sign of an average."""

    beta: float = 0.9
    """Decay of the average."""

    def problems(self) -> list[Problem]:
        return self.shared_problems(beta=self.beta)

    def build(self, declared: Any, plan: Any = None, width: float = 1.0) -> RuleOptimizer:
        return RuleOptimizer(self, declared, dict.fromkeys(declared, SignOfAverage(self.beta, self.beta)), width)


def test_a_config_names_a_class_of_the_user() -> None:
    cfg = load("quickstart.py", f"optimizer.type={FILE}:SignConfig", "optimizer.beta=0.8", "parallel.data=1")
    program = Program.of(cfg, build_mesh(cfg.parallel))
    assert cfg.optimizer.name() == "Sign" and cfg.optimizer.beta == 0.8
    assert set(program.state_like().optimizer["momentum"]) == set(program.declared)


def test_its_settings_are_checked() -> None:
    with user_error("optimizer.beta", kind=ConfigError):
        load("quickstart.py", f"optimizer.type={FILE}:SignConfig", "optimizer.beta=2")
    with user_error("optimizer.type", kind=ConfigError):
        load("quickstart.py", "optimizer.type=megajax.metrics.config:ProfileConfig")
