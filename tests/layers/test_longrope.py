"""LongRoPE: frequencies and magnitude by the formula of the paper, for short and for long texts."""

from dataclasses import replace
from math import log, sqrt

import numpy as np
import pytest

from megajax.layers.position.config import LongRopeScalingConfig, RopeConfig
from megajax.layers.position.module import Rope

SCALING = LongRopeScalingConfig(short=(1.0, 1.5), long=(2.0, 7.0), original=16, factor=4.0)


@pytest.mark.parametrize(("length", "divisors"), [(None, (1.0, 1.5)), (16, (1.0, 1.5)), (17, (2.0, 7.0))])
def test_a_model_has_the_divisors_of_its_length(length: int | None, divisors: tuple[float, ...]) -> None:
    rope = Rope(RopeConfig(base=100.0, scaling=SCALING), 4, length)
    np.testing.assert_allclose(rope.frequencies(), [1 / divisors[0], 0.1 / divisors[1]], rtol=1e-12)


def test_magnitudes() -> None:
    assert SCALING.magnitude() == sqrt(1 + log(4.0) / log(16))
    assert replace(SCALING, factor=1.0).magnitude() == 1 and replace(SCALING, attention=1.2).magnitude() == 1.2


def test_a_wrong_number_of_divisors_is_a_problem() -> None:
    (problem,) = RopeConfig(scaling=SCALING).head_problems(8)
    assert str(problem).startswith("rope.scaling.short: has 2 divisors for 4 frequencies of a head")
    (problem,) = replace(SCALING, long=(1.0,)).problems()
    assert "got 2 and 1 numbers" in str(problem)
