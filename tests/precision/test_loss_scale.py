"""The loss scale by Megatron-LM's rule, and a float16 run that finds its scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import LENGTH, ONE, ROWS, build_program, llama

from megajax.config.compose import problems_of
from megajax.precision.config import ConstantScaleConfig, DynamicScaleConfig, PrecisionConfig
from megajax.precision.loss_scale import DynamicScale, in_range


def follow(scaler, finite: list[bool]) -> list[tuple[float, int, int]]:
    """(scale, steps without overflow, overflows left) after each step."""
    scale, counters = scaler.start()
    rows = []
    for is_finite in finite:
        scale, counters = jax.jit(scaler.update)(scale, counters, jnp.array(is_finite, bool))
        rows.append((float(scale), *np.asarray(counters).tolist()))
    return rows


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("scaler", "finite", "expected"),
    [
        # The first overflow is tolerated and the next one halves; growth alone restores the tolerance; the floor stops.
        ((16.0, 1.0, 100, 2), [0, 0, 1, 0], [(16, 0, 1), (8, 0, 0), (8, 1, 0), (4, 0, -1)]),
        ((16.0, 1.0, 3, 2), [0, 1, 1, 1, 0], [(16, 0, 1), (16, 1, 1), (16, 2, 1), (32, 0, 2), (32, 0, 1)]),
        ((4.0, 2.0, 3, 1), [0, 0, 0], [(2, 0, 0), (2, 0, -1), (2, 0, -2)]),
    ],
)
def test_the_scale_after_each_step(scaler, finite, expected):
    assert follow(DynamicScale(*scaler), finite) == expected


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (DynamicScaleConfig(window=0), "window"),
        (DynamicScaleConfig(hysteresis=0), "hysteresis"),
        (DynamicScaleConfig(initial=1.0, floor=2.0), "floor"),
        (ConstantScaleConfig(value=0.0), "value"),
        (PrecisionConfig(compute="float16", gradients="bfloat16"), "gradients"),
    ],
)
def test_invalid_scales_are_refused(config, setting):
    assert [problem.setting for problem in problems_of(config)] == [setting]


def test_scales_are_for_gradients_of_a_mean():
    """A float16 step of many tokens overflows where the gradient of their mean does, not of the sum."""
    assert [in_range(weight) for weight in (1, 2, 3, 2047, 2048)] == [1, 1 / 2, 1 / 2, 1 / 1024, 1 / 2048]
    by_tokens, mean = (build_program(llama(), ONE, microbatches=4, average=a) for a in ("tokens", "microbatches"))
    assert by_tokens._weight(by_tokens.batch_like()) == ROWS * LENGTH and mean._weight(mean.batch_like()) == 4
