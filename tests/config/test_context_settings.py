"""Invalid settings of context parallelism, with both values and the nearest valid ones; see also test_run_config.py."""

import re
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import pytest

from megajax.config import load
from megajax.config.class_references import Builds
from megajax.config.compose import problems_of
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.training.run_config import RunConfig


def run(**parallel) -> RunConfig:
    cfg = load("quickstart.py", "parallel.data=1")
    return cfg.but(parallel=replace(cfg.parallel, **parallel))


def of_length(length: int, **parallel) -> RunConfig:
    cfg = run(**parallel)
    return cfg.but(model=replace(cfg.model, sequence_length=length))


def said(cfg: RunConfig) -> dict[str, str]:
    return {problem.setting: f"{problem.message} | {problem.hint}" for problem in cfg.problems(8)}


@pytest.mark.parametrize(
    ("length", "sizes", "setting", "message", "hint"),
    [
        (126, {"context": 2}, "context", "are not divisible by 4: parallel.context=2, 2 chunks", "124 or 128 pos"),
        (3, {"context": 2}, "context", "rows of 3 positions (tokens)", "use rows of 4 positions"),
        (132, {"context": 2, "tensor": 4, "sequence": True}, "context",
         "by 8: parallel.context=2, 2 chunks on each, parallel.tensor=4 with parallel.sequence=true",
         "use rows of 128 or 136 positions"),
        (128, {"context": 4, "context_rounds": 3}, "context_rounds",
         "by 24: parallel.context=4, 6 chunks on each, parallel.context_rounds=3",
         "use rows of 120 or 144 positions (model.sequence_length), or parallel.context_rounds=2 or 4"),
        (128, {"context": 2, "context_rounds": 100}, "context_rounds", "by 400", "or parallel.context_rounds=32"),
    ],
)  # fmt: skip
def test_rows_without_equal_chunks(length, sizes, setting, message, hint) -> None:
    ((name, text),) = said(of_length(length, **sizes)).items()
    assert name == f"parallel.{setting}"
    assert message in text.partition(" | ")[0] and hint in text.partition(" | ")[2]


@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        (132, {"context": 2, "tensor": 2, "sequence": True}),
        (128, {"context": 2, "context_rounds": 32}),
        (126, {"context": 1, "context_rounds": 5, "context_strategy": "ring+all_to_all"}),
    ],
)
def test_rows_with_equal_chunks(length, sizes) -> None:
    assert said(of_length(length, **sizes)) == {}


@pytest.mark.parametrize(
    ("sizes", "setting", "message"),
    [
        ({"context": 0}, "context", "must be at least 1, got 0"),
        ({"context": 4, "context_rounds": 0}, "context_rounds", "must be at least 1, got 0"),
        ({"context": 4, "context_heads": 0}, "context_heads", "must be at least 1, got 0"),
        ({"context": 8, "context_heads": 3}, "context_heads", "groups of 3 .* parallel.context=8 .* use 2 or 4"),
        ({"context": 2, "context_heads": 3}, "context_heads", "use context_strategy=ring or all_to_all"),
    ],
)  # fmt: skip
def test_invalid_context_settings(sizes, setting, message) -> None:
    (problem,) = problems_of(ParallelConfig(context_strategy="ring+all_to_all", **sizes))
    assert problem.setting == setting
    assert re.search(message, f"{problem.message} | {problem.hint}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SeesLater(DecoderConfig):
    """A bidirectional model whose rows may be sharded."""

    def ignores_later_positions(self) -> bool:
        return False

    def allows_context(self) -> bool:
        return True


def test_bidirectional_models() -> None:
    """They have plain chunks without balancing rounds."""
    cfg = of_length(126, context=2)
    names = [field.name for field in fields(DecoderConfig)]
    model = SeesLater(**{name: getattr(cfg.model, name) for name in names})
    assert said(cfg.but(model=model)) == {}
    cfg = cfg.but(model=model, parallel=replace(cfg.parallel, context_rounds=4))
    (text,) = said(cfg).values()
    assert "4 rounds balance the work of causal models" in text and "| set it to 1" in text


def test_a_model_that_needs_whole_rows() -> None:
    cfg = load("vit.py:debug", "parallel.data=1")
    text = said(cfg.but(parallel=replace(cfg.parallel, context=2)))["parallel.context"]
    assert "ViTConfig needs whole rows, and parallel.context=2 cuts them" in text


@dataclass(frozen=True, kw_only=True)
class OwnMixerConfig(Builds):
    """A user's mixer, which may read other positions."""

    target: ClassVar[str] = "own.py:OwnMixer"


def test_a_users_mixer_in_a_decoder() -> None:
    """It needs whole rows unless it declares otherwise; otherwise it could silently train wrongly."""

    class Allowing(OwnMixerConfig):
        def allows_context(self) -> bool:
            return True

    def with_mixer(mixer: Builds) -> RunConfig:
        cfg = of_length(128, context=2)
        (block,) = cfg.model.stack.pattern
        stack = replace(cfg.model.stack, pattern=(block, replace(block, mixer=mixer)))
        return cfg.but(model=replace(cfg.model, stack=stack))

    text = said(with_mixer(OwnMixerConfig()))["parallel.context"]
    assert "OwnMixerConfig (model.stack.pattern.1.mixer) needs whole rows, and parallel.context=2 cuts them" in text
    assert said(with_mixer(Allowing())) == {}
