"""The routes that say what the server is: /ping, /version and /openapi.json."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
from served import Running

import megajax
from megajax.inference.server.chat_fields import CHAT
from megajax.inference.server.fields import COMPLETIONS
from megajax.inference.server.openapi import object_schema
from megajax.inference.server.values import Unsupported

BOARD = Path(__file__).parents[3] / "launch/grafana_serving.json"
CHATS = [{"role": "user", "content": "hi"}]


def test_ping_and_version(served: Running) -> None:
    assert served.ask("/ping", method="GET").json() == served.ask("/health", method="GET").json() == {"status": "ok"}
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
    assert body["properties"].keys() == CHAT.keys() and body["required"] == ["messages"]
    assert "without effect" in body["properties"]["store"]["description"]
    assert "without effect" not in body["properties"]["model"]["description"]
    (parameter,) = described["paths"]["/v1/models/{name}"]["get"]["parameters"]
    assert parameter["name"] == "name"


def test_the_schema_and_the_server_agree(served: Running) -> None:
    """On bodies whose faults a schema can express."""
    chat = jsonschema.Draft202012Validator(object_schema(CHAT, strict=True))
    completions = jsonschema.Draft202012Validator(object_schema(COMPLETIONS, strict=True))
    fields: tuple[dict[str, Any], ...] = (
        *({}, {"max_tokens": 2}, {"max_tokens": "2"}, {"temperature": 101}, {"top_p": 0}, {"n": 2, "seed": None}),
        *({"stop": "a"}, {"stop": 5}, {"response_format": {"type": "xml"}}, {"response_format": {"type": "text"}}),
        *({"logit_bias": {"5": 1}}, {"unknown": 1}, {"user": "me"}, {"user": 5}, {"stream": None}, {"echo": None}),
    )
    for path, base, validator in (
        ("/v1/chat/completions", {"messages": CHATS}, chat),
        ("/v1/completions", {"prompt": "a"}, completions),
    ):
        for values in fields:
            body = {"max_tokens": 1} | base | values
            assert (served.ask(path, body).status_code == 200) is validator.is_valid(body), (body, path)
        assert not validator.is_valid({}) and served.ask(path, {}).status_code == 400
    for name in ("prompt", "messages"):
        assert not isinstance((COMPLETIONS | dict(CHAT))[name], Unsupported)
