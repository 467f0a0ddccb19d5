"""Answers of the routes, read by the official client where it has the route; and routes that there are not."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import jsonschema
import openai
import pytest
from served import Running
from waiting import wait_until

import megajax
from megajax.server.fields import CHAT
from megajax.server.request_values import Field

BOARD = Path(__file__).parents[2] / "launch/grafana_serving.json"
CHATS = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(served: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=5)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abcab", "length")
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 5)
    assert answer.model == "tiny" and answer.object == "text_completion"
    assert client.completions.create(model="tiny", prompt="ab").choices[0].text == "ab" * 8


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["aba", "aba"]),
        (["ab", "cd"], ["aba", "aba", "cdc", "cdc"]),
        ([97, 98], ["aba", "aba"]),
        ([[97, 98], [99, 100]], ["aba", "aba", "cdc", "cdc"]),
    ],
)
def test_prompts_of_every_kind_and_several_answers(
    client: openai.OpenAI, prompt: str | list[str] | list[int] | list[list[int]], texts: list[str]
) -> None:
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=3, n=2)
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))
    assert [choice.text for choice in answer.choices] == texts


def test_echo_and_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="h\u00e9", max_tokens=2, echo=True, logprobs=2)
    choice = answer.choices[0]
    assert choice.text == "h\u00e9h\ufffd" and choice.logprobs
    assert choice.logprobs.tokens == ["h", "bytes:\\xc3", "bytes:\\xa9", "h", "bytes:\\xc3"]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5]
    assert choice.logprobs.top_logprobs and choice.logprobs.top_logprobs[3] == {"h": -0.5, "i": -1.5}
    assert choice.logprobs.text_offset == [0, 1, 1, 2, 3]
    only = client.completions.create(model="tiny", prompt="abc", max_tokens=0, echo=True, logprobs=0)
    assert only.choices[0].text == "abc" and only.choices[0].logprobs
    assert only.choices[0].logprobs.token_logprobs == [None, -0.5, -0.5]
    plain = client.completions.create(model="tiny", prompt="abc", max_tokens=2, echo=True)
    assert (plain.choices[0].text, plain.choices[0].logprobs) == ("abcab", None)


def test_streams_are_the_answers_in_pieces(client: openai.OpenAI) -> None:
    events = list(client.completions.create(model="tiny", prompt="h\u00e9", max_tokens=9, stream=True, n=2))
    for number in range(2):
        pieces = [choice for event in events for choice in event.choices if choice.index == number]
        assert "".join(piece.text for piece in pieces) == "h\u00e9" * 3
        assert [piece.finish_reason for piece in pieces][-1] == "length"
    scored = client.completions.create(model="tiny", prompt="ab", max_tokens=2, stream=True, echo=True, logprobs=1)
    choices = [event.choices[0] for event in scored]
    assert "".join(choice.text for choice in choices) == "abab"
    # A slow server puts several tokens into one event.
    offsets = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset or ()]
    assert offsets == [0, 1, 2, 3]
    usage_stream = client.completions.create(
        model="tiny", prompt="ab", max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    *_, last = usage_stream
    assert not last.choices and last.usage and last.usage.total_tokens == 6


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_across_tokens(client: openai.OpenAI, stream: bool) -> None:
    body = client.completions.create(
        model="tiny", prompt="a\u2713b", max_tokens=50, stop=["x", "\u2713ba"], stream=stream
    )
    events = list(body) if stream else [body]
    choices = [event.choices[0] for event in events]
    assert "".join(choice.text for choice in choices) == "a" and choices[-1].finish_reason == "stop"


def test_chats(client: openai.OpenAI) -> None:
    text = "user: hi\nassistant: "
    answer = client.chat.completions.create(model="tiny", messages=CHATS, max_tokens=8, logprobs=True, top_logprobs=1)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", text[:8])
    assert choice.logprobs and choice.logprobs.content
    entry = choice.logprobs.content[0]
    assert (entry.token, entry.bytes, entry.top_logprobs[0].token) == ("u", [ord("u")], "u")
    events = list(client.chat.completions.create(model="tiny", messages=CHATS, max_completion_tokens=8, stream=True))
    deltas = [event.choices[0].delta for event in events]
    assert deltas[0].role == "assistant" and "".join(delta.content or "" for delta in deltas) == text[:8]
    assert events[-1].choices[0].finish_reason == "length"
    parts = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    answer = client.chat.completions.create(model="tiny", messages=parts, max_tokens=10)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "system: ab"


def test_names_of_special_tokens_are_text(served: Running) -> None:
    """The byte tokenizer has none; the plain twin is used unless the field says otherwise."""
    body = {"prompt": "</s>"}
    tokens = served.ask("/tokenize", body).json()
    assert tokens == {"tokens": list(b"</s>"), "count": 4, "max_model_len": 4096}
    assert served.ask("/tokenize", body | {"special_tokens": True, "add_special_tokens": False}).json() == tokens
    assert served.ask("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "</s>"}
    chat = served.ask("/tokenize", {"messages": CHATS}).json()["tokens"]
    assert bytes(chat) == b"user: hi\nassistant: "
    for invalid_body in ({}, {"prompt": "a", "messages": CHATS}, {"prompt": 1}, {"prompt": "a", "x": 1}):
        assert served.ask("/tokenize", invalid_body).status_code == 400
    for tokens in ([257], [-1], ["a"], [True], None):
        assert served.ask("/detokenize", {"tokens": tokens}).status_code == 400


def test_the_route_of_megatron(served: Running) -> None:
    body = {"prompts": ["ab", "c"], "tokens_to_generate": 3, "logprobs": True, "top_k": 1, "random_seed": 5}
    answer = served.ask("/api", body, "PUT").json()
    assert answer["text"] == ["ababa", "cccc"] and answer["segments"][1] == ["c"] * 4
    assert answer["tokens"][0] == list(b"ababa")
    assert [len(row) for row in answer["logprobs"]] == [4, 3]
    with_bos = served.ask("/api", {"prompts": ["", "a"], "add_BOS": True, "tokens_to_generate": 2}, "PUT").json()
    assert with_bos["tokens"] == [[256, 256], [256, 97, 256]] and "logprobs" not in with_bos
    only = served.ask("/api", {"prompts": ["abc"], "tokens_to_generate": 0, "logprobs": True}, "PUT").json()
    assert only["text"] == ["abc"] and len(only["logprobs"][0]) == 2
    line = served.ask("/api", {"prompts": ["a\nb"], "stop_on_eol": True}, "PUT").json()
    assert line["text"] == ["a\nba"]


def test_beams_of_megatron(served: Running) -> None:
    answer = served.ask("/api", {"prompts": ["ab"], "beam_width": 2, "tokens_to_generate": 4}, "PUT").json()
    assert answer["text"] == ["ababab", "ababac"] and answer["scores"] == [-0.5, -0.75]
    longer = {"prompts": ["ab"], "beam_width": 2, "tokens_to_generate": 4, "length_penalty": 2.0}
    assert served.ask("/api", longer, "PUT").json()["scores"] == [-2 / 16, -3 / 16]


def test_metrics(served: Running) -> None:
    served.complete(prompt="abc", max_tokens=3)
    served.ask("/no/such\nroute".replace("\n", "%0a"), method="GET")
    lines, values = served.metrics()
    assert all(name.startswith(("megajax_", "vllm:")) and not name.endswith("_created") for name in values)
    assert values['megajax_requests_total{code="200",route="/v1/completions"}'] >= 1
    assert values['megajax_requests_total{code="404",route="other"}'] >= 1
    assert values['megajax_blocks{model="tiny"}'] == served.device.blocks
    counts = [value for name, value in values.items() if name.startswith("megajax_request_seconds_bucket")]
    assert counts == sorted(counts) and counts[-1] == values["megajax_request_seconds_count"] > 0
    assert values["megajax_time_per_token_seconds_count"] >= 2
    assert 'megajax_request_seconds_bucket{le="1"}' in values and "# TYPE megajax_requests gauge" in lines


def test_the_metrics_of_vllm(served: Running) -> None:
    served.complete(prompt="abc" * 20, max_tokens=3)
    lines, values = served.metrics()
    label = '{model_name="tiny"}'
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f"# TYPE vllm:{name} gauge" in lines and values[f"vllm:{name}{label}"] == 0
    for name in ("prompt_tokens_total", "generation_tokens_total"):
        assert f"# TYPE vllm:{name} counter" in lines and values[f"vllm:{name}{label}"] > 3
    assert values['vllm:request_success_total{finished_reason="length",model_name="tiny"}'] >= 1
    seconds = {}
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time",
                 "request_decode_time", "inter_token_latency"):  # fmt: skip
        assert f"# TYPE vllm:{name}_seconds histogram" in lines
        assert values[f"vllm:{name}_seconds_count{label}"] >= 1
        assert f'vllm:{name}_seconds_bucket{{le="+Inf",model_name="tiny"}}' in values
        seconds[name] = values[f"vllm:{name}_seconds_sum{label}"]
    parts = seconds["request_queue_time"] + seconds["request_prefill_time"]
    # The threads of engine and server read their clocks at different moments, later on a busy machine.
    assert parts == pytest.approx(seconds["time_to_first_token"], rel=0.3, abs=0.1)


def test_the_page_requests_nothing_else(served: Running) -> None:
    answer = served.ask("/", method="GET")
    page, policy = answer.text, answer.headers["content-security-policy"]
    assert answer.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?://|<link|<img|<iframe|\bon\w+=|style=|innerHTML|eval\(", page)
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert f"{tag}-src 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    assert "access-control-allow-origin" not in answer.headers
    assert page == files("megajax.server").joinpath("page.html").read_text(encoding="utf-8")


def test_the_log_has_no_prompts(served: Running) -> None:
    served.log.clear()
    served.complete(prompt="secret", max_tokens=2, stop=["quiet"])
    served.complete(prompt="secret", bad="quiet")
    body = {"messages": CHATS, "max_tokens": 1}
    served.ask("/v1/chat/completions", body, headers={"authorization": "Bearer hidden"})
    # The line of the request before this test may be written after the log was cleared.
    assert wait_until(lambda: "/v1/chat/completions" in "".join(served.log))
    lines = served.log[-3:]
    assert len(lines) == 3 and not re.search("secret|quiet|hidden|hi\\b", "".join(lines))
    assert re.search(r'127\.0\.0\.1 POST /v1/completions 200 \S+s model="tiny" prompt_tokens=6 tokens=2', lines[0])
    assert " 400 " in lines[1]


def test_an_internal_error_is_json_without_details(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("the inside of the server")

    with monkeypatch.context() as patch:
        patch.setattr(served.worker, "submit", fail)
        answer = served.complete(prompt="a", max_tokens=1)
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert "inside" not in answer.text
    assert wait_until(lambda: "inside" in "".join(served.log))
    assert served.complete(prompt="a", max_tokens=1).status_code == 200


def test_health_and_version(served: Running) -> None:
    assert served.ask("/health", method="GET").json() == {"status": "ok"}
    assert served.ask("/version", method="GET").json() == {"version": megajax.__version__}


def test_the_board_shows_metrics_that_exist(served: Running) -> None:
    served.complete(prompt="abc", max_tokens=3)
    exposed = {name.partition("{")[0] for name in served.metrics()[1]}
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
