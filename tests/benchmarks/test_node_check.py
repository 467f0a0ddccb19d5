"""node_check.sh: its layouts fit a node of eight devices, and differences and predictions are reported."""

import json
import sys
from collections import Counter
from math import inf
from pathlib import Path

import pytest

from benchmarks.gpu import comparison, node_check
from benchmarks.gpu.node_check import LAYOUTS, SPEEDS, TINY, Node, largest_error
from benchmarks.gpu.predict import settings_of
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


@pytest.mark.parametrize("tiny", [True, False])
def test_timed_steps_fit_eight_devices(tiny):
    for step in SPEEDS:
        source, settings = settings_of(step, tiny=tiny)
        check(load(source, *settings), step.devices)


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
    command = node.command(LAYOUTS[0], "run", 4)
    assert "--processes=4" in command and "--devices=cpu:1" not in command
    assert "--devices=cpu:2" in Node(tmp_path, gpus=0).command(LAYOUTS[0], "run", 4)
    show = [sys.executable, "-c", "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"]
    with node.started(show, "one", one_device=True) as process:
        assert process.wait(100) == 0
    assert (tmp_path / "one.log").read_text() == "0\n"


PROGRAM = """
import json, signal, sys, time
from pathlib import Path

flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv if "=" in word)
if "json" in flags:
    rows = [{"dtype": dtype, "error": error} for dtype, error in (("float32", 1e-7), ("bfloat16", 1e-2))]
    step = {"step_seconds": {"median": 0.01}, "tokens_per_second_per_device": {"median": 5.0}}
    step |= {"mfu": {"causal": None, "full": None}, "memory": {"peak_in_use": None, "planned_peak": 2**30}}
    Path(flags["json"]).write_text(json.dumps({"figures": {"rows": rows, "wrong": 0} | step}))
    sys.exit()
run, stopped = Path(flags["run_dir"]), []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
(run / "profile").mkdir(parents=True, exist_ok=True)
if "profile.steps" in flags:
    (run / "profile/host.xplane.pb").touch()
metrics = run / "metrics.jsonl"
step = len(metrics.read_text().splitlines()) if metrics.exists() else 0
last = step + int(flags.get("resilience.exit_after_steps", flags["steps"]))
while step < last and not stopped:
    step += 1
    with metrics.open("a") as file:
        file.write(json.dumps({"step": step, "loss": 1 / step, "grad_norm": 1.0}) + "\\n")
    time.sleep(0.05 if last > 1000 else 0)
(run / f"checkpoints/{step}").mkdir(parents=True)
"""
"""Stands in for training, which saves on SIGTERM, and for the programs that measure."""


def test_all_checks_in_one_call(tmp_path, monkeypatch, capsys):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(node_check, "launched", lambda command, processes: [sys.executable, str(program), *command])
    monkeypatch.setattr(node_check.signal, "signal", lambda *_: None)
    monkeypatch.setattr(node_check, "visible_gpus", lambda: 0)
    monkeypatch.setenv("OUT", str(tmp_path))
    found = node_check.node_check()
    output = capsys.readouterr().out
    assert found["wrong"] == 0, output
    assert Counter(row["check"] for row in found["rows"]) == {
        "one device": 2,
        "layout": 2 * len(LAYOUTS),
        "gradients": 2,
        **dict.fromkeys(("everything", "SIGTERM", "resume"), 1),
        "speed": len(LAYOUTS),
    }
    assert {row["part"] for row in found["comparison"]} == {step.name for step in SPEEDS}
    assert f"{comparison.table(found['comparison'])}\n" in output and "the ratios mean nothing" in output
