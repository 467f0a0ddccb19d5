"""The pool of pinned host memory: computed from what a config offloads, set before jax starts, else refused."""

import pytest
from user_errors import user_error

from megajax.config.config_files import load
from megajax.config.errors import ConfigError, UserError
from megajax.planning import host_pool
from megajax.planning.compiled.devices import GIB
from megajax.planning.host_pool import LIMIT, demand_pool, offloaded_bytes, pool_gib, set_limit

LONG = load("llama3.py:llama3_8b_1m", "model.offload=input,core_attention")
"""A compiled plan of it has 16.1 GiB of host memory for each GPU (docs/layouts.md)."""


def test_offloaded_activations_are_those_of_the_compiled_plan() -> None:
    assert offloaded_bytes(LONG, 128) / GIB == pytest.approx(16.1, abs=0.05)
    assert pool_gib(LONG, 8, 128) == 166 and pool_gib(LONG, 1, 128) == 25


def test_offloaded_moments_count_too() -> None:
    cfg = load("llama3.py", "optimizer.offload=1")
    eight = offloaded_bytes(cfg, 8)
    assert eight > 0 and offloaded_bytes(load("llama3.py", "optimizer.offload=0.5"), 8) == pytest.approx(eight / 2)
    assert pool_gib(load("llama3.py"), 8, 8) == 0, "nothing is offloaded"
    assert pool_gib(cfg, 0, 8) == 0, "on CPUs there is no pool"


def test_a_config_without_formulas_needs_nothing_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(*arguments: object) -> None:
        raise UserError("no formulas")

    monkeypatch.setattr(host_pool, "describe", describe)
    assert pool_gib(LONG, 8, 128) == 0


@pytest.mark.parametrize(
    ("gpus", "environment", "limit"), [(8, {}, "166"), (1, {}, None), (0, {}, None), (8, {LIMIT: "70"}, "70")]
)
def test_the_limit_is_raised_where_it_is_too_low(gpus: int, environment: dict, limit: str | None) -> None:
    set_limit(LONG, gpus=gpus, processes=16, environment=environment)
    assert environment.get(LIMIT) == limit


def test_a_pool_or_a_machine_that_is_too_small_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIMIT, raising=False)
    with user_error("model.offload", kind=ConfigError):
        demand_pool(LONG, 8, 128, memory=1000 * GIB)
    with user_error("model.offload", kind=ConfigError):
        demand_pool(LONG, 8, 128, memory=100 * GIB)
    monkeypatch.setenv(LIMIT, "166")
    demand_pool(LONG, 8, 128, memory=1000 * GIB)
    demand_pool(LONG, 0, 128, memory=0)
