"""The learning rate, point by point."""

from fractions import Fraction
from math import expm1, log, pi, sin, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.optim.config import ScheduleConfig
from megajax.optim.groups import ParameterGroup
from megajax.optim.schedule import RateSchedule

STEPS, SIZE = 100, 8


def lr_at(schedule: RateSchedule, samples: int, **rates: float) -> float:
    return float(schedule(jnp.int32(samples), **rates))


def schedule(**settings) -> RateSchedule:
    return ScheduleConfig(**{"lr": 1e-3, "min_lr": 1e-4} | settings).build(steps=STEPS, global_size=SIZE)


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
    assert lr_at(lr, warmup) == pytest.approx(1e-3)
    assert lr_at(lr, decay) == pytest.approx(1e-4)


SETTINGS = [
    {"style": "constant"},
    {"style": "linear"},
    {"style": "cosine"},
    {"style": "cosine", "min_lr": 0.0},
    {"style": "linear", "min_lr": 0.0},
    {"style": "inverse_square_root"},
    {"style": "inverse_square_root", "warmup_steps": None},
    {"style": "wsd", "anneal_steps": 30},
    {"style": "wsd", "anneal_samples": 777, "anneal_style": "linear", "min_lr": 0.0},
    {"style": "wsd", "anneal_steps": 30, "anneal_style": "cosine", "min_lr": 0.0},
    {"style": "wsd", "anneal_steps": 30, "anneal_style": "minus_sqrt", "min_lr": 0.0},
    {"style": "wsd", "anneal_steps": 30, "anneal_style": "exponential", "min_lr": 0.0},
    {"style": "cosine", "warmup_steps": None, "warmup_fraction": 1 / 3},
]


@pytest.mark.parametrize("steps", [100, 10**5, 10**8])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_device_and_the_host_agree(settings, steps):
    """Relative to the rate itself, to the last sample of the decay: nothing cancels in float32."""
    lr = ScheduleConfig(**{"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 7, "warmup_start": 1e-5} | settings).build(
        steps=steps, global_size=SIZE
    )
    end, edges = steps * SIZE, [round(lr.warmup), round(lr.falls_from)]
    neighbours = [edge + by for edge in (*edges, end) for by in (-2, -1, 0, 1, 2)]
    samples = np.array([n for n in [0, 1, 55, 57, end // 2, end * 5, *neighbours] if 0 <= n < 2**31], np.int32)
    rates = np.asarray(jax.jit(jax.vmap(lr))(samples))
    assert rates.dtype == np.float32
    exact = np.array([exactly(lr, n) for n in samples.tolist()])
    np.testing.assert_allclose(rates, exact, rtol=1e-6, atol=0)


def exactly(schedule: RateSchedule, n: int) -> float:
    """The definition with rational fractions; the remaining fraction is never computed from a rounded one."""
    cfg, warmup, decay = schedule.cfg, Fraction(schedule.warmup), Fraction(schedule.decay)
    if 0 < warmup >= n:
        return cfg.warmup_start + (cfg.lr - cfg.warmup_start) * float(n / warmup)
    if cfg.style == "constant":
        return cfg.lr
    if n > decay:
        return cfg.min_lr
    if cfg.style == "inverse_square_root":
        return max(cfg.min_lr, cfg.lr * sqrt(max(warmup, 1) / max(n, 1)))
    first = Fraction(schedule.falls_from) if cfg.style == "wsd" else warmup
    remaining = min(1 - (n - first) / (decay - first), Fraction(1))
    share = {
        "linear": float(remaining),
        "cosine": sin(pi / 2 * float(remaining)) ** 2,
        "exponential": expm1(float(remaining) * log(2)),
        "minus_sqrt": float(remaining) / (1 + sqrt(1 - remaining)),
    }[cfg.anneal_style if cfg.style == "wsd" else cfg.style]
    return cfg.min_lr + share * (cfg.lr - cfg.min_lr)


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_weight_decay_increases_over_the_run(style):
    rising = schedule(weight_decay_start=0.01, weight_decay_style=style)
    samples = np.array([0, 1, 200, 400, 799, 800, 801, 5000], np.int32)
    share = np.minimum(samples / 800, 1)
    exact = 0.01 + 0.09 * (share if style == "linear" else np.sin(np.pi / 2 * share) ** 2)
    np.testing.assert_allclose(jax.jit(jax.vmap(lambda n: rising.weight_decay(n, 0.1)))(samples), exact, rtol=1e-6)
    assert schedule().weight_decay(jnp.int32(400), 0.1) == np.float32(0.1)
    quick = schedule(weight_decay_start=0.0, weight_decay_steps=10)
    assert float(quick.weight_decay(jnp.int32(40), 0.1)) == pytest.approx(0.05)


def test_groups_have_their_own_highest_and_lowest_rate():
    lr = schedule(style="linear", warmup_steps=50)
    assert lr_at(lr, 75 * SIZE, lr=4e-3, min_lr=2e-3) == pytest.approx(3e-3, rel=1e-6)
    assert lr_at(lr, 25 * SIZE, lr=4e-3) == pytest.approx(2e-3, rel=1e-6)
    rates = lr(jnp.int32(75 * SIZE), lr=4e-3, min_lr=2e-3)
    np.testing.assert_allclose(rates, 3e-3, rtol=1e-6)
    rate, decay = lr.rates(
        jnp.int32(75 * SIZE), 0.1, ParameterGroup(lr=4e-3, min_lr=2e-3, lr_multiplier=0.5, decay=3.0)
    )
    np.testing.assert_allclose([rate, decay], [1.5e-3, 0.3], rtol=1e-6)


def test_steps_become_samples_by_the_rows_that_the_steps_read():
    """The first 10 steps have 4 rows, the others 8."""
    cfg = ScheduleConfig(lr=1e-3, warmup_steps=20, style="linear")
    lr = cfg.build(steps=100, global_size=8, samples=lambda steps: 8 * steps - 4 * min(steps, 10))
    assert (lr.warmup, lr.decay) == (120, 760)


def test_facts_name_the_settings_with_an_effect():
    assert schedule().facts() == schedule(anneal_style="linear", weight_decay_style="cosine").facts()
    wsd = schedule(style="wsd", anneal_steps=10)
    assert wsd.facts() != schedule(style="wsd", anneal_steps=11).facts()
    assert wsd.facts() != schedule(style="wsd", anneal_steps=10, anneal_style="linear").facts()
    assert schedule(weight_decay_start=0.0).facts() != schedule().facts()


def test_no_length_divides_by_zero():
    for settings in ({}, {"warmup_samples": 0}, {"warmup_fraction": 0.0}):
        lr = ScheduleConfig(lr=1e-3, **settings).build(steps=0, global_size=SIZE)
        assert np.isfinite([lr_at(lr, 0), lr_at(lr, 1)]).all()


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        (
            {"warmup_steps": 100},
            "the warm-up takes 800 samples (warmup_steps=100), the whole run has 800 (steps=100)",
            "use --schedule.warmup_steps=99 or less, or a larger --steps",
        ),
        (
            {"warmup_steps": 10, "decay_samples": 48},
            "the warm-up takes 80 samples (warmup_steps=10), the decay ends after 48 (schedule.decay_samples=48)",
            "use --schedule.warmup_steps=5 or less, or a larger --schedule.decay_samples",
        ),
        (
            {"warmup_fraction": 1.0},
            "the warm-up takes 800 samples (warmup_fraction=1.0), the whole run has 800 (steps=100)",
            "use --schedule.warmup_fraction=0.99 or less, or a larger --steps",
        ),
        (
            {"style": "wsd", "anneal_steps": 101},
            "the anneal takes 808 samples (anneal_steps=101), the whole run has 800 (steps=100)",
            "use --schedule.anneal_steps=100 or less, or a larger --steps",
        ),
    ],
)
def test_a_warm_up_or_anneal_that_does_not_fit(settings, message, hint):
    (problem,) = ScheduleConfig(**settings).run_problems(steps=STEPS, global_size=SIZE)
    assert (problem.message, problem.hint) == (message, hint)


def test_the_proposed_warm_up_is_the_longest_that_fits():
    """This holds for growing batches too: the steps have 4, 4, 8, 8, ... rows."""

    def samples(steps):
        return 4 * min(steps, 2) + 8 * max(steps - 2, 0)

    (problem,) = ScheduleConfig(warmup_steps=9, decay_samples=32).run_problems(steps=9, global_size=8, samples=samples)
    assert "--schedule.warmup_steps=4 or less" in problem.hint
    shorter = ScheduleConfig(warmup_steps=4, decay_samples=32)
    assert shorter.run_problems(steps=9, global_size=8, samples=samples) == []


def test_a_schedule_that_fits_has_no_problem():
    assert ScheduleConfig(warmup_steps=100).run_problems(steps=101, global_size=SIZE) == []
    assert ScheduleConfig().run_problems(steps=0, global_size=SIZE) == []
    cfg = ScheduleConfig(style="wsd", anneal_samples=900)
    assert cfg.run_problems(steps=113, global_size=SIZE) == []
