"""python -m megajax.plan: what it refuses, and plans by formula: flags, output and JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
from descriptions import STAGES_70B
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.plan import main

DEBUG, LLAMA = "--config=llama3.py:debug", "--config=llama3.py:llama3_70b"
GIVEN = {
    "": [],
    "debug": [DEBUG],
    "debug on 8": [DEBUG, "--devices=h100:8"],
    "debug on 12": [DEBUG, "--devices=h100:12"],
    "70B": [LLAMA, "--formula"],
    "70B on 64": [LLAMA, "--devices=h100:64"],
    "two compared": [LLAMA, "--devices=h100:64", "--compare=h100:8 h200:8"],
    "search": [LLAMA, "--devices=h100:64", "--search"],
    "serve": ["--devices=h100:8", "--serve"],
}
REFUSED = [
    ("", "", "give --config or --schedule"),
    ("debug", "--schedule=gpipe", "give one of them"),
    ("debug", "", "--devices: must be given"),
    ("debug", "--devices=h300:8", "known: a100, a100-40gb, a100-80gb, h100, h200, b200"),
    ("debug", "--devices=h300:8 --model.hiden=1", "2 problems"),
    ("debug on 12", "", "give 8 or 16"),
    ("debug on 12", "--gpus-per-node=0", "--gpus-per-node: must be at least 1"),
    ("debug on 8", "--parallel.tensor=16", "16 devices (tensor 16), there are 8"),
    ("debug", "--devices=h100:128", "8 rows are not divisible by micro_size=1 x 128"),
    ("debug on 8", "--model.hiden=1", "did you mean model.hidden?"),
    ("debug on 8", "--audit --formula", "--audit: cannot be combined with --formula"),
    ("debug on 8", "--stages=4", "--stages needs --schedule, not --config"),
    ("debug on 8", "--context=8", "--context: needs --serve"),
    ("serve", "--config=bert.py", "does not generate text"),
    ("serve", "--config=llama3.py --context=0", "--context: must be at least 1, got 0"),
    ("70B", "--devices=h300:8", "any other one: --formula --device-file=FILE"),
    ("70B", "--devices=h100:32768", "32,768 devices asked for, plans are made for at most 16,384"),
    ("70B", "--devices=h100:128 --calibration=nowhere.json", "nowhere.json can't be read"),
    ("search", "--parallel.tensor=3", "no layout of 64 devices has tensor=3"),
    ("search", "--parallel.tensor=1 --parallel.sequence", "sequence parallelism needs parallel.tensor > 1"),
    ("search", "--parallel.tensor=1 --parallel.pipeline=1 --parallel.data_sharding=replicate", "nothing fits"),
    ("search", "--out=best.py", "must end in .yaml"),
    ("search", "--out=nowhere/best.yaml", "there is no folder nowhere"),
    ("search", "--compile=-1", "--compile: must be at least 0, got -1"),
    ("search", "--sweep=devices:64", "cannot be combined with --search"),
    ("70B on 64", "--formula --out=x.yaml", "needs --search"),
    ("70B on 64", "--formula --png=x.png", "needs --sweep"),
    ("70B on 64", "--sweep=device:1,2", "unknown axis 'device'; did you mean devices?"),
    ("70B on 64", "--sweep=devices:", "must be AXIS:VALUE"),
    ("70B on 64", "--sweep=devices:64,100,...,129", "does not lead to 129"),
    ("70B on 64", "--sweep=devices:8,16", "no point passes the checks"),
    ("70B on 64", "--compare=", "names nothing"),
    ("two compared", "", "more than one of a kind"),
    ("70B on 64", "--compare=h300:64", "did you mean h100, h200 or b300?"),
    ("70B on 64", "--compare=llama3_80b.py", "did you mean llama3.py:llama3_8b"),
]


def test_without_the_compiler_the_plan_is_by_formula_and_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megajax.planning.compiled.devices.missing_packages", lambda: ["cuDNN"])
    how = "needs cuDNN. Install {}: uv sync --extra aot --inexact, or pip install 'megajax[aot]'"
    for more, noted in ([], True), (["--search"], True), (["--search", "--compile=0"], False), (["--formula"], False):
        assert main([*GIVEN["debug on 8"], *more]) == 0
        printed = capsys.readouterr().out
        assert (how.format("them") in printed) == noted and "formula" in printed
    with user_error():
        main([*GIVEN["debug on 8"], "--audit"])  # a compiler alone can answer


@pytest.mark.parametrize(("given", "more", "message"), REFUSED)
def test_what_is_refused(given: str, more: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        main([*GIVEN[given], *more.split()])
    assert message in str(caught.value)


ROOT = Path(__file__).parents[2]
LAYOUT = tuple(f"--{setting}" for setting in STAGES_70B)
ASKED = (f"--config={ROOT}/configs/llama3.py:llama3_70b", "--devices=h100:128", *LAYOUT, "--formula")


def plan_json(folder: Path, *arguments: str) -> dict[str, Any]:
    file = folder / "plan.json"
    assert main([*ASKED, f"--json={file}", *arguments]) == 0
    return json.loads(file.read_text())


@pytest.mark.smoke
def test_json_and_printed_sections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = plan_json(tmp_path)
    assert figures["mesh"] == {"pipeline": 4, "replica": 1, "data": 4, "expert": 1, "context": 1, "tensor": 8}
    assert figures["fits"] is True and figures["ring_slots"] == 24 and figures["devices"] == 128
    for name in ("step_seconds", "mfu_full", "mfu_causal", "tokens_per_second_per_device", "gpu_hours", "days"):
        assert figures[name] > 0, name
    assert {row["axis"] for row in figures["collectives"]} == {"tensor", "pipeline", "pipeline+tensor", "data"}
    printed = capsys.readouterr().out
    for text in ("by formula", "exposed communication", "bubble", "GPU hours", "ring slots"):
        assert text in printed


def test_overrides_and_links_are_applied(tmp_path: Path) -> None:
    base = plan_json(tmp_path)
    assert plan_json(tmp_path, "--network=5")["exposed_seconds"] > base["exposed_seconds"]
    assert plan_json(tmp_path, "--nvlink=100")["exposed_seconds"] > 2 * base["exposed_seconds"]
    assert plan_json(tmp_path, "--gpus-per-node=4")["step_seconds"] > base["step_seconds"]
    assert plan_json(tmp_path, "--model.recompute=full")["activations_gib"] < base["activations_gib"] / 3


def test_a_calibration_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_text('{"figures": {"constants": {"name": "h100", "matmul": 0.33}}}')
    assert plan_json(tmp_path, f"--calibration={file}")["matmul_seconds"] > 1.9 * plan_json(tmp_path)["matmul_seconds"]


def test_a_device_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nmemory_gib: 96\nbandwidth: 3e12\npeak: 5e14\nnvlink: 200e9\nnetwork: 25e9\n")
    asked = [ASKED[0], "--devices=mine:128", f"--device-file={file}"]
    assert main([*asked, "--formula"]) == 0
    assert "128 x mine" in capsys.readouterr().out
    with user_error():
        main(asked)
