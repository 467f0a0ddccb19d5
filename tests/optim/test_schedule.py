"""The learning rate, point by point."""

from math import cos, pi

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.optim.config import ScheduleConfig
from megajax.optim.schedule import Schedule

STEPS, SIZE = 100, 8


def schedule(**settings) -> Schedule:
    return ScheduleConfig(**{"lr": 1e-3, "min_lr": 1e-4} | settings).build(steps=STEPS, global_size=SIZE)


def test_the_first_update_is_at_warmup_start():
    assert schedule(warmup_steps=10).at(0) == 0
    assert schedule(warmup_steps=10, warmup_start=1e-5).at(0) == 1e-5
    assert schedule().at(0) == 1e-3


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_warm_up_rises_in_a_line_and_ends_at_lr(style):
    lr = schedule(style=style, warmup_steps=10, warmup_start=2e-4)
    np.testing.assert_allclose([lr.at(n * SIZE) for n in range(11)], np.linspace(2e-4, 1e-3, 11), rtol=1e-12)


@pytest.mark.parametrize(
    ("style", "shape"), [("linear", lambda t: 1 - t), ("cosine", lambda t: 0.5 * (1 + cos(pi * t))), ("constant", None)]
)
def test_decay_from_the_end_of_the_warm_up(style, shape):
    lr = schedule(style=style, warmup_steps=20)
    for step in (20, 21, 60, 99, 100):
        share = 1.0 if shape is None else shape((step - 20) / 80)
        expected = 1e-3 if shape is None else 1e-4 + 9e-4 * share
        assert lr.at(step * SIZE) == pytest.approx(expected, rel=1e-12)
    for after in (100 * SIZE + 1, 10**6):
        assert lr.at(after) == (1e-3 if shape is None else 1e-4)


@pytest.mark.parametrize(
    ("settings", "warmup", "decay"),
    [
        ({"warmup_steps": 5}, 40, 800),
        ({"warmup_samples": 30, "decay_samples": 500}, 30, 500),
        ({"warmup_fraction": 0.1, "decay_steps": 50}, 40, 400),
        ({}, 0, 800),
    ],
)
def test_lengths_are_counted_in_samples(settings, warmup, decay):
    lr = schedule(**settings)
    assert (lr.warmup, lr.decay) == (warmup, decay)
    assert lr.at(warmup) == 1e-3
    assert lr.at(decay) == pytest.approx(1e-4)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_on_the_device_as_on_the_host(style):
    lr = schedule(style=style, warmup_steps=7, warmup_start=1e-5)
    samples = np.array([0, 1, 55, 56, 57, 400, 799, 800, 801, 5000], np.int32)
    found = jax.jit(jax.vmap(lr))(samples)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, [lr.at(n) for n in samples.tolist()], rtol=1e-5)


def test_no_length_divides_by_zero():
    for settings in ({}, {"warmup_samples": 0}, {"warmup_fraction": 0.0}):
        lr = ScheduleConfig(lr=1e-3, **settings).build(steps=0, global_size=SIZE)
        assert np.isfinite([lr.at(0), lr.at(1), float(lr(jnp.int32(0)))]).all()


@pytest.mark.parametrize(
    ("settings", "where", "what"),
    [
        ({"warmup_steps": 1, "warmup_samples": 1}, "warmup_samples", "warmup_steps and warmup_samples are both given"),
        ({"decay_steps": 9, "decay_samples": 9}, "decay_samples", "decay_steps and decay_samples are both given"),
        ({"min_lr": 1.0}, "min_lr", "min_lr=1.0 is above lr=0.0003"),
        ({"lr": -1.0, "min_lr": -1.0}, "lr", "must be a number from 0 up"),
        ({"warmup_steps": -1}, "warmup_steps", "must be a number from 0 up"),
        ({"warmup_fraction": 1.5}, "warmup_fraction", "must be between 0 and 1, got 1.5"),
    ],
)
def test_problems(settings, where, what):
    problem = ScheduleConfig(**settings).problems()[0]
    assert problem.where == where
    assert what in problem.what


def test_a_warm_up_as_long_as_the_decay_is_refused():
    cfg = ScheduleConfig(warmup_steps=100)
    (problem,) = cfg.run_problems(steps=STEPS, global_size=SIZE)
    assert str(problem).startswith("decay_steps: the decay ends after 800 samples, the warm-up after 800")
    assert cfg.run_problems(steps=101, global_size=SIZE) == []
    assert ScheduleConfig().run_problems(steps=0, global_size=SIZE) == []
