"""Debian's `prometheus` and `promtool` on the metrics of a training run and of a server."""

import json
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request

import pytest
from gangs import REPOSITORY, TRAIN, free_port
from run_folder import steps

MISSING = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: apt-get install prometheus"),
]
VARIABLES = {"$__range_s": "60", "$__range": "1m", "$__rate_interval": "10s", "$run": "night", "$model": "night"}
"""What Grafana puts in place of its variables."""
UNKNOWN_HERE = {
    *("megajax_train_mfu_causal", "megajax_train_mfu_full"),
    *("megajax_train_memory_device", "megajax_train_memory_device_peak"),
    "megajax_goodput_lost_seconds",
}
"""Metrics that a CPU does not report, or an attempt before its end."""


def read(port: int, path: str, body: bytes | None = None) -> str:
    """The answer of an address on this machine; "" while nothing answers."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=100) as answer:
            return answer.read().decode()
    except OSError:
        return ""


def complaints(text: str) -> list[str]:
    """What `promtool check metrics` says, except that vLLM's names have a colon."""
    assert text.count("# HELP") > 15
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    lines = (checked.stdout + checked.stderr).splitlines()
    return [line for line in lines if not (line.startswith("vllm:") and line.endswith("should not contain ':'"))]


def test_prometheus_scrapes_a_run_and_its_server(start, tmp_path):
    pytest.importorskip("opentelemetry.exporter.prometheus")
    prometheus_port, trainer, server = (free_port() for _ in range(3))
    targets = {"job_name": "megajax", "static_configs": [{"targets": [f"127.0.0.1:{trainer}", f"127.0.0.1:{server}"]}]}
    config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [targets]}
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], check=True, capture_output=True)
    prometheus = start(
        "prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'series'}",
        f"--web.listen-address=127.0.0.1:{prometheus_port}", name="prometheus",
    )  # fmt: skip

    def series(expression: str) -> list[dict]:
        answer = read(prometheus_port, f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        return json.loads(answer)["data"]["result"] if answer else []

    def query(expression: str) -> dict[str, float]:
        """What tells series apart -> value."""
        names = ("phase", "split", "code", "instance")
        return {
            next(each["metric"][name] for name in names if name in each["metric"]): float(each["value"][1])
            for each in series(expression)
        }

    def empty_panels(board: str) -> set[str]:
        """Metrics in panels of a board for Grafana that show nothing."""
        expressions = re.findall(r'"expr": "((?:[^"\\]|\\.)*)"', (REPOSITORY / board).read_text())
        assert len(expressions) > 15
        for variable, value in VARIABLES.items():
            expressions = [expression.replace(variable, value) for expression in expressions]
        empty = [expression for expression in expressions if not series(expression.replace('\\"', '"'))]
        return {name for expression in empty for name in re.findall(r"megajax_\w+", expression)}

    run = tmp_path / "night"
    settings = ("--config=quickstart.py", "--steps=30", "--evaluation.every=10", "--resilience.inject=slow:step=1")
    telemetry = f"--logging.telemetry.prometheus=127.0.0.1:{trainer}"
    training = start(*TRAIN, *settings, f"--run_dir={run}", "--devices=cpu:1", telemetry, name="training")
    at = f"127.0.0.1:{trainer}"
    training.until(lambda: query('megajax_evaluation_loss{run="night"}') and query("megajax_train_step")[at] > 12)
    assert complaints(read(trainer, "/metrics")) == []
    lines = {step: line["loss"] for step, line in steps(run).items()}
    assert query('megajax_train_loss{run="night"}')[at] in lines.values()
    assert query("up")[at] == 1 and query('sum by (phase) (megajax_seconds_total{run="night"})')["compiling"] > 0
    # Steps wait 0.3 s for their rows: the rates of the phases are shares of the time.
    shares = query("rate(megajax_seconds_total[5s])")
    assert 0.1 < shares["data_wait"] <= shares["step"] < 1.5
    assert empty_panels("docs/grafana_board.json") == UNKNOWN_HERE
    assert training.wait() == 0, training.text

    words = ("--inference.rows=2", "--inference.template=plain", "--inference.warm_up=false", "--devices=cpu:1")
    serving = start(sys.executable, "-m", "megajax.serve", f"--run={run}", f"--port={server}", *words, name="serving")
    serving.until(lambda: '"ok"' in read(server, "/health"))
    answer = read(server, "/v1/completions", json.dumps({"prompt": "The king", "max_tokens": 9}).encode())
    tokens = json.loads(answer)["usage"]["completion_tokens"]
    at = f"127.0.0.1:{server}"
    serving.until(lambda: query("megajax_tokens_total").get(at) == tokens)
    assert complaints(read(server, "/metrics")) == []
    assert query('megajax_requests_total{route="/v1/completions"}') == {"200": 1}
    assert query("vllm:generation_tokens_total")[at] == tokens
    assert query("histogram_quantile(0.5, megajax_request_seconds_bucket)")[at] > 0
    serving.until(lambda: not empty_panels("launch/grafana_serving.json"))
    assert prometheus.process.poll() is None
