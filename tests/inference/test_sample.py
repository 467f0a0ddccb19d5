"""At its end, a run shows the sample named by its model's config."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from megajax.config import load
from megajax.inference.sample_outputs import SAMPLERS, TrainedRun, sample

pytestmark = pytest.mark.smoke


@dataclass(frozen=True)
class Named:
    """A model's config, as far as samples read it."""

    function: str | None

    def sampler(self) -> str | None:
        return self.function


def run_of(model: Named) -> SimpleNamespace:
    return SimpleNamespace(cfg=SimpleNamespace(model=model), parts=None)


def shown(run: TrainedRun, folder: Path) -> str:
    return f"{run.cfg.model.function.rpartition(':')[2]} in {folder.name}"


def test_the_model_s_own_function_is_called(tmp_path: Path) -> None:
    assert sample(run_of(Named(f"{__name__}:shown")), tmp_path) == f"shown in {tmp_path.name}"


def test_a_model_without_one_shows_nothing(tmp_path: Path) -> None:
    assert sample(run_of(Named(None)), tmp_path) is None


@pytest.mark.parametrize("name", ["bert.py", "gpt3.py", "llava.py", "t5.py", "vit.py"])
def test_the_samplers_of_shipped_configs_exist(name: str) -> None:
    assert callable(SAMPLERS[load(f"{name}:debug").model.sampler()])
