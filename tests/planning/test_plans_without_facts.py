"""A model whose config has no facts: formulas refuse it, the compiler plans it, and its kernels are still chosen."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from user_errors import user_error

from megajax.config import load
from megajax.layers.stack.config import SegmentsConfig
from megajax.plan import main
from megajax.planning.compiled.devices import GPUS, Cluster
from megajax.planning.compiled.hlo import Contents
from megajax.planning.train_step import Memory, TrainPlan, kernel_device, report, with_kernels
from megajax.training.program import demand_kernels
from tests.docs.blocks import ROOT, blocks


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of docs/own_model.md."""
    folder = tmp_path_factory.mktemp("own")
    for block in blocks(ROOT / "docs/own_model.md"):
        name = block.text.splitlines()[0].removeprefix("# ")
        if name.endswith(".py"):
            (folder / name).write_text(block.text, encoding="utf-8")
    return folder / "my_model.py"


@pytest.mark.parametrize(
    "mode", ["--formula", "--search", "--compare=--parallel.tensor=2", "--sweep=devices:8,16", "--sweep=steps:1,2"]
)
def test_modes_that_need_formulas_say_what_is_missing(config_file: Path, mode: str) -> None:
    with user_error() as error:
        main([f"--config={config_file}", "--devices=h100:8", mode])
    assert error.value.code == 2


@pytest.mark.parametrize("peak_gib", [1, 100])
def test_a_compiled_plan_has_memory_and_no_times(config_file: Path, peak_gib: int) -> None:
    memory = Memory(arguments=0, outputs=0, aliased=0, temporary=peak_gib * 2**30, parameters=0, optimizer=0)
    plan = TrainPlan(
        cfg=load(config_file),
        cluster=Cluster(GPUS["h100"], 8, 8),
        mesh={"data": 8},
        microbatches=1,
        parameters=9_696,
        kernels={},
        memory=memory,
        contents=Contents((), ()),
        schedule=None,
        compile_seconds=1.0,
        text="ENTRY %main (a: f32[]) -> f32[] {\n}\n",
    )
    report_page, figures = report(plan)
    assert figures["parameters"] == 9_696 and figures["peak_gib"] == peak_gib
    assert figures["step_seconds"] is None and figures["mfu_causal"] is None
    assert "needs facts of the model" in report_page.text()


def test_kernels_are_those_of_the_planned_GPU_for_layers_without_facts_and_in_segments() -> None:
    cfg = load("gpt3.py:debug", "precision.compute=bfloat16")
    (block,) = cfg.model.stack.pattern
    mixer: Any = object()
    stacks = [
        replace(cfg.model.stack, pattern=(replace(block, mlp=mixer), replace(block, mixer=mixer))),
        SegmentsConfig(segments=(cfg.model.stack, replace(cfg.model.stack, pattern=(block, block)))),
    ]
    for stack in stacks:
        settings = cfg.but(model=replace(cfg.model, stack=stack))
        planned, kernels = with_kernels(settings.model, demand_kernels(settings, kernel_device(GPUS["h100"])))
        blocks = [each for each in planned.stack.pattern if each.mixer is not mixer]
        assert {each.mixer.kernel for each in blocks} == {"cudnn"} and len(kernels["attention"]) == len(blocks)
        assert planned.stack.layers() == stack.layers()
