"""Values by annotation: accepted and refused values for each kind of field."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from user_errors import user_error

from megajax.config import ConfigError
from megajax.config.compose import override
from megajax.config.field_types import kind_text
from megajax.config.hints import did_you_mean, nearest_divisors, nearest_names

ALIASES = "[&a [x, x], " + ", ".join(f"&{n} [*{p}, *{p}, *{p}, *{p}, *{p}]" for p, n in pairwise("abcdefgh")) + "]"
"""A line whose aliases expand to more values than are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    whole: int = 0
    number: float = 0.0
    switch: bool = False
    text: str = ""
    maybe: int | None = 3
    maybe_text: str | None = "x"
    choice: Literal["full", "selective", "none"] = "full"
    size: Literal[1, 2, 4] = 1
    pair: tuple[float, float] = (0.0, 0.0)
    names: tuple[str, ...] = ("a",)
    nested: tuple[tuple[int, int], ...] = ()
    as_list: list[int] = field(default_factory=list)
    weights: Mapping[str, float] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    path: Path = Path()
    mixed: int | str | None = None
    auto: Literal["auto"] | int = "auto"
    one_or_many: str | tuple[str, ...] = ""
    parts: Literal["none", "all"] | tuple[Literal["first", "second"], ...] = "all"
    anything: Any = None


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("whole=12", 12),
        ("parts=none", "none"),
        ("parts=second", ("second",)),
        ("parts=first,second", ("first", "second")),
        ("whole=1e3", 1000),
        ("whole=2.5k", 2500),
        ("whole=4Ki", 4096),
        ("whole=1.5Mi", 3 * 2**19),
        ("whole=9007199254740993", 9007199254740993),
        ("number=1e-4", 1e-4),
        ("number=inf", math.inf),
        ("switch=true", True),
        ("switch", True),
        ("switch=no", False),
        ("text=none", "none"),
        ("text=", ""),
        ("text=1e3", "1e3"),
        ("text=a=b,c", "a=b,c"),
        ("maybe=none", None),
        ("maybe_text=none", None),
        ("choice=none", "none"),
        ("choice=Selective", "selective"),
        ("size=4", 4),
        ("pair=0.9,0.95", (0.9, 0.95)),
        ("pair=[0.9, 1e-1]", (0.9, 0.1)),
        ("names=/a, /b", ("/a", "/b")),
        ("names=", ()),
        ('names=["a,b", c]', ("a,b", "c")),
        ("nested=[[0, 32], [1k, 64]]", ((0, 32), (1000, 64))),
        ("as_list=1,2", [1, 2]),
        ("weights=/a=0.3,/b/x=1/c=0.7", {"/a": 0.3, "/b/x=1/c": 0.7}),
        ("weights={/a: 1e-1}", {"/a": 0.1}),
        ("environment=A=b=c", {"A": "b=c"}),
        ("path=/tmp/x", Path("/tmp/x")),
        ("path=~/x", Path.home() / "x"),
        ("mixed=3", 3),
        ("one_or_many=a", "a"),
        ("one_or_many=a,b", ("a", "b")),
        ("anything=[1, x]", [1, "x"]),
    ],
)
def test_reads(setting, value):
    actual = getattr(override(Values(), setting), setting.partition("=")[0])
    assert actual == value
    assert type(actual) is type(value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("parts=al", "one of none, all or a list (each one of first, second), got 'al'"),
        ("parts=secnd", "did you mean second?"),
        ("parts=first,al", "parts.1: expected one of first, second, got 'al'"),
        ("whole=1.5", "whole: expected a whole number, got '1.5'"),
        ("whole=1e999", "expected a whole number"),
        ("whole=3q", "suffixes are k, K, M, B, T, Ki, Mi, Gi, Ti"),
        ("whole", "needs a value"),
        ("number=fast", "expected a number, got 'fast'"),
        ("number=nan", "nan compares unequal"),
        ("switch=2", "expected true or false, got '2'"),
        ("choice=selectve", "did you mean selective?"),
        ("size=3", "expected one of 1, 2, 4, got '3'"),
        ("pair=0.9", "pair: expected 2 values (a number, a number), got 1"),
        ("pair=0.9,x", "pair.1: expected a number, got 'x'"),
        ("names=[a", "the brackets do not match up"),
        ("names=" + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("names=[" + "9" * 5000 + "]", "a number of 5000 characters"),
        ("names=[{a: 1, a: 2}]", "a is given twice"),
        (f"names={ALIASES}", "entries, at most 100,000 are read"),
        ("anything=" + "[" * 3000, "nested too deeply"),
        ("weights=/a", "expected name=value pairs"),
        ("weights=/a=x", "weights./a: expected a number, got 'x'"),
        ("auto=fast", "expected auto or a whole number, got 'fast'"),
        ("whole.x=3", "whole is one value: a whole number"),
    ],
)
def test_refuses(setting, message):
    with pytest.raises(ConfigError) as error:
        override(Values(), setting)
    assert message in str(error.value)
    assert len(error.value.problems) == 1


def test_values_set_in_python_are_checked_and_converted():
    fixed = override(Values(names=["a", "b"], path="x", number=1))
    assert (fixed.names, fixed.path, fixed.number) == (("a", "b"), Path("x"), 1.0)
    with pytest.raises(ConfigError) as error:
        override(Values(whole="abc", text=5, switch=3))
    assert [problem.setting for problem in error.value.problems] == ["whole", "switch", "text"]
    assert "put it in quotes" in str(error.value)


def test_nearest_divisors():
    assert nearest_divisors(768, 7) == [6, 8]
    assert nearest_divisors(768, 8) == [8]
    assert nearest_divisors(7, 100) == [7]
    assert nearest_divisors(1, 0) == [1]
    for n in range(1, 60):
        divisors = [d for d in range(1, n + 1) if n % d == 0]
        for target in range(0, n + 3):
            below, above = [d for d in divisors if d <= target], [d for d in divisors if d >= target]
            assert nearest_divisors(n, target) == sorted({*below[-1:], *above[:1]})


def test_nearest_names():
    names = ["parallel.tensor", "parallel.data", "optimizer.clip", "steps"]
    assert nearest_names("paralel.tensor", names) == ["parallel.tensor"]
    assert nearest_names("tensor", names) == ["parallel.tensor"]
    assert nearest_names("grad_clip", names) == ["optimizer.clip"]
    assert nearest_names("zzz", names) == []
    assert did_you_mean("step", names) == "did you mean steps?"


def test_a_tuple_instead_of_text_gets_the_text_as_hint():
    with user_error("text", kind=ConfigError):
        override(Values(text=(90, 5, 5)))


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (Any, "anything"),
        (Mapping[str, Any], "name=value pairs (each value anything)"),
        (int | None, "a whole number or none"),
        (tuple[str, ...], "a list (each text)"),
    ],
)
def test_kinds_are_described_in_words(annotation, text):
    assert kind_text(annotation) == text
