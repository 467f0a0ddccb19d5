"""A user's own optimizer class works like the library's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megajax.config import load
from megajax.config.errors import ConfigError, Problem
from megajax.mesh.mesh import build_mesh
from megajax.optim.config import UpdateConfig
from megajax.optim.optimizer import RuleOptimizer, SignOfAverage
from megajax.training.program import Program

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
    with pytest.raises(ConfigError, match=r"optimizer\.beta: must be at least 0 and below 1, got 2"):
        load("quickstart.py", f"optimizer.type={FILE}:SignConfig", "optimizer.beta=2")
    with pytest.raises(ConfigError, match="optimizer"):
        load("quickstart.py", "optimizer.type=megajax.metrics.config:ProfileConfig")
