"""Metrics for Prometheus and OpenTelemetry, read back over HTTP, and the command for events."""

import gzip
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from gangs import free_port
from user_errors import user_error
from waiting import wait_until

from megajax.config.compose import problems_of
from megajax.metrics.config import LoggingConfig, TelemetryConfig
from megajax.metrics.event_hook import LOG, LOG_BYTES, POSITION, event_hook, handle_new_lines
from megajax.metrics.event_log import append_event
from megajax.metrics.record import EvaluationRecord
from megajax.metrics.run_folder import RunFolder

BOARD = Path(__file__).parents[2] / "docs" / "grafana_board.json"


def scrape(port: int) -> dict[str, float]:
    """Name with its labels -> value, from a Prometheus endpoint."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=100) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


@contextmanager
def collector():
    """An OTLP receiver on loopback: (its URL, [(path, decoded message)])."""
    metrics = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    traces = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    kinds = {"/v1/metrics": metrics.ExportMetricsServiceRequest, "/v1/traces": traces.ExportTraceServiceRequest}
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            message = kinds[self.path]()
            message.ParseFromString(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            received.append((self.path, message))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()


def sent(received: list, kind: str) -> list:
    """The "spans" or "metrics" that a collector has received."""
    messages = [message for path, message in received if path == ("/v1/traces" if kind == "spans" else "/v1/metrics")]
    resources = [each for message in messages for each in getattr(message, f"resource_{kind}")]
    return [item for each in resources for scope in getattr(each, f"scope_{kind}") for item in getattr(scope, kind)]


def test_prometheus_and_a_collector_get_steps_evaluations_and_events(tmp_path, step):
    pytest.importorskip("opentelemetry.exporter.prometheus")
    port = free_port()
    with collector() as (url, received):
        telemetry = TelemetryConfig(prometheus=f"127.0.0.1:{port}", otlp=url)
        with LoggingConfig(telemetry=telemetry).build(RunFolder.create(tmp_path / "night")) as writers:
            writers.event("start", step=0, setup_seconds=8.0)
            writers.event("compile", name="train_step", seconds=4.0)
            writers.log(step(1, phases={"data_wait": 0.25}))
            writers.log(step(2, loss=2.0, phases={"data_wait": 0.5, "save": 2.0, "save_max": 9.0}, skipped=True))
            writers.log(EvaluationRecord(step=2, split="code", loss=1.5))
            writers.event("evaluate", step=2, split="code", seconds=3.0, time=1000.0)
            writers.event("goodput", effective=0.9, lost_seconds={"saving": 7.0}, attempts=1)
            values = scrape(port)
    assert values['megajax_train_loss{run="night"}'] == 2.0
    assert values['megajax_evaluation_loss{run="night",split="code"}'] == 1.5
    assert values['megajax_steps_total{run="night",skipped="true"}'] == 1
    # Two steps of 0.5 s; the maximum over processes is no time of this process.
    phases = {name: value for name, value in values.items() if "seconds_total" in name}
    seconds = {"setup": 8.0, "compiling": 4.0, "step": 1.0, "data_wait": 0.75, "evaluation": 0.0, "save": 2.0}
    assert phases == {
        f'megajax_seconds_total{{phase="{phase}",run="night"}}': value for phase, value in seconds.items()
    }
    assert values['megajax_events_total{event="evaluate",run="night"}'] == 1
    assert values['megajax_goodput_lost_seconds{cause="saving",run="night"}'] == 7.0

    spans = sent(received, "spans")
    evaluation = next(span for span in spans if span.name == "evaluate")
    assert (evaluation.start_time_unix_nano, evaluation.end_time_unix_nano) == (997 * 10**9, 1000 * 10**9)
    attempt = next(span for span in spans if span.name == "attempt")
    assert {span.parent_span_id for span in spans if span is not attempt} == {attempt.span_id}
    exported = {metric.name for metric in sent(received, "metrics")}
    assert exported >= {
        "megajax.train.loss",
        "megajax.evaluation.perplexity",
        "megajax.seconds",
        "megajax.goodput.share",
    }


def test_the_board_shows_only_metrics_that_exist(tmp_path, step):
    pytest.importorskip("opentelemetry.exporter.prometheus")
    port = free_port()
    logging = LoggingConfig(telemetry=TelemetryConfig(prometheus=f"127.0.0.1:{port}"))
    with logging.build(RunFolder.create(tmp_path)) as writers:
        rates = step(1).rates
        known = dict.fromkeys(("mfu_causal", "mfu_full", "tflops_per_device_causal", "tflops_per_device_full"), 0.5)
        writers.log(
            step(1, rates=type(rates)(**{**asdict(rates), **known}), memory={"device": 1, "device_peak": 2, "host": 3})
        )
        writers.log(EvaluationRecord(step=2, split="validation", loss=1.5))
        writers.event("goodput", effective=0.9, lost_seconds={"saving": 7.0}, attempts=1)
        exported = {name.partition("{")[0] for name in scrape(port)}
    shown = set(re.findall(r"megajax_\w+", BOARD.read_text(encoding="utf-8")))
    assert shown and shown <= exported


@pytest.mark.slow
def test_an_unreachable_collector_is_told_once_and_a_taken_port_before_files(tmp_path, step, capfd, monkeypatch):
    pytest.importorskip("opentelemetry.exporter.prometheus")
    monkeypatch.setattr("megajax.metrics.prometheus_and_opentelemetry.EXPORT_SECONDS", 3)
    port = free_port()
    logging = LoggingConfig(telemetry=TelemetryConfig(otlp=f"http://127.0.0.1:{port}", every_seconds=1))
    with logging.build(RunFolder.create(tmp_path / "run")) as writers:
        writers.log(step(1))
        time.sleep(2.5)
    errors = capfd.readouterr().err
    assert errors.count("logging.telemetry.otlp") == 1 and "refused" in errors
    with ThreadingHTTPServer(("127.0.0.1", port), BaseHTTPRequestHandler):
        taken = LoggingConfig(telemetry=TelemetryConfig(prometheus=f"127.0.0.1:{port}"))
        with user_error("logging.telemetry.prometheus"):
            taken.build(RunFolder.create(tmp_path / "other"))
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({}, "neither"),
        ({"prometheus": "9464"}, "HOST:PORT"),
        ({"otlp": "https://user:secret@collector"}, "without credentials"),
        ({"otlp": "http://collector", "every_seconds": 0.0}, "at least 1"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, word):
    (problem,) = problems_of(TelemetryConfig(**settings))
    assert word in str(problem) and "secret" not in str(problem)


def test_the_command_runs_once_for_each_line_of_every_process_and_attempt(tmp_path):
    events = tmp_path / "events.jsonl"
    append_event(events, "before")
    command = 'echo "$MEGAJAX_EVENT $MEGAJAX_RUN"; cat; test $MEGAJAX_EVENT != crash'
    with event_hook(tmp_path, command):
        append_event(events, "start", step=3)
        wait_for(tmp_path / LOG, '"step": 3')
    # The run has ended: the launcher's line still counts.
    append_event(events, "crash")
    wait_for(tmp_path / LOG, "exit status 1")
    with events.open("a") as file:
        file.write('{"event": "half a li')
    handle_new_lines(tmp_path, command, 0)
    log = (tmp_path / LOG).read_text()
    assert [line for line in log.splitlines() if not line.startswith("{")] == [
        f"start {tmp_path}",
        f"crash {tmp_path}",
        f"megajax: event crash: Command '{command}' returned non-zero exit status 1.",
    ]
    assert [json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")] == ["start", "crash"]


def test_the_log_of_the_command_is_bounded_and_its_children_end_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("megajax.metrics.event_hook.COMMAND_SECONDS", 5)
    append_event(tmp_path / "events.jsonl", "start")
    mark = f"123.{os.getpid()}"
    handle_new_lines(tmp_path, f"yes | head -c 30000000; echo last; sleep {mark} & sleep {mark}", 0)
    log = (tmp_path / LOG).read_bytes()
    assert len(log) <= LOG_BYTES and b"last\nmegajax: event start: Command 'yes" in log and b"timed out after 5" in log
    assert subprocess.run(["pgrep", "-f", f"^sleep {mark}"], stdout=subprocess.DEVNULL).returncode == 1


def test_a_start_that_writes_no_line_leaves_its_folder_unchanged(tmp_path):
    append_event(tmp_path / "events.jsonl", "end")
    before = sorted(tmp_path.iterdir())
    with event_hook(tmp_path, "true"):
        time.sleep(1)
    assert sorted(tmp_path.iterdir()) == before
    assert not (tmp_path / POSITION).exists()


def test_the_command_outlives_a_killed_run(tmp_path):
    program = (
        "import os, signal, sys, time; from pathlib import Path\n"
        "from megajax.metrics.event_hook import event_hook\n"
        "from megajax.metrics.event_log import append_event\n"
        "run = Path(sys.argv[1])\n"
        "with event_hook(run, 'echo $MEGAJAX_EVENT'):\n"
        "    append_event(run / 'events.jsonl', 'start'); time.sleep(1)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=100)
    assert killed.returncode == -9
    append_event(tmp_path / "events.jsonl", "lost")
    wait_for(tmp_path / LOG, "start\nlost\n")


def wait_for(file: Path, text: str) -> None:
    assert wait_until(lambda: file.exists() and text in file.read_text(), 60), f"{text!r} is not in {file}"
