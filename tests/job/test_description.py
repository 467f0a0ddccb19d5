"""The size of the banner, and what it says of a run's layers."""

import jax
import pytest

from megajax.config import load
from megajax.display.banner import plain
from megajax.job.banner import banner
from megajax.job.description import describe
from megajax.job.notebook import set_up


@pytest.mark.parametrize(
    ("config", "experts", "sections"),
    [
        pytest.param("deepseek.py:debug", 1, [""], marks=pytest.mark.slow),
        ("gpt3.py:debug", 0, [""]),
        pytest.param("t5.py:debug", 0, ["encoder", ""], marks=pytest.mark.slow),
    ],
)
def test_equal_expert_layers_and_every_section_have_one_line(config: str, experts: int, sections: list[str]) -> None:
    run = set_up(load(config, "evaluation.every=none"), devices=jax.devices()[:8])
    description = describe(run.parts)
    content = banner(run, description, "new run")
    assert len(plain("MegaJAX", content).splitlines()) <= 25
    lines = [row for _, rows in content for row in rows]
    run.close()
    assert len(description.mixtures) == experts == len([text for name, text in lines if "experts on a device" in text])
    assert list(description.saved) == sections
    assert len([name for name, _ in lines if name == "saved by a layer"]) == len(sections)
