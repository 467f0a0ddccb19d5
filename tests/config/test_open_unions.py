"""A user's own dataclass in a union with a protocol: built in Python, chosen by `type`, overridden, reloaded."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import pytest
from config_samples import AdamWConfig, GuardConfig, MuonConfig
from user_errors import user_error

from megajax.command_line.help import settings_help
from megajax.config import ConfigError, Problem, load
from megajax.config.compose import override
from megajax.config.dump import diff_from_defaults, flatten, to_yaml
from megajax.config.field_types import example


class ModelProtocol(Protocol):
    @property
    def hidden(self) -> int: ...

    def build(self) -> object: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    hidden: int = 64
    """Width."""

    def build(self) -> object:
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenRun:
    model: DecoderConfig | ModelProtocol = DecoderConfig()
    """Open, with one member of MegaJAX."""
    blocks: tuple[AdamWConfig | MuonConfig | ModelProtocol, ...] = ()
    """A list with open entries."""
    only: ModelProtocol | None = None
    """Open, without a member of MegaJAX."""
    named: Mapping[str, GuardConfig | ModelProtocol] = field(default_factory=dict)
    """A mapping with open values."""
    closed: AdamWConfig | MuonConfig = field(default_factory=AdamWConfig)
    """A union that is not open."""


OWN = """
from __future__ import annotations

from dataclasses import dataclass

from megajax.config import Problem
from own_parts import TailConfig

@dataclass(frozen=True)
class TinyConfig:
    hidden: int = 8
    \"\"\"Width of the tiny model.\"\"\"
    tail: TailConfig | None = None

    def build(self):
        return "tiny"

    def problems(self):
        return [Problem("hidden", f"must be even, got {self.hidden}")] if self.hidden % 2 else []

def config():
    from test_open_unions import OpenRun
    return OpenRun(model=TinyConfig(hidden=16), blocks=(TinyConfig(), TailConfig()))

class Place:
    @dataclass(frozen=True)
    class InnerConfig(TinyConfig):
        pass
"""
PARTS = """
from __future__ import annotations

from dataclasses import dataclass

@dataclass(frozen=True)
class TailConfig:
    hidden: int = 2
    sizes: tuple[int, ...] = (1, 2)

    def build(self):
        return "tail"
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "own_parts.py").write_text(PARTS)
    return tmp_path


def run(source="own.py", *settings):
    return load(source, *settings, root=OpenRun)


def problems(*settings, config=None):
    with pytest.raises(ConfigError) as error:
        override(OpenRun() if config is None else config, *settings)
    return {problem.setting: problem for problem in error.value.problems}


def test_overrides_follow_the_fields_of_the_users_class(own):
    cfg = run("own.py", "model.hidden=1_0", "blocks.1.sizes=3,4", "model.tail={hidden: 6}")
    assert (cfg.model.hidden, cfg.model.tail.hidden, cfg.blocks[1].sizes) == (10, 6, (3, 4))
    assert cfg.model.build() == "tiny"
    errors = problems("model.hiden=1", "model.tail.hidden=x", config=run("own.py", "model.tail={}"))
    assert errors["model.hiden"].hint.startswith("did you mean model.hidden")
    assert errors["model.tail.hidden"].message == "expected a whole number, got 'x'"
    assert problems("model.hidden=3", config=run()) == {"model.hidden": Problem("model.hidden", "must be even, got 3")}


def test_a_dump_names_the_class_and_loads_back_equal_in_any_folder(own, monkeypatch):
    cfg = run()
    assert flatten(cfg)["model.type"] == f"{own}/own.py:TinyConfig"
    assert "model.hidden: 8 -> 16" in diff_from_defaults(cfg)
    elsewhere = own / "run"
    elsewhere.mkdir()
    (elsewhere / "config.yaml").write_text(to_yaml(cfg))
    monkeypatch.chdir(elsewhere)
    reloaded = run("config.yaml")
    assert to_yaml(reloaded) == to_yaml(cfg)
    assert reloaded == cfg and type(reloaded.model) is type(cfg.model), "an unchanged file is not run a second time"
    (own / "own.py").write_text(OWN.replace("hidden: int = 8", "hidden: int = 12\n    depth: int = 2"))
    assert run("config.yaml").model.depth == 2
    (own / "own.py").unlink()
    with user_error(kind=ConfigError):
        run("config.yaml")


def test_the_class_is_chosen_by_its_file_or_module(own):
    for reference in ("own.py:TinyConfig", "own.py:Place.InnerConfig"):
        cfg = override(OpenRun(), f"model.type={reference}", "model.hidden=4", f"only={reference}")
        assert (cfg.model.build(), cfg.model.hidden, cfg.only.hidden) == ("tiny", 4, 8)
    (own / "config.yaml").write_text(
        "model: {type: own.py:TinyConfig, hidden: 6}\nnamed: {a: {type: own.py:TinyConfig}}"
    )
    cfg = run("config.yaml", "named.a.hidden=2")
    assert (cfg.model.hidden, cfg.named["a"].hidden) == (6, 2)
    assert override(cfg, "model.type=Decoder").model == DecoderConfig()
    assert override(OpenRun(), "model.hidden=4").model == DecoderConfig(hidden=4), "ours needs no type"
    assert "model.type" not in flatten(OpenRun())


def test_help_shows_the_users_class_with_its_docstrings(own):
    text = settings_help(OpenRun, run(), "model")
    assert "--model.type" in text and "= TinyConfig" in text and "Width of the tiny model." in text
    assert "--model.hidden" in settings_help(OpenRun)


@dataclass
class Changeable:
    hidden: int = 1

    def build(self) -> object:
        return self


@dataclass(frozen=True)
class WithoutBuild:
    hidden: int = 1


@dataclass(frozen=True)
class WithType(DecoderConfig):
    type: str = ""


def test_refusals_give_the_reason():
    module = sys.modules[__name__].__name__
    errors = problems(
        f"model.type={module}:Changeable",
        f"only.type={module}:WithoutBuild",
        f"closed.type={module}:WithoutBuild",
        f"blocks={module}:WithType,{module}:nothing",
    )
    assert errors["model.type"].message == "Changeable could be changed after its check: write @dataclass(frozen=True)"
    assert errors["only.type"].message == "WithoutBuild lacks build"
    assert errors["closed.type"].message.startswith("expected AdamWConfig or MuonConfig, got the class WithoutBuild")
    assert errors["blocks.0.type"].message.startswith("WithType has a field 'type'")
    assert "has no attribute 'nothing'" in errors["blocks.1.type"].message
    assert problems(config=OpenRun(model=WithoutBuild()))["model"] == Problem("model", "WithoutBuild lacks build")
    assert example("0", AdamWConfig).startswith("write AdamWConfig("), "an entry of a list has no name to write"
    message = problems("only.type=Tiny")["only.type"].message
    assert message == "expected module:Class of your own frozen dataclass with build, hidden, got 'Tiny'"
    assert "add --only.type=module:Class" in problems("only.hidden=2")["only"].hint
