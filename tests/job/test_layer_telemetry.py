"""What a run reports about its mixtures of experts, against counts by hand."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from run_folder import events, lines, steps
from small_jobs import model, run_config
from tiny_runs import with_block

from megajax.job.job import train
from megajax.job.notebook import set_up
from megajax.job.suspicious_steps import Watch
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import CapacityConfig, MoEConfig, RouterConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layer_metrics import Measure, Measured
from megajax.metrics.config import LoggingConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.training.config import BatchConfig

CAPACITY = CapacityConfig(factor=0.98, drop="position")
ROUTER = RouterConfig(force_balance=True, aux_loss=0.01, capacity=CAPACITY)
"""Tokens go to experts 0 1, 2 3, 4 5, 0 1 and so on."""

TOKENS = [44, 44, 42, 42, 42, 42]
"""A step has two microbatches of 64 tokens with 2 of 6 experts each: 128 = 21 x 6 + 2."""

DROPPED = 4 / 256
"""Experts have room for 21, which is 0.98 x 128
6 rounded up: two microbatches drop 2 of 128."""


def mixture(layers: int = 2) -> DecoderConfig:
    mlp = MoEConfig(experts=6, top_k=2, expert=GatedMLPConfig(ffn=16), router=ROUTER)
    return with_block(model(dropout=0.0, repeats=layers), mlp=mlp)


@pytest.mark.slow
def test_a_step_reports_each_layer_even_if_its_update_is_skipped() -> None:
    run = set_up(run_config(model=mixture()), devices=jax.devices()[:1])
    (info,) = run.steps(1)
    measurements = info.measured
    np.testing.assert_array_equal(measurements["expert_tokens"].values, [TOKENS] * 2)
    np.testing.assert_allclose(measurements["expert_load_max_over_mean"].values, 44 / (256 / 6))
    np.testing.assert_allclose(measurements["dropped_share"].values, DROPPED)
    assert measurements["router_aux_loss"].overall > 0.9 and "router_z_loss" not in measurements
    assert measurements["router_not_finite"].overall == 0 and "measured" not in repr(info)
    path = "stack.blocks.0.mlp.router"
    broken = run.state.params[path].at[1, 0, 3].set(np.nan)
    run.state = replace(run.state, params={**run.state.params, path: broken})
    sums = np.asarray(run.state.observed["stack.blocks.0.mlp.report.sum"])
    (info,) = run.steps(1)
    assert info.skipped and np.isnan(info.loss)
    np.testing.assert_array_equal(info.measured["router_not_finite"].values, [0, 128])
    np.testing.assert_array_equal(np.asarray(run.state.observed["stack.blocks.0.mlp.report.sum"]), sums)


@pytest.mark.slow
def test_a_run_writes_the_reports_of_its_layers_and_continues_after_a_resume(tmp_path: Path) -> None:
    parallel = ParallelConfig(data=1, expert=2, pipeline=2, layers=(1, 2))
    logging = LoggingConfig(every=1, plot=False, sample=False, live="never", layers_every=4)
    batch = BatchConfig(global_size=8, micro_size=2)
    cfg = run_config(tmp_path, model=mixture(3), parallel=parallel, logging=logging, batch=batch)
    assert train(replace(cfg, resilience=replace(cfg.resilience, exit_after_steps=3))) == 0
    assert train(cfg) == 0
    assert list(steps(tmp_path)) == [1, 2, 3, 4, 5, 6]
    lists = lines(tmp_path, "layers")
    assert [line["step"] for line in lists] == [1, 3, 4, 6]
    # Each of two devices routes its own tokens: 64 = 10 x 6 + 4 a microbatch.
    tokens = [44, 44, 44, 44, 40, 40]
    assert all(line["layers"] == [0, 1, 2] and line["expert_tokens"] == [tokens] * 3 for line in lists)
    for line in steps(tmp_path).values():
        by_layer = line["by_layer"]
        assert by_layer["layers"] == [0, 1, 2] and line["router_not_finite"] == 0
        assert by_layer["expert_load_max_over_mean"] == [float(f"{44 * 6 / 256:.5g}")] * 3
        assert line["dropped_share"] > 0 and min(by_layer["router_aux_loss"]) > 0.9
    warnings = events(tmp_path, "layer_warning")
    assert [event["step"] for event in warnings] == [1, 4]  # once an attempt
    assert "raise router.capacity.factor" in warnings[0]["why"]


def test_warnings_are_printed_once() -> None:
    messages: list[str] = []
    logged: list[tuple[str, dict[str, Any]]] = []
    log: Any = SimpleNamespace(event=lambda name, **fields: logged.append((name, fields)))
    guard: Any = None
    watch = Watch(guard, None, log, messages.append)
    measure = Measure(name="lost", of=lambda x: x, above=0.0, warning="{value:.0%} lost")
    for step, share in enumerate((0.0, 0.25, 0.5), 1):
        info: Any = SimpleNamespace(step=step, measured={"lost": Measured(measure, (0,), np.array([share]))})
        watch.warn(info)
    assert logged == [("layer_warning", {"step": 2, "measure": "lost", "value": 0.25, "why": "25% lost"})]
    assert messages == ["step 2: 25% lost; lost in metrics.jsonl counts later ones"]
