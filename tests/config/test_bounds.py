"""Bounds that fields declare: of unions, of fields declared again, of rules of one's own."""

from dataclasses import dataclass
from typing import Annotated

import pytest

import megajax as mj
from megajax.config.bounds import Bounds, Count, Share
from megajax.config.compose import override, problems_of
from megajax.config.errors import ConfigError

pytestmark = pytest.mark.smoke


class Even:
    """A rule without a hint, which fails on none."""

    def words(self) -> str:
        return "even"

    def error(self, value: object) -> str:
        return f"must be even, got {value}" if value % 2 else ""  # ty: ignore[unsupported-operator]


@dataclass(frozen=True, kw_only=True)
class Wide(mj.AdamWConfig):
    """Declares two fields of AdamW again: one without bounds, one with its own."""

    epsilon: float = 1e-6
    beta1: Annotated[float, Bounds(at_least=0, below=1)] = 0.5
    clip: Annotated[float | None, Bounds(at_least=-1)] = 0.5


@dataclass(frozen=True, kw_only=True)
class Own:
    """A config class of a user."""

    rows: Count | Share = 1
    pairs: Annotated[int, Even()] = 2
    maybe: Annotated[int | None, Even()] = 2


def faults(config: object, *settings: str) -> list[str]:
    try:
        override(config, *settings)
    except ConfigError as error:
        return [f"{problem.setting}: {problem.message}" for problem in error.problems]
    return []


def test_a_field_that_is_declared_again_without_bounds_keeps_them() -> None:
    assert faults(Wide(), "epsilon=-1") == ["epsilon: must be above 0, got -1"]
    assert not faults(Wide(), "clip=-1") and faults(Wide(), "clip=-2") == ["clip: must be at least -1, got -2"]


@pytest.mark.parametrize("rows", ["1", "5", "0.5", "0"])
def test_one_member_of_a_union_has_to_accept_a_number(rows: str) -> None:
    assert not faults(Own(), f"rows={rows}")


def test_a_number_that_no_member_accepts() -> None:
    assert faults(Own(), "rows=-1") == ["rows: must be at least 1, got -1"]
    assert faults(Own(), "rows=1.5") == ["rows: must be between 0 and 1, got 1.5"]


def test_a_rule_of_ones_own() -> None:
    assert faults(Own(), "pairs=3") == ["pairs: must be even, got 3"] and not faults(Own(), "pairs=4")
    assert faults(Own(), "maybe=none")[0].startswith("maybe: its settings cannot be checked: TypeError")


def test_an_integer_of_thousands_of_digits_is_one_problem() -> None:
    (problem,) = problems_of(Own(rows=-(10**5000)))
    assert problem.message == "must be at least 1, got an integer of 16610 bits"
