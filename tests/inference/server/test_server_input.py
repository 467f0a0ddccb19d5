"""Invalid requests: each gets its status and the name of its field, and does not reach the engine."""

import json
import socket
import time
from contextlib import suppress
from typing import Any

import pytest
from served import Running

from megajax.inference.sampling_settings import LIMITS, Sampling
from megajax.inference.server.body import CHAT, COMPLETIONS, Field, RequestError, Values

CHATS = [{"role": "user", "content": "a"}]


def error_of(answer: Any) -> dict[str, Any]:
    """The error's object, which every error has."""
    body = answer.json()
    assert body.keys() == {"error"} and {"type", "message", "param"} <= body["error"].keys()
    assert "Traceback" not in answer.text and body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[1]", None),
        (b"1", None),
        (b"null", None),
        (b"[" * 60_000, None),
        (b'{"prompt":' + b"[" * 40 + b"]" * 40 + b"}", "prompt"),
        (b'{"a":' * 9_000, None),
        (b'{"prompt":"\xff"}', None),
        (b'{"prompt":"\\ud800"}', "prompt"),
        (b'{"prompt":"a","prompt":"b"}', "prompt"),
        (b'{"prompt":"a","temperature":NaN}', None),
        (b'{"prompt":"a","temperature":-Infinity}', None),
        (b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b"}", None),
        (b"{}", "prompt"),
        (b'{"prompt":null}', "prompt"),
        (b'{"prompt":""}', "prompt"),
        (b'{"prompt":[]}', "prompt"),
        (b'{"prompt":["a",""]}', "prompt"),
        (b'{"prompt":["a",1]}', "prompt"),
        (b'{"prompt":[1,"a"]}', "prompt"),
        (b'{"prompt":[1,true]}', "prompt"),
        (b'{"prompt":[1.5]}', "prompt"),
        (b'{"prompt":[-1]}', "prompt"),
        (b'{"prompt":[257]}', "prompt"),
        (b'{"prompt":[[97],[999999999999999999999]]}', "prompt"),
        (b'{"prompt":[["a"]]}', "prompt"),
        (b'{"prompt":["a","a","a","a","a","a","a","a","a"]}', "prompt"),
        (b'{"prompt":{"a":1}}', "prompt"),
    ],
)
def test_invalid_bodies(served: Running, body: bytes, param: str | None) -> None:
    answer = served.ask("/v1/completions", body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("x", 1),
        ("debug_fname", "/tmp/a"),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("max_tokens", -1),
        ("max_tokens", 10**12),
        ("max_tokens", None),
        ("max_tokens", [1]),
        ("temperature", -0.1),
        ("temperature", 1e400),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", 1.0),
        ("min_p", 2),
        ("seed", 2**70),
        ("seed", -1),
        ("n", 0),
        ("n", 10_000),
        ("best_of", 10_000),
        ("logprobs", 100_000),
        ("logprobs", True),
        ("echo", 1),
        ("echo", "true"),
        ("stream", "yes"),
        ("stop", 5),
        ("stop", ""),
        ("stop", ["a", 1]),
        ("stop", ["a"] * 10_000),
        ("stop", ["a" * 5000]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 1000}),
        ("logit_bias", {"99999999999": 1}),
        ("logit_bias", [1]),
        ("stream_options", {"x": 1}),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "text", "json_schema": {}}),
        ("suffix", "b"),
        ("user", 7),
        ("model", 7),
    ],
)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_invalid_fields(served: Running, route: str, field: str, value: Any) -> None:
    asked = {"prompt": "a"} if route == "/v1/completions" else {"messages": CHATS}
    if route == "/v1/chat/completions" and (field, value) == ("logprobs", True):
        return
    body = json.dumps(asked | {field: value}).replace("Infinity", "1e400")
    answer = served.ask(route, body.encode())
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["param"] == field and field in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [*CHATS, {"role": "user", "content": "a", "x": 1}]}, "messages[1].x"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1"}}]}]},
         "messages[0].content[0]"),
        ({"messages": CHATS, "tools": []}, "tools"),
        ({"messages": CHATS, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": CHATS, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": CHATS, "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"messages": CHATS, "max_completion_tokens": -2}, "max_completion_tokens"),
        ({"messages": CHATS, "chat_template": "x"}, "chat_template"),
        ({"messages": CHATS, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": CHATS, "response_format": {"type": "json_schema", "json_schema": {}}},
         "response_format.json_schema"),
    ],
)  # fmt: skip
def test_invalid_chats(served: Running, body: dict[str, Any], param: str) -> None:
    answer = served.ask("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompts"),
        ({"prompts": "a"}, "prompts"),
        ({"prompts": []}, "prompts"),
        ({"prompts": [1]}, "prompts"),
        ({"prompts": [""]}, "prompts"),
        ({"prompts": ["a"] * 9}, "prompts"),
        ({"prompts": ["a"], "tokens_to_generate": -1}, "tokens_to_generate"),
        ({"prompts": ["a"], "tokens_to_generate": 0}, "tokens_to_generate"),
        ({"prompts": ["a"], "tokens_to_generate": "5"}, "tokens_to_generate"),
        ({"prompts": ["a"], "temperature": 0}, "temperature"),
        ({"prompts": ["a"], "temperature": 101}, "temperature"),
        ({"prompts": ["a"], "top_k": 1001}, "top_k"),
        ({"prompts": ["a"], "top_p": 1.5}, "top_p"),
        ({"prompts": ["a"], "top_p": 0.5, "top_k": 5}, "top_p"),
        ({"prompts": ["a"], "top_p": 0.5, "top_p_decay": 0.1}, "top_p_decay"),
        ({"prompts": ["a"], "prevent_newline_after_colon": True}, "prevent_newline_after_colon"),
        ({"prompts": ["a"], "add_BOS": 1}, "add_BOS"),
        ({"prompts": ["a"], "random_seed": -1}, "random_seed"),
        ({"prompts": ["a"], "beam_width": 0}, "beam_width"),
        ({"prompts": ["a", "b"], "beam_width": 2}, "prompts"),
        ({"prompts": ["a"], "stop_token": 1.0}, "stop_token"),
        ({"prompts": ["a"], "max_len": 5}, "max_len"),
        ({"prompts": ["a"], "sentences": ["a"]}, "sentences"),
        ({"prompts": ["a"], "temprature": 1}, "temprature"),
    ],
)
def test_answers_of_megatron_with_status_200(served: Running, body: dict[str, Any], param: str) -> None:
    answer = served.ask("/api", body, "PUT")
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


@pytest.mark.parametrize("name", LIMITS)
def test_both_edges_of_each_limit(name: str) -> None:
    limit, fields = LIMITS[name], CHAT if name == "logprobs" else COMPLETIONS
    field = "top_logprobs" if name == "logprobs" else name
    if not isinstance(fields.get(field), Field):
        assert name == "prompt_logprobs"
        return
    base = Sampling(max_tokens=2**20, beams=2 if name == "length_penalty" else 1)
    step = 1 if limit.kind is int else 1e-6
    for value in (limit.least + step * limit.above, limit.most):
        checked = Values({field: limit.kind(value)}, fields)
        assert getattr(checked.sampling(base), name) == value
    for value in (limit.least if limit.above else limit.least - step, limit.most + max(step, limit.most * 1e-9), True):
        checked = Values({field: value if value is True else limit.kind(value)}, fields)
        with pytest.raises(RequestError) as caught:
            checked.sampling(base)
        assert caught.value.param == field


def test_unknown_models_and_routes(served: Running) -> None:
    response = served.complete(prompt="a", model="gpt-5")
    assert (response.status_code, error_of(response)["param"]) == (404, "model")
    assert served.ask("/v1/models/none", method="GET").status_code == 404
    assert error_of(served.ask("/nowhere", {}))["type"] == "not_found_error"
    assert served.ask("/../../etc/passwd", method="GET").status_code == 404
    refused = served.ask("/v1/completions", method="GET")
    assert refused.status_code == 405 and refused.headers["allow"] == "POST" and error_of(refused)
    assert served.ask("/api", {}, "POST").status_code == 405


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_content_types(served: Running, kind: str) -> None:
    answer = served.ask("/v1/completions", b'{"prompt":"a"}', headers={"content-type": kind})
    assert answer.status_code == 400 and "application/json" in error_of(answer)["message"]


def test_prompts_that_are_too_long(served: Running) -> None:
    for body in ({"prompt": "a" * 4096}, {"prompt": [[97], [97] * 4096]}):
        answer = served.complete(**body, max_tokens=1)
        assert answer.status_code == 400 and error_of(answer)["param"] == "prompt"
    answer = served.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 5000}]})
    assert error_of(answer)["param"] == "messages"
    assert served.all_free()


def test_large_bodies_are_refused_unread(served: Running) -> None:
    assert served.ask("/v1/completions", b"x" * 65_537).status_code == 413
    answer = raw(served, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                 b"Content-Length: 1000000000\r\n\r\n")  # fmt: skip
    assert answer.startswith(b"HTTP/1.1 413") and b'"error"' in answer
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    answer = raw(served, head + b"1000\r\n" + b"x" * 4096 + b"\r\n" + 30 * (b"1000\r\n" + b"x" * 4096 + b"\r\n"))
    assert answer.startswith(b"HTTP/1.1 413")


def test_slow_requests(served: Running) -> None:
    began = time.monotonic()
    body = raw(served, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
               b"Content-Length: 100\r\n\r\n{")  # fmt: skip
    assert body.startswith(b"HTTP/1.1 408") and b"timeout_error" in body
    head = raw(served, b"POST /v1/completions HTTP/1.1\r\nHost: ", drip=b"x")
    assert head.startswith(b"HTTP/1.1 408")
    assert raw(served, b"") == b""
    assert time.monotonic() - began < 12


def test_too_large_headers_and_other_protocols(served: Running) -> None:
    for data in (b"GET / HTTP/1.1\r\nX: " + b"y" * 5000, b"\x16\x03\x01\x02\x00\x01\r\n\r\n"):
        assert raw(served, data).startswith(b"HTTP/1.1 400")


def test_more_connections_than_allowed(served: Running) -> None:
    port = int(served.url.rpartition(":")[2])
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(110)]
    assert any(connection.recv(100).startswith(b"HTTP/1.1 503") for connection in connections[100:])
    for connection in connections:
        connection.close()
    time.sleep(0.1)
    assert served.complete(prompt="a", max_tokens=1).status_code == 200


def raw(served: Running, data: bytes, drip: bytes = b"") -> bytes:
    """What the server sends until it closes, or until five seconds pass without data.

    drip: sent every 0.1 s meanwhile.
    """
    received = b""
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as connection:
        connection.sendall(data)
        connection.settimeout(0.1)
        end = time.monotonic() + 5
        while time.monotonic() < end and b"\r\n\r\n" not in received:
            try:
                part = connection.recv(65536)
            except TimeoutError:
                if drip:
                    connection.sendall(drip)
                continue
            if not part:
                break
            received += part
        connection.settimeout(0.3)
        with suppress(TimeoutError, ConnectionError):
            received += connection.recv(65536)
    return received
