"""Llama-3 8B compiled for eight virtual H100s: what schedules by costs expose of a step, see docs/benchmarks.md."""

from typing import Any

import pytest
from descriptions import TENSOR_4

from megajax.compiled.gpus import prepare, read_cluster
from megajax.config import load
from megajax.planning.train_step import TrainPlan, compile_train_step

pytestmark = [pytest.mark.aot, pytest.mark.slow]

FSDP = ("model.recompute=selective", "batch.micro_size=1")


def planned(monkeypatch: pytest.MonkeyPatch, *settings: str) -> TrainPlan:
    for variable in ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        monkeypatch.setenv(variable, "")
    prepare()
    cluster, _ = read_cluster("h100:8")
    assert cluster is not None
    cfg: Any = load("llama3.py", "batch.global_size=64", *settings)
    return compile_train_step(cfg, cluster)


def test_gathers_of_fsdp_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled = planned(monkeypatch, *FSDP).scheduled
    assert scheduled is not None and scheduled.takes_costs and scheduled.matched > 0.95
    assert scheduled.default.exposed_seconds == pytest.approx(0.41, rel=0.1)
    assert scheduled.by_costs.exposed_seconds == pytest.approx(0.13, rel=0.1)


def test_two_microbatches_hide_the_collectives_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled = planned(monkeypatch, *TENSOR_4, "batch.side_by_side=2").scheduled
    assert scheduled is not None and scheduled.takes_costs
    # One at a time, 1.37 s by XLA's own times and 1.03 s by costs.
    assert scheduled.default.exposed_seconds == pytest.approx(0.95, rel=0.1)
    assert scheduled.by_costs.exposed_seconds == pytest.approx(0.32, rel=0.1)
