"""Invalid requests: each gets its status and the name of its field, and does not reach the engine."""

import json
import socket
import time
from contextlib import suppress
from typing import Any

import pytest
from served import Running
from waiting import wait_until

CHATS = [{"role": "user", "content": "a"}]


def error_of(answer: Any) -> dict[str, Any]:
    """The error's object, which every error has."""
    body = answer.json()
    assert body.keys() == {"error"} and {"type", "message", "param"} <= body["error"].keys()
    assert "Traceback" not in answer.text and body["error"]["message"]
    return body["error"]


BODIES: dict[str | None, tuple[bytes, ...]] = {
    None: (
        *(b"", b"{", b"[1]", b"1", b"null", b"[" * 60_000, b'{"a":' * 9_000),
        *(b'{"prompt":"a","temperature":NaN}', b'{"prompt":"a","temperature":-Infinity}'),
        *(b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b"}", b'{"prompt":"\xff"}'),
    ),
    "prompt": (
        *(b"{}", b'{"prompt":"\\ud800"}', b'{"prompt":"a","prompt":"b"}'),
        b'{"prompt":' + b"[" * 40 + b"]" * 40 + b"}",
        *(
            b'{"prompt":%b}' % value
            for value in (
                *(b"null", b'""', b"[]", b'["a",""]', b'["a",1]', b'[1,"a"]', b"[1,true]", b"[1.5]", b"[-1]"),
                *(b"[257]", b"[[97],[999999999999999999999]]", b'[["a"]]', b"[%b]" % b",".join([b'"a"'] * 9)),
                b'{"a":1}',
            )
        ),
    ),
}
"""Invalid field, None for the whole -> bodies of /v1/completions."""


@pytest.mark.parametrize(
    ("body", "param"), [(body, param) for param, bodies in BODIES.items() for body in bodies], ids=lambda _: ""
)
def test_invalid_bodies(served: Running, body: bytes, param: str | None) -> None:
    answer = served.ask("/v1/completions", body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


OPENAI: dict[str, tuple[Any, ...]] = {
    "x": (1,),
    "max_tokens": (True, "5", 1.5, -1, 10**12, [1]),
    "temperature": (-0.1, 1e400, "1"),
    "top_p": (0,),
    "top_k": (1.0,),
    "min_p": (2,),
    "seed": (2**70, -1),
    "n": (0, 10_000),
    "best_of": (10_000,),
    "logprobs": (100_000,),
    "echo": (1, "true"),
    "stream": ("yes",),
    "stop": (5, "", ["a", 1], ["a"] * 10_000, ["a" * 5000]),
    "stop_token_ids": ([1.0], [-1]),
    "logit_bias": ({"a": 1}, {"1": 1000}, {"99999999999": 1}, [1]),
    "stream_options": ({"include_usage": False}, 5),
    "response_format": (5, {"type": "text", "json_schema": {"schema": {}}}, {"type": "json_schema"}),
    "structured_outputs": ({}, {"json": {}, "regex": "a"}),
    "guided_choice": ([], [1]),
    "guided_json": ("{", "1"),
    "use_beam_search": (True,),
    "return_token_ids": (1,),
    "prompt_logprobs": (-1, 21),
    "metadata": ("a",),
    "suffix": ("b",),
    "allowed_token_ids": ([], [257], ["a"]),
    "bad_words": (["a", " "], ["a"] * 65, ["a" * 33], "a"),
    "truncate_prompt_tokens": (0, -2, 1.5, True),
    "user": (7,),
    "model": (7,),
}
CHAT_FIELDS = {
    "tools": ([{"type": "function", "function": {"name": "f"}}],),
    "tool_choice": ("required",),
    "modalities": (["text", "audio"],),
    "chat_template_kwargs": ({"messages": []}, 5),
    "continue_final_message": (1,),
    "top_logprobs": (2,),
    "max_completion_tokens": (-2,),
    "chat_template": ("x",),
    "stream_options": ({"include_usage": True},),
    "messages": ([], "hi"),
}
MEGATRON = {
    "prompts": ("a", [], [1], [""], ["a"] * 9),
    "tokens_to_generate": (-1, 0, "5"),
    "temperature": (0, 101),
    "top_k": (1001,),
    "top_p": (1.5,),
    "prevent_newline_after_colon": (True,),
    "add_BOS": (1,),
    "random_seed": (-1,),
    "beam_width": (0,),
    "stop_token": (1.0,),
    "max_len": (5,),
    "sentences": (["a"],),
    "temprature": (1,),
}
ROUTES = (
    ("/v1/completions", {"prompt": "a"}, OPENAI | {"logprobs": (100_000, True)}),
    ("/v1/chat/completions", {"messages": CHATS}, OPENAI | CHAT_FIELDS),
    ("/api", {"prompts": ["a"]}, MEGATRON),
)
"""Route, a valid body, and field -> values that it rejects."""


@pytest.mark.parametrize(
    ("route", "body", "field", "values"),
    [(route, body, field, values) for route, body, fields in ROUTES for field, values in fields.items()],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_fields(served: Running, route: str, body: dict[str, Any], field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        text = json.dumps(body | {field: value}).replace("Infinity", "1e400")
        answer = served.ask(route, text.encode(), "PUT" if route == "/api" else "POST")
        assert answer.status_code == 400, answer.text
        error = error_of(answer)
        assert error["param"] == field and (field in error["message"] or route == "/api")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [*CHATS, {"role": "user", "content": "a", "x": 1}]}, "messages[1].x"),
        ({"messages": CHATS, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": CHATS, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": CHATS, "response_format": {"type": "xml"}}, "response_format.type"),
        ({"messages": CHATS, "guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"messages": CHATS, "structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"messages": CHATS, "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "a"}}]}]},
         "messages[0].content[0].type"),
        ({"messages": CHATS, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": CHATS, "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"messages": CHATS, "response_format": {"type": "json_schema", "json_schema": {}}},
         "response_format.json_schema.schema"),
        ({}, "messages"),
        ({"prompts": ["a"], "top_p": 0.5, "top_k": 5}, "top_p"),
        ({"prompts": ["a"], "top_p": 0.5, "top_p_decay": 0.1}, "top_p_decay"),
        ({"prompts": ["a", "b"], "beam_width": 2}, "prompts"),
    ],
)  # fmt: skip
def test_invalid_messages_and_combinations(served: Running, body: dict[str, Any], param: str) -> None:
    """Chats and PUT /api refuse them."""
    answer = served.ask("/api", body, "PUT") if "prompts" in body else served.ask("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


def test_an_invalid_guide_is_an_error_of_its_field(served: Running) -> None:
    for body, param in (({"guided_regex": "(("}, "guided_regex"), ({"structured_outputs": {"regex": "(("}},
                                                                    "structured_outputs")):  # fmt: skip
        error = error_of(served.complete(prompt="a", **body))
        assert (error["param"], error["message"]) == (param, f"{param} regular expression: unclosed group")


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
    assert time.monotonic() - began < 100


def test_too_large_headers_and_other_protocols(served: Running) -> None:
    start = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "
    for head in (start + b"y" * 5000, start + b"y" * 4090 + b"\r\n\r\n", start + b"y" * 50_000 + b"\r\n\r\n"):
        assert raw(served, head).startswith(b"HTTP/1.1 431")
    answer = served.ask("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"x": "y" * 4096})
    assert answer.status_code == 431 and "4,096 bytes" in error_of(answer)["message"]
    assert served.ask("/health?" + "x" * 4096, method="GET").status_code == 431
    assert raw(served, start + b"y" * 3500 + b"\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert raw(served, b"\x16\x03\x01\x02\x00\x01\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_more_connections_than_allowed(served: Running) -> None:
    port = int(served.url.rpartition(":")[2])
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(110)]
    assert any(connection.recv(100).startswith(b"HTTP/1.1 503") for connection in connections[100:])
    for connection in connections:
        connection.close()
    # The server may not have seen yet that they are closed.
    assert wait_until(lambda: served.complete(prompt="a", max_tokens=1).status_code == 200)


def raw(served: Running, data: bytes, drip: bytes = b"") -> bytes:
    """What the server sends until it closes, or until a minute has passed.

    drip: sent every 0.1 s meanwhile.
    """
    received = b""
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as connection:
        connection.sendall(data)
        connection.settimeout(0.1)
        end = time.monotonic() + 60
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
