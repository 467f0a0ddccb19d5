"""Parts of the benchmarks at tiny sizes on CPU."""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from user_errors import user_error

from benchmarks import outcome
from benchmarks.__main__ import main
from benchmarks.gpu.comparison import measured_figures
from benchmarks.kernels import attention as attention_cases
from benchmarks.kernels import cases as kernel_cases
from benchmarks.kernels import loss as loss_cases
from benchmarks.kernels import measure as measuring
from benchmarks.parts import PARTS
from benchmarks.roofline import roof_of
from benchmarks.training import expert_gradients, processor
from megajax.config import load
from megajax.config.class_references import resolve
from megajax.kernels.attention.attention import local_device
from megajax.mesh.mesh import find_devices

CPU = roof_of("cpu", "cpu")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the variable that the program sets for the runtime."""
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")


def test_the_list_and_the_help_name_every_part(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out
    for name, part in PARTS.items():
        assert f"  {name} " in lines and part.line in lines
        assert main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"python -m benchmarks {name}")
        assert resolve(f"benchmarks.{part.target}").__doc__[:60] in text


def test_unknown_parts_and_options_are_refused() -> None:
    with user_error():
        main(["kernel"])
    for name in ("planner_accuracy", "program_audit", "traffic"):
        with user_error("--bogus"):
            main([name, "--bogus"])


@pytest.mark.slow
def test_mfu_measures_the_train_step(tmp_path: Path, process: None, capsys: pytest.CaptureFixture) -> None:
    files = tmp_path / "mfu.json", tmp_path / "start.npz"
    argv = ["--config=bench.py:debug", "--parallel.data=1", "--steps=2"]
    assert main(["mfu", *argv, f"--json={files[0]}", f"--export={files[1]}"]) == 0
    assert "MFU                      none: no peak is known for CPU" in capsys.readouterr().out
    outcome = json.loads(files[0].read_text())
    assert {"command", "commit", "date", "figures", "machine", "versions"} == outcome.keys()
    actual, cfg = outcome["figures"], load("bench.py:debug")
    assert actual["mfu"] == {"causal": None, "full": None}
    assert actual["tokens_per_step"] == 8 * 64 and actual["timed_steps"] == 2 and actual["devices"] == 1
    assert {"median", "p10", "p90", "readings"} == actual["step_seconds"].keys()
    assert actual["memory"]["peak_in_use"] is None and actual["memory"]["planned_peak"] > 0
    assert actual["seconds"]["compile"] > 0
    run = actual["run"]
    assert run["parameters"] == cfg.model.parameter_count().total
    assert (run["attention"], run["microbatches"], run["recompute"]) == (["reference"], 8, "selective")
    assert {"compiler_options", "custom_calls", "environment", "backend", "precision"} <= run.keys()
    assert actual["losses"][0] == pytest.approx(np.log(512), abs=0.05)
    assert actual["last_loss"] < actual["losses"][0], "a repeated batch is learnt"
    start = np.load(files[1])
    assert sum(start[name].size for name in start.files if not name.startswith("batch.")) == run["parameters"]
    assert start["batch.tokens"].shape == (8, 1, 64) and start["batch.tokens"].max() < 512
    np.testing.assert_array_equal(start["batch.tokens"][..., 1:], start["batch.labels"][..., :-1])


def test_wrong_and_failing_kernels_are_reported() -> None:
    correct = kernel_cases.matmul(False, local_device())[0]
    assert measuring.measure(correct, CPU, 1e-3)["right"]
    fields = {name: getattr(correct, name) for name in correct.__dataclass_fields__}
    incorrect = measuring.Case(**fields | {"call": lambda x, w: jnp.einsum("ti,io->to", x, w) * 1.1})
    actual = measuring.measure(incorrect, CPU, 1e-3)
    assert not actual["right"] and "WRONG" in measuring.line(actual)
    broken = measuring.attempt(measuring.Case(**fields | {"call": lambda x, w: x @ w.T}), CPU, 1e-3)
    assert not broken["right"] and "FAILED: TypeError" in measuring.line(broken)


@pytest.mark.slow
def test_every_case_is_right_on_a_cpu() -> None:
    makers = [resolve(target) for part, target in measuring.PARTS.items() if part != "loss"]
    cases = [case for make in makers for case in make(False, local_device())]
    actual = {case.name: measuring.measure(case, CPU, 1e-3) for case in cases}
    assert {"attention, reference", "RMSNorm", "LayerNorm", "matmul, bfloat16"} <= actual.keys()
    assert all(result["right"] for result in actual.values())
    assert all(result["both"]["share_of_floor"] is None for result in actual.values())


def test_the_chunked_loss_on_eight_devices_equals_that_of_whole_logits() -> None:
    actual = [*loss_cases.rows((64, 16, 512), (16,), CPU, 1e-3)]
    assert [result["name"] for result in actual] == ["loss, plain", "loss, chunks of 16"]
    assert all(result["right"] and result["sizes"]["devices"] == 8 for result in actual)
    assert actual[1]["temporary_bytes"] < actual[0]["temporary_bytes"]


def test_costs_of_attention() -> None:
    plain = attention_cases.AttentionCase(2, 4096, 32, 8, 128, kernel="reference")
    case = plain.case()
    assert case.flops[0] == 2 * 2 * 32 * 128 * 4096 * 4096  # two matmuls of 2 operations, half the square
    assert case.flops[1] == 3.5 * case.flops[0]
    assert case.moved[0] == 2 * 2 * 4096 * 128 * (32 + 8 + 8 + 32)
    assert plain._replace(documents=4).case().flops[0] == case.flops[0] / 4
    assert plain._replace(window=512).case().flops[0] == case.flops[0] / 4


def test_a_python_without_torch_is_refused_before_measuring(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with user_error("torch"):
        processor.processor(torch_python=bare)
    with user_error("--torch-python"):
        processor.processor(torch_python=tmp_path / "none")
    with user_error("--models"):
        processor.processor(models="gpt5")


def test_the_losses_of_trainers_agree_or_their_ratios_are_void() -> None:
    assert processor.agree([6.0, 5.9], [6.00005, 5.9]) and not processor.agree([6.0, 5.9], [6.0, 5.9002])


def test_interrupted_kernels_keep_their_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, file = measuring.measure, tmp_path / "kernels.json"

    def interrupted(case: measuring.Case, *rest):
        if case.name == "LayerNorm":
            raise KeyboardInterrupt
        return measure(case, *rest)

    monkeypatch.setattr(measuring, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(["kernels", "--parts=norm", "--seconds=0.001", f"--json={file}"])
    assert [row["name"] for row in json.loads(file.read_text())["figures"]["parts"]["norm"]] == ["RMSNorm"]


def test_the_commit_of_a_copy_without_history_is_that_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMIT", "1a2b3c4")
    assert outcome.described({})["commit"] == "1a2b3c4"


CONFIG = ("qwen3_moe.py:debug", "model.stack.repeats=1", "model.hidden=32", "model.sequence_length=32")


def test_the_way_of_dispatch_is_set_in_every_layer() -> None:
    cfg = load("deepseek.py:debug").model
    ragged = expert_gradients.with_way(cfg, "ragged")
    assert "way='ragged'" in repr(ragged) and "way='auto'" not in repr(ragged)
    assert expert_gradients.with_way(ragged, "auto") == cfg
    dense = load("llama3.py:debug")
    with user_error():
        next(iter(expert_gradients.expert_gradients(cfg=dense)))


def test_different_and_non_finite_gradients_are_reported(
    tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A finite loss with NaN gradients, as publicly reported of ragged exchanges."""
    values = {"gather": 1.0, "ragged": jnp.nan, "capacity": 1.5}

    def gradients(cfg):
        (way,) = (way for way in values if f"way='{way}'" in repr(cfg.model))
        return 2.0, {"a": jnp.ones(4), "b": jnp.full(4, values[way])}

    monkeypatch.setattr(expert_gradients, "gradients", gradients)
    file = tmp_path / "ways.json"
    assert main(["expert_gradients", "--config=qwen3_moe.py:debug", f"--json={file}"]) == 1
    rows = json.loads(file.read_text())["figures"]["rows"]
    ways = [("ragged", "b", False), ("capacity", "b", False)]
    assert [(row["way"], row["worst"], row["right"]) for row in rows] == ways * 2
    assert capsys.readouterr().out.count("WRONG") == 4


@pytest.mark.slow
def test_all_ways_of_dispatch_have_equal_gradients(
    process: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for user in ("benchmarks.training.expert_gradients", "megajax.planning.resolve"):
        monkeypatch.setattr(f"{user}.find_devices", lambda: find_devices()[:2])
    monkeypatch.setattr(expert_gradients, "TOLERANCES", {"float32": 1e-5})
    file = tmp_path / "ways.json"
    argv = [f"--{setting}" for setting in CONFIG[1:]]
    assert main(["expert_gradients", f"--config={CONFIG[0]}", *argv, f"--json={file}"]) == 0
    rows = json.loads(file.read_text())["figures"]["rows"]
    assert [row["way"] for row in rows] == ["ragged", "capacity"]
    assert all(row["error"] <= 1e-5 and row["devices"] == 2 for row in rows)


SIZES = ("--model.stack.repeats=1", "--model.hidden=32", "--model.sequence_length=32", "--batch.global_size=4")


@pytest.mark.slow
def test_every_schedule_runs_and_has_the_same_losses(
    tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megajax.planning.resolve.find_devices", lambda: find_devices()[:2])
    out = tmp_path / "schedules.json"
    main(["schedules", "--config=llama3.py:debug", *SIZES, "--steps=1", f"--json={out}"])
    figures = json.loads(out.read_text())["figures"]
    assert list(figures) == ["costs", "default", "measured"]
    assert figures["costs"]["by"] == "costs" and figures["costs"]["matched"] == 1
    assert len({tuple(variant["losses"]) for variant in figures.values()}) == 1
    assert "100.0% of the names, taken: costs" in capsys.readouterr().out
    compared = measured_figures("schedules", figures)
    assert set(compared) == {"default over costs", "measured over costs", "share of names"}
