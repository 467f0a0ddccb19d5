"""The page and the text of a report, its charts, and the front door."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from user_errors import user_error

from megajax.report import main
from megajax.reporting.attempts import attempts
from megajax.reporting.history import read_history
from megajax.reporting.run_summary import summarize
from megajax.reporting.write_report import curves


class Outline(HTMLParser):
    """Records open tags, and everything that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.fetched += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "line", "path", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "path", "circle"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    assert parser.open == []
    return parser


@pytest.fixture
def eventful(fake_run: Callable) -> Path:
    """A run with a resume, a non-finite loss, evaluations, and names that need HTML escapes."""
    run = fake_run("a <b> & c")
    run.config(40)
    run.attempt(0, 20, losses={13: float("nan")}, save=5)
    run.event("transient_fault", step=13, why="loss (nan)", again={"loss": 2.5})
    run.now += 7.0
    run.attempt(15, 40, save=10)
    run.event("update_skipped", step=33, reason="<script>alert(1)</script>")
    run.event("end", step=40)
    run.ended(0, "done", "done", step=40)
    return run.folder.path


def test_the_page_is_self_contained(eventful: Path) -> None:
    assert main([str(eventful)]) == 0
    page = (eventful / "report.html").read_text(encoding="utf-8")
    parsed = outline(page)
    assert parsed.fetched == [] and "url(" not in page and "@import" not in page and "http" not in page
    assert "prefers-color-scheme:dark" in page
    assert "<script>alert(1)" not in page and "a &lt;b&gt; &amp; c" in page
    text = " ".join(parsed.text)
    for phrase in (
        *("step 40 of 40: done; exit code 0", "Loss", "Gradient norm", "Learning rate", "Tokens per second", "MFU"),
        *("Tokens per second and device", "num zeros", "Where the time went", "between attempts", "steps run again"),
        *("Attempts", "Evaluations", "Memory of the compiled step", "transient fault", "update skipped", "data.type"),
    ):
        assert phrase in text, phrase


def test_text_and_page_have_the_same_content(eventful: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(eventful), "--text"]) == 0
    text = capsys.readouterr().out
    assert not (eventful / "report.html").exists(), "--text writes no page without --output"
    for phrase in (
        *("step 40 of 40: done; exit code 0", "2.0750", "validation loss", "MFU", "steps run again"),
        "between attempts",
        *("transient fault", "update skipped", "data.type", "no end recorded: killed or crashed", "3.0 GiB"),
    ):
        assert phrase in text, phrase
    target = eventful.parent / "other.html"
    assert main(["--text", f"--output={target}", str(eventful)]) == 0
    assert "data.type" in target.read_text(encoding="utf-8")


def test_curves_have_marks_for_events(eventful: Path) -> None:
    history = read_history(eventful)
    charts = curves(history, attempts(history))
    assert [chart.title for chart in charts][:3] == ["Loss", "Gradient norm", "Learning rate"]
    loss = charts[0]
    assert loss.crosses == ((13, "nan"),)
    marks = {(mark.x, mark.kind) for mark in loss.marks}
    assert {(15, "resume"), (13, "warning"), (33, "warning"), (40, "save"), (40, "evaluate")} <= marks
    picture = loss.svg()
    assert picture.count('class="cross"') == 1 and "step 13: nan" in picture
    (curve,) = [chart for chart in charts if chart.title == "Tokens per second"]
    speed = curve.series[0].y
    assert np.isnan(speed[[0, 15]]).all(), "the speed excludes steps that compile"
    assert np.isfinite(np.delete(speed, [0, 15])).all()


def test_memory_is_drawn_if_it_is_known(fake_run: Callable) -> None:
    run = fake_run()
    run.attempt(0, 8)
    charts = {chart.title: chart for chart in curves(read_history(run.folder.path), [])}
    device = charts["Device memory"]
    assert [(series.name, set(series.y)) for series in device.series] == [
        ("in use after the step", {16}),
        ("peak so far", {32}),
    ]
    assert device.unit == "GiB" and set(charts["Host memory"].series[0].y) == {1}


def test_constant_and_unknown_metrics_have_no_curve(fake_run: Callable) -> None:
    run = fake_run()
    run.attempt(0, 8)
    titles = [chart.title for chart in curves(read_history(run.folder.path), [])]
    assert "Loss scale" not in titles and "TFLOP/s per device" not in titles and "MFU" in titles
    lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    for line in lines:
        line["mfu_causal"] = line["mfu_full"] = None
        line["loss_scale"] = 65536.0 if line["step"] < 4 else 32768.0
    run.folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    titles = [chart.title for chart in curves(read_history(run.folder.path), [])]
    assert "Loss scale" in titles and "TFLOP/s per device" in titles and "MFU" not in titles
    events = run.folder.events.read_text()
    for kind, shown in (("NVIDIA H100", True), ("cpu", False)):
        run.folder.events.write_text(events.replace('"devices":', f'"device_kind": "{kind}", "devices":'))
        history = read_history(run.folder.path)
        assert ("TFLOP/s per device" in [chart.title for chart in curves(history, [])]) == shown
        assert ("TFLOP/s per device" in [name for name, *_ in summarize(history, routine=1).figures]) == shown


def test_front_door(tmp_path: Path, eventful: Path) -> None:
    def run(*phrase: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-X", "importtime", "-m", "megajax.report", *phrase]
        return subprocess.run(command, capture_output=True, text=True, timeout=100)

    refused = run(str(tmp_path))
    assert refused.returncode == 2 and "is not a run" in refused.stderr and "Traceback" not in refused.stderr
    assert run().returncode == 2
    shown = run("--help")
    assert shown.returncode == 0 and "--output" in shown.stdout
    assert "dataclasses" in shown.stderr and not {"jax", "numpy"} & set(shown.stderr.split())
    written = run("--output", str(tmp_path / "page.html"), str(eventful))
    assert written.returncode == 0 and (tmp_path / "page.html").exists(), written.stderr


def test_a_page_that_cannot_be_written(eventful: Path, tmp_path: Path) -> None:
    with user_error():
        main([str(eventful), f"--output={tmp_path}/no/such/folder/page.html"])


@pytest.mark.slow
def test_two_hundred_thousand_steps_take_seconds(tmp_path: Path) -> None:
    line = {
        **{"step": 0, "loss": 2.5, "loss_hex": "0x1.4p+1", "grad_norm": 0.7, "lr": 3e-4, "consumed_samples": 1},
        **{"consumed_tokens": 1, "step_seconds": 0.5, "tokens_per_second": 1e6, "tokens_per_second_per_device": 1e5},
        **{"tflops_per_device_causal": 400.0, "tflops_per_device_full": 410.0, "mfu_causal": 0.4, "mfu_full": 0.41},
        **{"loss_scale": 1.0, "skipped": False, "seconds_data_wait": 0.001},
    }
    random = np.random.default_rng(0).normal(size=200_000).tolist()
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, noise in enumerate(random, 1):
            file.write(json.dumps(line | {"step": step, "loss": 2.5 + 0.1 * noise + 10 / step}) + "\n")
    start = time.process_time()
    assert main([str(tmp_path)]) == 0
    assert time.process_time() - start < 10
    assert (tmp_path / "report.html").stat().st_size < 3e6
