"""gpu_check.sh: its lists of steps, time limits, results after a kill, and predictions beside measurements."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import comparison, predict
from benchmarks.gpu import steps as gpu_steps
from benchmarks.gpu.steps import ALL, BUDGET, LISTS, Step
from benchmarks.kernels import attention as attention_cases
from benchmarks.kernels import measure

ROOT = Path(__file__).parents[2]
LEASE, START = 1800, 150
"""Seconds that a machine is lent for, and that its start and the transfers may take of them."""
GIB = 2**30


def test_each_list_fits_into_a_call_and_three_into_a_lease() -> None:
    """The times are those that LIST=1 prints."""
    environment = dict(os.environ) | {"LIST": "1", "PYTHON": sys.executable}
    ended = subprocess.run(["benchmarks/gpu_check.sh"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    sums: dict[str, int] = {}
    for line in ended.stdout.splitlines():
        if actual := re.fullmatch(r"(\w+): .*", line):
            name = actual[1]
            sums[name] = 0
        elif actual := re.fullmatch(r" +(\d+) s  (\w+)", line):
            sums[name] += int(actual[1])
    assert sums.keys() == LISTS.keys()
    assert max(sums.values()) <= BUDGET == 570
    assert sums["first"] + sums["second"] + sums["third"] <= LEASE - START
    assert len({part.name for part in ALL}) == len(ALL)


def test_all_placeholders_in_commands_are_replaced() -> None:
    places = dict.fromkeys(("json", "folder", "out"), "HERE")
    for part in ALL:
        for tiny in (False, True):
            assert "{" not in " ".join(part.command("python", places, tiny=tiny))


def test_predictions_have_these_steps_and_figures() -> None:
    """Values are not compared: the cost model may have changed since they were written."""
    predictions = json.loads(comparison.PREDICTIONS.read_text())
    names = [part.name for part in predict.STEPS]
    for device in ("h200", "h100", "tiny"):
        assert list(predictions[device]) == names, "make them again: python -m benchmarks predict"
        tiny = device == "tiny"
        for part in predict.STEPS:
            expected = predict.predicted(part, "h200" if tiny else device, tiny=tiny)
            assert predictions[device][part.name].keys() == expected.keys(), part.name
    trained = [part.name for part in predict.STEPS if part.kind == "mfu"]
    # Hopper multiplies numbers in blocks in bfloat16, after rounding them.
    assert all(0.25 < predictions["h200"][name]["MFU causal"]["predicted"] < 0.9 for name in trained)
    for ranged in (value for name in trained for value in predictions["h200"][name].values()):
        assert isinstance(ranged, float) or ranged["low"] < ranged["predicted"] < ranged["high"]
    assert predictions["h200"]["trace_llama_3b"]["busy ms a step"]["low"] == pytest.approx(
        1e3 * predictions["h200"]["mfu_llama_3b_4096"]["step s"]["low"]
    )


def quick(name: str, program: str, limit: int = 60, kind: gpu_steps.Kind = "device") -> Step:
    return Step(name=name, kind=kind, limit=limit, program=("-c", program, "{json}"))


def check(tmp_path: Path, **settings: Any) -> gpu_check.Check:
    python = sys.executable
    places = {"out": tmp_path, "folder": tmp_path, "python": python}
    return gpu_check.Check(**{"gpu": "NVIDIA H200", "budget": 60.0, **places, **settings})


WRITE = "import json, sys; json.dump({'figures': {'value': 1}}, open(sys.argv[1], 'w'));"


def test_results_survive_failed_and_killed_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails, one that ignores an interrupt, and one for which no time is left."""
    monkeypatch.setattr(gpu_check, "GRACE", 0.2)
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('begun'); time.sleep(60)"
    parts = (quick("good", WRITE), quick("broken", WRITE + "sys.exit(3)"), quick("slow", WRITE + stubborn, limit=2))
    parts_run = check(tmp_path, budget=1000.0)
    began = time.monotonic()
    for part in parts:
        parts_run.run(part)
        assert json.loads(parts_run.file.read_text())["parts"][part.name]["outcome"] == {"figures": {"value": 1}}
    assert time.monotonic() - began < 40
    parts_run.budget = 0.0
    parts_run.run(quick("late", WRITE))
    answer = json.loads(parts_run.file.read_text())["parts"]
    codes = {name: result["code"] for name, result in answer.items()}
    assert codes == {"good": 0, "broken": 3, "slow": gpu_check.TIMED_OUT, "late": None}


@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", ""])
def test_a_whole_call(gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The driver's output says whether there is a GPU; the steps have stand-ins."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{gpu}'\n")
    smi.chmod(0o755)
    names: list[str] = []

    def ended(command: list[str], limit: float, environment: dict[str, str]) -> int:
        names.append(" ".join(command))
        assert environment["JAX_PLATFORMS"] == ("cuda,cpu" if gpu else "cpu") and limit >= 5
        for word in command:
            if word.startswith("--json=") and "calibrate" not in word and "kernels_norm" in word:
                row = {"name": "RMSNorm", "sizes": {"tokens": 16384, "hidden": 4096}}
                passes = {name: {"seconds": {"median": 1e-4}} for name in ("forward", "both")}
                Path(word.partition("=")[2]).write_text(json.dumps({"figures": {"parts": {"norm": [row | passes]}}}))
        return 1 if "kernels_matmul" in " ".join(command) else 0

    monkeypatch.setattr(gpu_check, "exit_code", ended)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name, value in {"OUT": str(tmp_path / "out"), "PARTS": "first", "ONLY": ".", "BUDGET": "570"}.items():
        monkeypatch.setenv(name, value)
    assert gpu_check.gpu_check() == {"wrong": []}
    monkeypatch.setenv("PARTS", "second")
    assert gpu_check.gpu_check() == {"wrong": ["kernels_matmul (1)"]}
    output = capsys.readouterr().out
    assert "failed: kernels_matmul (1)" in output and "not run" not in output
    assert ("the ratios mean nothing" in output) == (not gpu)
    assert len(names) == len(LISTS["first"]) + len(LISTS["second"])
    assert ("--config=bench.py:llama_3b" in names[1]) == bool(gpu)
    answer = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert answer["gpu"] == (gpu or None)
    assert list(answer["parts"]) == [part.name for name in ("first", "second") for part in LISTS[name]]
    (row,) = (row for row in answer["comparison"] if row["figure"] == "RMSNorm tokens=16384 hidden=4096: forward ms")
    least = 4 * 16384 * 4096 / 3.35e12
    assert not gpu or row["measured_over_predicted"] == pytest.approx(1e-4 / least, rel=1e-3)


def test_unknown_lists_are_refused() -> None:
    lists = "first, second, third, more, layers, recurrences, recipes and all"
    with pytest.raises(SystemExit, match=f"PARTS=fourth: unknown list; choose from {lists}"):
        gpu_check.select_steps("first,fourth", ".")
    assert [part.name for part in gpu_check.select_steps("all", "norm|device")] == ["device", "kernels_norm"]


def test_measured_figures_are_compared_with_predictions(tmp_path: Path) -> None:
    step = {
        "step_seconds": {"median": 2.0},
        "tokens_per_second_per_device": {"median": 300.0},
        "mfu": {"causal": None, "full": 0.5},
        "memory": {"peak_in_use": None, "planned_peak": 2 * GIB},
    }
    kernel = {"name": "RMSNorm", "sizes": {"tokens": 4}}
    passes = {name: {"seconds": {"median": 3e-3}} for name in ("forward", "both")}
    loss = {"name": "loss, plain", "sizes": {"tokens": 4}, "seconds": {"median": 5e-3}}
    parts = {"norm": [kernel | passes, {"name": "LayerNorm", "sizes": {}, "fault": "no"}], "loss": [loss]}
    of_step = {"step s": 2.0, "tokens/s": 300.0, "MFU causal": None, "MFU full": 0.5, "peak GiB": 2.0}
    assert comparison.measured_figures("mfu", step) == of_step
    norm = {"RMSNorm tokens=4: forward ms": 3.0, "RMSNorm tokens=4: both ms": 3.0, "LayerNorm": None}
    of_kernels = norm | {"loss, plain tokens=4: both ms": 5.0}
    assert comparison.measured_figures("kernels", {"parts": parts}) == of_kernels
    assert comparison.measured_figures("mfu", None) == {}
    seconds, speed = ({"predicted": value, "low": 0.9 * value, "high": 1.3 * value} for value in (1.6, 1000.0))
    predicted = {"step s": seconds, "tokens/s": speed, "peak GiB": 4.0, "new": 1.0}
    rows = comparison.rows({"one": predicted}, "mfu", "one", step)
    by_name = {row["figure"]: row for row in rows}
    assert by_name["step s"]["measured_over_predicted"] == 1.25
    assert by_name["new"]["measured"] is None and by_name["MFU full"]["predicted"] is None
    assert [by_name[name]["outside"] for name in ("step s", "tokens/s", "peak GiB", "new")] == [False, True, None, None]
    lines = comparison.table(rows).splitlines()
    assert re.fullmatch(r"one +predicted \(low to high\) +\| +measured +ratio", lines[0])
    assert re.fullmatch(r"  step s +1\.6 \(1\.44 to 2\.08\) +\| +2 +1\.250", lines[1])
    assert re.fullmatch(r"  tokens/s +1,000 \(900 to 1,300\) +\| +300 +0\.300  outside", lines[2])
    assert comparison.predictions("NVIDIA H100 80GB HBM3", tiny=False)["device"] == {}


def test_results_of_pytest(tmp_path: Path) -> None:
    file = tmp_path / "tests.xml"
    cases = '<testcase name="a"/><testcase name="b"><failure/></testcase><testcase name="c"><skipped/></testcase>'
    file.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    actual = comparison.tests_of(file)
    assert actual == {"failed": 1, "passed": 1, "skipped": 1, "which_failed": ["b"]}
    assert comparison.measured_figures("tests", actual) == {"failed": 1, "passed": 1, "skipped": 1}


def arrays(jaxpr: Any) -> Iterator[int]:
    """Bytes of every intermediate result, including those of inner programs."""
    for equation in jaxpr.eqns:
        for out in equation.outvars:
            yield out.aval.size * out.aval.dtype.itemsize
        for value in equation.params.values():
            if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                yield from arrays(inner)


def test_reported_faults_are_computed_by_refused_kernels() -> None:
    """The backends compute them on a GPU, the reference on a CPU."""
    hopper, cpu = attention_cases.faults(True, predict.HOPPER), attention_cases.faults(False, predict.CPU)
    reports = {case.report: case.name for case in hopper if case.report}
    names = ("MASK", "HALF_TILE", "ONE_QUERY", "FEW_HEADS")
    assert {getattr(attention_cases, name) for name in names} <= reports.keys()
    assert "cudnn_mask" in reports[attention_cases.MASK] and "scores far below 0" in reports[attention_cases.MASK]
    old = attention_cases.faults(True, replace(predict.HOPPER, cudnn=(9, 14, 0)))
    assert attention_cases.WINDOW in {case.report for case in old}
    older = attention_cases.faults(True, replace(predict.HOPPER, cudnn=(9, 12, 0)))
    assert attention_cases.UNEVEN in {case.report for case in older}
    assert {case.report for case in cpu} == {None} and {case.name.split(",")[1] for case in cpu} == {" reference"}
    assert len(cpu) == 12 and sum(case.sizes["kv_heads"] == 4 for case in cpu) == 5
    assert any("sink" in case.name and case.sizes["head_dim"] == 192 for case in hopper)


def test_only_a_reported_fault_is_no_failure() -> None:
    case = attention_cases.AttentionCase(1, 8, 2, 2, 8, kernel="reference", report="somewhere#1").case()
    row = measure.verdict(case, right=False)
    assert row == {"right": True, "report": "somewhere#1", "fault_seen": True}
    text = measure.line({"name": case.name, "sizes": {}, "fault": "RuntimeError: no"} | row)
    assert text.endswith("FAILED: RuntimeError: no; the fault of somewhere#1 is here")
    assert not measure.verdict(case, right=True)["fault_seen"]
    other = attention_cases.AttentionCase(1, 8, 2, 2, 8, kernel="reference").case()
    assert measure.verdict(other, right=False) == {"right": False}


def test_sliced_attention_equals_whole_attention() -> None:
    case = attention_cases.AttentionCase(2, 32, 4, 2, 8, kernel="reference", documents=4).case()
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, (case.shapes[0], *case.shapes), strict=True)]
    actual, expected = jax.jit(measure.with_gradients(case.call))(*arrays), jax.jit(case.expected())(*arrays)
    for value, reference in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.abs(value - reference).max() < 1e-5 * jnp.abs(value).max()


def test_gpu_tests_need_no_optional_packages() -> None:
    """They run on machines with few packages, and import no other test file."""
    blocked = ("grain", "array_record", "tyro", "tensorboardX", "zstandard", "torch")
    start = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
    program = start + "import pytest; sys.exit(pytest.main(['-m', 'gpu', '-q', '--collect-only', 'tests']))"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-1000:]
    files = set(re.findall(r"^tests/\S+?\.py", ended.stdout, re.MULTILINE))
    assert files >= {"tests/benchmarks/test_on_a_gpu.py", "tests/kernels/test_attention_backends.py"}
    assert files == {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^(@|pytestmark = )pytest\.mark\.gpu", path.read_text(), re.MULTILINE)
    }
