"""Train steps that are compiled twice: the same numbers, and what chooses them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_runs import build_program, llama, losses_of_steps
from user_errors import user_error

from megajax.batch import SAMPLE
from megajax.config import load
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.planning.compiled.devices import GPUS, gpu_of
from megajax.planning.compiled.scheduled_step import CostScheduler, ScheduledStep, rows_over_mean, scheduling_gpu
from megajax.precision.config import PrecisionConfig
from megajax.processes.xla_options import PROFILES, XlaConfig
from megajax.training.guarded.stop_flags import ExchangingSteps
from megajax.training.limits.step import StepControl
from megajax.training.loop import StepInput
from megajax.training.program import Program

TENSOR = ParallelConfig(data=4, tensor=2, sequence=True, data_sharding="zero1")
"""Collectives in layers and once a step."""


def test_a_step_by_costs_has_the_same_numbers() -> None:
    program = build_program(llama(), TENSOR, microbatches=2)
    cfg = program.cfg.but(xla=replace(program.cfg.xla, schedule="costs"))
    assert CostScheduler.of(program.cfg, program.mesh) is None
    by_costs = Program.of(cfg, program.mesh, scheduler=CostScheduler.of(cfg, program.mesh))
    assert losses_of_steps(by_costs) == losses_of_steps(program)
    assert not program.schedules() and isinstance(by_costs.train_step, ScheduledStep)
    (scheduled,) = by_costs.schedules()
    # Compilers for CPUs know no profile: the second program is the first, and nothing is asynchronous.
    assert scheduled.takes_costs and scheduled.matched == 1 and scheduled.device == "h100"
    assert scheduled.by_costs == scheduled.default and scheduled.default.exposed_seconds > 0
    assert len([line for line in scheduled.profile.splitlines() if "costs" in line]) > 50


def test_processes_with_different_schedules_say_so() -> None:
    """The difference is found before the first step: in other orders, their collectives would wait for each other."""
    lowered = SimpleNamespace(compile=lambda: None)
    program = SimpleNamespace(
        mesh=build_mesh(ParallelConfig(data=1)),
        cfg=SimpleNamespace(precision=PrecisionConfig()),
        train_step=SimpleNamespace(lower=lambda *arguments: lowered),
        schedules=lambda: [SimpleNamespace(digest="ours")],
    )
    run: Any = SimpleNamespace(state=None, program=program)
    steps = ExchangingSteps(run, lambda: False)
    steps._peers = SimpleNamespace(equal=lambda own: own == repr(["another"]))
    with user_error():
        steps.dispatch(StepInput(1, {SAMPLE: np.zeros((1, 1))}, 0), StepControl())


def test_costs_are_the_default_on_several_gpus() -> None:
    def mesh(platform: str, size: int) -> Any:
        device = type("Device", (), {"platform": platform, "device_kind": "NVIDIA H200"})
        return type("Mesh", (), {"devices": np.array([device]), "size": size})

    auto = XlaConfig()
    assert scheduling_gpu(auto, mesh("gpu", 8)) is GPUS["h200"] is scheduling_gpu(auto, mesh("cuda", 8))
    assert scheduling_gpu(auto, mesh("gpu", 1)) is None is scheduling_gpu(auto, mesh("cpu", 8))
    assert scheduling_gpu(XlaConfig(schedule="default"), mesh("gpu", 8)) is None
    assert scheduling_gpu(XlaConfig(schedule="costs"), mesh("cpu", 8)) is GPUS["h200"]
    assert scheduling_gpu(XlaConfig(options={PROFILES[0]: "measured.pbtxt"}), mesh("gpu", 8)) is None


def test_rows_of_experts_that_a_router_does_not_fill() -> None:
    mixtral: Any = load("mixtral.py:debug", "parallel.expert=8")
    (experts,) = [block.mlp for block in mixtral.model.stack.pattern]
    assert (experts.experts, experts.top_k) == (8, 2)
    assert rows_over_mean(mixtral) == pytest.approx(8 / 2, rel=0.1), "room for all tokens"
    assert rows_over_mean(load("llama3.py:debug")) == 1


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H200", "h200"),
        ("cpu", "h100"),
    ],
)
def test_the_gpu_of_a_device(kind: str, name: str) -> None:
    assert gpu_of(kind).name == name
