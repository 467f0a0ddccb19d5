"""Bodies that clients of other servers send are answered, and their fields have their effect."""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from served import Running, pieces, serving

from megajax.config.errors import UserError
from megajax.inference.request import Sampled, Sequence
from megajax.inference.sampling.guide import Guides
from megajax.inference.sampling_settings import Grammar, Sampling
from megajax.server.config import ServerConfig
from megajax.server.fields import GUIDE_CHOICE
from megajax.server.server import described
from megajax.tokenizers.chat_template import TEMPLATES

CHATS: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def lenient() -> Iterator[Running]:
    """A server with the default settings, whose template knows tools."""
    with serving(ServerConfig(), template=TEMPLATES["plain"] + "{# tools <tool_call> #}") as running:
        yield running


def function(**more: Any) -> dict[str, Any]:
    """A tool of a request."""
    return {"type": "function", "function": {"name": "f", "description": "", "parameters": SCHEMA, **more}}


CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"place": "Rome"}'}}
STRICT = {"name": "final_output", "strict": True, "schema": SCHEMA | {"title": "A", "additionalProperties": False}}
BODIES: dict[str, dict[str, Any]] = {
    "the openai client": {
        **{"messages": CHATS, "model": "tiny", "max_tokens": 4, "frequency_penalty": None, "store": False},
        **{"logit_bias": {"97": -100, "98": 100}, "metadata": {"job": "a"}, "service_tier": "auto", "user": "me"},
        **{"parallel_tool_calls": True, "tool_choice": "none", "tools": [], "modalities": ["text"], "verbosity": "low"},
        **{"reasoning_effort": "medium", "prompt_cache_key": "a", "safety_identifier": "b"},
        "response_format": {"type": "text"},
    },
    "ChatOpenAI of LangChain": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": "hello", "tool_calls": None, "refusal": None, "function_call": None},
            {"role": "user", "content": "go on", "name": None},
        ],
        **{"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.7, "n": 1},
        **{"max_completion_tokens": 4, "disable_streaming": False},
        **dict.fromkeys(("top_p", "seed", "stop", "logprobs", "top_logprobs", "presence_penalty", "reasoning_effort")),
    },
    "ChatOpenAI with tools": {
        "messages": [
            {"content": "the weather?", "role": "user"},
            {"content": None, "role": "assistant", "tool_calls": [CALL]},
            {"content": "sun", "role": "tool", "tool_call_id": "c"},
        ],
        **{"model": "tiny", "stream": False, "max_completion_tokens": 4, "parallel_tool_calls": False},
        "tools": [function()],
    },
    "the Agents SDK with tools and a type of answer": {
        "messages": [
            {"content": "Be brief", "role": "developer"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello", "annotations": [], "audio": None},
            {"role": "user", "content": "more"},
        ],
        **{"model": "tiny", "max_tokens": 4, "tools": [function(strict=True)], "tool_choice": "auto"},
        **dict.fromkeys(
            ("stream_options", "verbosity", "prompt_cache_retention", "metadata", "extra_headers", "store")
        ),
        "response_format": {"type": "json_schema", "json_schema": STRICT},
    },
    "vLLM": {
        **{"messages": CHATS, "max_tokens": 4, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0},
        **{"stop_token_ids": [], "ignore_eos": False, "include_stop_str_in_output": False, "skip_special_tokens": True},
        **{"spaces_between_special_tokens": True, "add_special_tokens": False, "use_beam_search": False, "priority": 0},
        **dict.fromkeys(("best_of", "guided_json", "structured_outputs", "truncate_prompt_tokens")),
        "chat_template_kwargs": {"enable_thinking": False},
    },
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_clients(lenient: Running, name: str) -> None:
    answer = lenient.ask("/v1/chat/completions", BODIES[name])
    assert answer.status_code == 200, answer.text
    assert pieces(answer)[-1]["usage"]["completion_tokens"] == 4


def test_unknown_fields_are_reported_once(lenient: Running) -> None:
    for number in range(3):
        messages = [{"role": "user", "content": "a", "mood": number}] * 2
        body = {"messages": messages, "max_tokens": 1, "temprature": 1, "a\nb": 1, "response_format": {"type": "text"}}
        assert lenient.ask("/v1/chat/completions", body).status_code == 200
    warnings = [line for line in lenient.log if line.startswith("warning")]
    assert sum("'temprature': did you mean temperature?" in line for line in warnings) == 1
    assert sum("'messages[].mood'" in line for line in warnings) == 1
    assert sum("'a\\nb'" in line for line in warnings) == 1
    assert all("server.strict" in line and "\n" not in line for line in warnings)


def sampling_of(lenient: Running, body: dict[str, Any]) -> Sequence:
    """The first row of a chat."""
    answer = lenient.ask("/v1/chat/completions", {"messages": CHATS, "max_tokens": 1} | body)
    assert answer.status_code == 200, answer.text
    return lenient.device.seen[0]


@pytest.mark.parametrize(
    ("body", "guide"),
    [
        ({"guided_json": SCHEMA}, SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, SCHEMA),
        ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
        ({"guided_regex": "[ab]+"}, "[ab]+"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "a"),
        ({"guided_choice": ["a", "b+c"]}, "a|b\\+c"),
        ({"structured_outputs": {"choice": ["a.b"]}}, "a\\.b"),
        ({"regex": "a"}, "a"),
        ({"json_schema": json.dumps(SCHEMA)}, SCHEMA),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"response_format": {"type": "json_schema", "json_schema": STRICT}}, STRICT["schema"]),
    ],
)
def test_guides_of_openai_and_vllm(lenient: Running, body: dict[str, Any], guide: Any) -> None:
    """They keep the order of a schema's properties."""
    assert json.dumps(sampling_of(lenient, body).sampling.guide) == json.dumps(guide)


def test_settings_of_vllm(lenient: Running) -> None:
    sampling = sampling_of(
        lenient,
        {"min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 1, "stop_token_ids": [5], "ignore_eos": True,
         "top_k": -1, "logit_bias": {"7": -100}},
    ).sampling  # fmt: skip
    assert (sampling.min_p, sampling.repetition_penalty, sampling.min_tokens, sampling.top_k) == (0.1, 1.2, 1, 0)
    assert (sampling.stop_tokens, sampling.ignore_eos, dict(sampling.logit_bias)) == ((5,), True, {7: -100})


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_string_in_the_text(lenient: Running, stream: bool) -> None:
    body = {"prompt": "abcd", "max_tokens": 9, "stop": ["bc"], "include_stop_str_in_output": True, "stream": stream}
    bodies = pieces(lenient.ask("/v1/completions", body))
    assert "".join(body["choices"][0]["text"] for body in bodies) == "abc"
    assert bodies[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_ids_of_tokens(lenient: Running, stream: bool) -> None:
    body = {"prompt": ["ab", "c"], "max_tokens": 2, "return_token_ids": True, "stream": stream}
    bodies = pieces(lenient.ask("/v1/completions", body))
    choices = [choice for body in bodies for choice in body["choices"]]
    assert [choice["prompt_token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])
            if "prompt_token_ids" in choice] == [[97, 98], [99]]  # fmt: skip
    assert [token for choice in choices if choice["index"] == 0 for token in choice["token_ids"]] == [97, 98]
    chat = lenient.ask("/v1/chat/completions", {"messages": CHATS, "max_tokens": 2, "return_token_ids": True}).json()
    assert bytes(chat["prompt_token_ids"]) == b"user: hi\nassistant: " and chat["choices"][0]["token_ids"] == [117, 115]


def test_ids_as_names_of_tokens(lenient: Running) -> None:
    body = {"prompt": "ab", "max_tokens": 1, "logprobs": 1, "return_tokens_as_token_ids": True}
    logprobs = lenient.ask("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["top_logprobs"]) == (["token_id:97"], [{"token_id:97": -0.5}])


def test_scores_of_the_prompt(lenient: Running) -> None:
    body = {"prompt": "ab", "max_tokens": 1, "prompt_logprobs": 2}
    (choice,) = lenient.ask("/v1/completions", body).json()["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None and choice["logprobs"] is None
    assert second == {
        "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
        "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
    }
    chat = {"messages": CHATS, "max_tokens": 1, "prompt_logprobs": 0}
    scores = lenient.ask("/v1/chat/completions", chat).json()["prompt_logprobs"]
    assert len(scores) == len("user: hi\nassistant: ") and all(len(score) == 1 for score in scores[1:])


def test_usage_counts_tokens_in_the_cache(lenient: Running) -> None:
    body = {"prompt": "0123456789" * 10, "max_tokens": 3}
    usages = [lenient.ask("/v1/completions", body).json()["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 96]
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    usages = [
        event["usage"]
        for event in pieces(lenient.ask("/v1/completions", {**body, "stream": True, "stream_options": options}))
    ]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 3
    assert usages[0]["prompt_tokens_details"]["cached_tokens"] == 96


def test_the_last_message_is_continued(lenient: Running) -> None:
    messages = [*CHATS, {"role": "assistant", "content": "Well, "}]
    ask = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    tokens = lenient.ask("/tokenize", ask).json()["tokens"]
    assert bytes(tokens) == b"user: hi\nassistant: Well, "
    assert lenient.ask("/tokenize", {"messages": messages, "continue_final_message": True}).json()["tokens"] == tokens
    without = lenient.ask("/tokenize", {"messages": CHATS, "add_generation_prompt": False}).json()["tokens"]
    assert bytes(without) == b"user: hi\n"


def test_variables_of_the_template() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}|{{ reasoning_effort }}|{{ mode.a[0] }}|{{ bos_token }}"
    )
    body = {"messages": CHATS, "reasoning_effort": "low", "max_tokens": 1, "return_token_ids": True}
    body |= {"chat_template_kwargs": {"mode": {"a": ["x"]}}}
    with serving(ServerConfig(), template=template) as running:
        tokens = running.ask("/v1/chat/completions", body).json()["prompt_token_ids"]
    assert bytes(tokens) == b"hi|low|x|"


def test_requests_win_over_the_defaults_of_a_model() -> None:
    defaults = Sampling(temperature=0.6, top_k=20)
    with serving(ServerConfig(), sampling=defaults) as running:
        for body, (temperature, top_k, beams) in (
            ({}, (0.6, 20, 1)),
            ({"temperature": 0, "top_k": None}, (0, 20, 1)),
            ({"top_k": -1}, (0.6, 0, 1)),
            ({"beams": 2}, (1, 0, 2)),
        ):
            assert running.complete(prompt="a", max_tokens=1, **body).status_code == 200
            sampling = running.device.seen[0].sampling
            assert (sampling.temperature, sampling.top_k, sampling.beams) == (temperature, top_k, beams)
            assert sampling_of(running, {"temperature": 0.5}).sampling.top_k == 20
    assert described(defaults) == "temperature 0.6, top_k 20 by generation_config.json"
    assert described(Sampling()) == "OpenAI's defaults"


def test_the_guide_of_choices_allows_exactly_these() -> None:
    texts = ["yes", "no", "a.b", "1+1 = 2", "é|\\n\n", "<x>/[y]{2}^$", "#&-~ \"'", "yes!"]
    end, pieces = 256, [bytes((value,)) for value in range(256)]
    start_state = Guides(lambda: [*pieces, None], [end])(GUIDE_CHOICE.read(texts))
    for text in texts:
        state = start_state
        for token in text.encode():
            state = state.after(token)
        assert state.complete
    for text in ("yesno", "y", "axb", "11 = 2"):
        state = start_state
        with pytest.raises(ValueError, match="follow"):
            for token in (*text.encode(), ord("#")):
                state = state.after(token)


def test_tokens_that_are_allowed_and_words_that_are_not(served: Running) -> None:
    for path, base in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": CHATS})):
        body = {**base, "max_tokens": 1, "allowed_token_ids": [97, 256], "bad_words": ["no", " yes", "x"]}
        assert served.ask(path, body).status_code == 200
        row = served.device.seen[0]
        bad = {b"no", b" no", b"yes", b" yes", b"x", b" x"}
        assert {bytes(tokens) for tokens in row.sampling.bad_tokens} == bad
        bits = np.unpackbits(row.allowed.view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == [97, 256]
        for name, value in (("allowed_token_ids", [1]), ("bad_words", ["a"])):
            served.refuses(path, {**base, name: value, "beams": 2}, name)


def test_prompts_are_cut_to_their_last_tokens(served: Running) -> None:
    longest = served.device.length
    for path, base, prompt in (
        ("/v1/completions", {"prompt": "abcdef"}, "abcdef"),
        ("/v1/chat/completions", {"messages": CHATS}, "user: hi\nassistant: "),
    ):
        for most in (3, len(prompt), 100, -1):
            body = {**base, "max_tokens": 1, "truncate_prompt_tokens": most}
            answer = served.ask(path, body).json()
            row = served.device.seen[0]
            kept = prompt if most == -1 else prompt[-most:]
            assert bytes(row.tokens[: row.prompt]).decode() == kept
            assert answer["usage"]["prompt_tokens"] == len(kept)
    body = {"prompt": ["a" * (longest + 9), "b" * (longest + 1)], "max_tokens": 1, "truncate_prompt_tokens": -1}
    assert served.complete(**body).json()["usage"]["prompt_tokens"] == 2 * (longest - 1)


def test_grammars(served: Running) -> None:
    grammar = 'root ::= "a"'
    for more in ({"guided_grammar": grammar}, {"ebnf": grammar}, {"structured_outputs": {"grammar": grammar}}):
        assert sampling_of(served, more).sampling.guide == Grammar(grammar)


def test_a_guide_that_grows_too_large_is_the_clients_error(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    class Growing:
        mask = np.full(9, 2**32 - 1, np.uint32)

        def after(self, token: int) -> "Growing":
            if token == ord("b"):
                raise UserError("the guide is too large: too many expressions")
            return self

    def start_guide(guide: object) -> Future[Growing]:
        future = Future[Growing]()
        future.set_result(Growing())
        return future

    monkeypatch.setattr(served.worker.engine.admission, "_guide", start_guide)
    body = {"prompt": "aab", "guided_regex": "a*", "max_tokens": 9}
    served.refuses("/v1/completions", body, "guided_regex", "the guide is too large")
    assert '"code":400' in served.complete(**body, stream=True).text
    assert served.all_free()


def test_settings_that_leave_no_token_are_the_clients_error(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.device, "_next", lambda row, computed: Sampled(-1, 0.0))
    bodies: dict[str, dict[str, Any]] = {
        "allowed_token_ids": {"allowed_token_ids": [256], "min_tokens": 2, "n": 3},
        "bad_words": {"bad_words": ["b"]},
        "guided_regex": {"allowed_token_ids": [97], "guided_regex": "b+", "best_of": 2},
        "min_tokens": {"min_tokens": 1},
    }
    for param, body in bodies.items():
        message = f"{param} leaves no token to follow 0 tokens of the answer: allow more tokens"
        assert served.refuses("/v1/completions", {"prompt": "ab", **body}, param) == message
    assert served.complete(prompt="ab").status_code == 500
    assert served.all_free()
