"""node_check.sh: its layouts fit a node of eight devices, and differences are reported."""

import json
import sys
from math import inf
from pathlib import Path

import pytest

from benchmarks.gpu import node_check
from benchmarks.gpu.node_check import LAYOUTS, TINY, Node, largest_error
from megajax.config import load
from megajax.config.compose import check


def write(run: Path, losses: list[float]) -> None:
    run.mkdir(parents=True)
    lines = [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in enumerate(losses, 1)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_layouts_fit_eight_devices():
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)
    for layout in LAYOUTS:
        for chosen, devices in ((layout, 8), (layout.reference, 1), *[(layout, 4)] * layout.fits(4)):
            settings = (*TINY, *chosen.arguments(devices), "--steps=5")
            assert chosen.fits(devices)
            check(load(layout.config, *(setting.removeprefix("--") for setting in settings)), devices)


def test_differences_are_relative_and_missing_steps_are_infinite():
    expected = {1: (2.0, 1.0), 2: (1.0, 1.0)}
    assert largest_error(expected, expected) == 0
    assert largest_error({1: (2.0, 1.0), 2: (1.5, 1.0)}, expected) == 0.5
    assert largest_error({}, expected) == largest_error({3: (1.0, 1.0)}, expected) == inf


@pytest.mark.parametrize(
    ("code", "losses", "problem"),
    [(0, [2.0, 1.0], None), (0, [2.0, 1.1], "above 0.0001"), (1, [2.0], "exit code 1"), (0, [], "above 0.0001")],
)
def test_a_run_that_fails_or_differs_is_a_problem(code, losses, problem, tmp_path, monkeypatch):
    def train(node: Node, layout: node_check.Layout, run: str, processes: int) -> int:
        write(node.folder / run, losses)
        return code

    write(tmp_path / LAYOUTS[0].reference.name, [2.0, 1.0])
    monkeypatch.setattr(Node, "train", train)
    node = Node(tmp_path, gpus=0)
    node_check.check_layouts(node, LAYOUTS[:1], [1, 8])
    assert [row["processes"] for row in node.rows] == [1, 8]
    for row in node.rows:
        assert row["problem"] is None if problem is None else problem in row["problem"]


def test_gpus_get_one_process_each_and_one_device_is_one_gpu(tmp_path):
    node = Node(tmp_path, gpus=4)
    assert "--processes=4" in node.command(LAYOUTS[0], "run", 4) and "--devices=cpu:1" not in node.command(
        LAYOUTS[0], "run", 4
    )
    assert "--devices=cpu:2" in Node(tmp_path, gpus=0).command(LAYOUTS[0], "run", 4)
    show = [sys.executable, "-c", "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"]
    with node.started(show, "one", one_device=True) as process:
        assert process.wait(60) == 0
    assert (tmp_path / "one.log").read_text() == "0\n"
