"""The routes that say what the server is: /version, /metrics and /openapi.json; and routes that there are not."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
from served import Running

import megajax
from megajax.inference.server.fields import CHAT
from megajax.inference.server.values import Field

BOARD = Path(__file__).parents[3] / "launch/grafana_serving.json"


def test_health_and_version(served: Running) -> None:
    assert served.ask("/health", method="GET").json() == {"status": "ok"}
    assert served.ask("/version", method="GET").json() == {"version": megajax.__version__}


def test_the_board_shows_metrics_that_exist(served: Running) -> None:
    served.complete(prompt="abc", max_tokens=3)
    exposed = {re.split(r"[{ ]", line)[0] for line in served.ask("/metrics", method="GET").text.splitlines()}
    board = json.loads(BOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [variable["query"]["query"] for variable in board["templating"]["list"] if "datasource" in variable]
    for query in queries:
        names = re.findall(r"megajax_\w+", query)
        assert names and exposed.issuperset(names), query


def test_every_route_and_field_is_described(served: Running) -> None:
    described = served.ask("/openapi.json", method="GET").json()
    assert described["openapi"].startswith("3.1") and described["info"]["version"] == megajax.__version__
    for path, operations in described["paths"].items():
        for method in operations:
            answer = served.ask(path.replace("{name}", "tiny"), {} if method != "get" else None, method.upper())
            assert answer.status_code in (200, 400), path
    body = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator.check_schema(body)
    supported = {name for name, field in CHAT.items() if isinstance(field, Field)}
    assert body["properties"].keys() == supported and body["required"] == ["messages"]
    assert body["properties"]["stop"]["description"] == "a string or a list of strings"
    assert body["additionalProperties"] is False, "the server is strict"
    (parameter,) = described["paths"]["/v1/models/{name}"]["get"]["parameters"]
    assert parameter["name"] == "name"


@pytest.mark.parametrize(
    "path",
    ["/v1/responses", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/completions", "/chat/completions",
     "/ping", "/pause_generation", "/continue_generation"],
)  # fmt: skip
def test_there_is_one_name_for_each_route(served: Running, path: str) -> None:
    for method, body in (("POST", {}), ("GET", None)):
        answer = served.ask(path, body, method)
        assert answer.status_code == 404 and answer.json()["error"]["message"] == f"no route {path}"
    assert path not in served.ask("/openapi.json", method="GET").json()["paths"]
