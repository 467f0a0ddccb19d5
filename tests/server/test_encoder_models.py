"""A model with an encoder: it reads the prompts of /v1/completions, and its decoder answers."""

from collections.abc import Iterator
from typing import Any

import pytest
from echo_device import EchoDevice
from served import Running, serving

from megajax.server.config import ServerConfig

LONGEST = 12
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(ServerConfig(strict=True), EchoDevice(length=64, memory=LONGEST)) as running:
        yield running


def test_the_encoder_reads_the_prompt(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.worker.engine.admission.tokenizer, "suffix", (33,))
    for prompt, more, text in (
        ("hello", {}, "hello!"),
        ("hello", {"add_special_tokens": False}, "hello"),
        (list(b"hello"), {}, "hello"),
        ("abcdefghijklmnop", {"truncate_prompt_tokens": -1}, "fghijklmnop!"),
    ):
        body = running.complete(prompt=prompt, max_tokens=len(text), n=2, logprobs=0, **more).json()
        assert [choice["text"] for choice in body["choices"]] == [text] * 2
        usage = {"prompt_tokens": len(text), "completion_tokens": 2 * len(text), "total_tokens": 3 * len(text)}
        assert usage.items() <= body["usage"].items()
        row = running.device.seen[0]
        assert (bytes(row.memory).decode(), row.tokens[: row.prompt]) == (text, [0])
    body = {"prompts": ["ab", "cd"], "tokens_to_generate": 2, "top_k": 1}
    answer = running.ask("/api", body, "PUT")
    assert answer.json().get("text") == ["abab", "cdcd"], answer.text
    assert '"text":"h"' in running.complete(prompt="h", max_tokens=1, stream=True).text
    assert running.all_free()


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/completions", {"prompt": "a" * (LONGEST + 1)}, "prompt", f"it may have {LONGEST}"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs", "encoder"),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1}, "prompt_logprobs", "encoder"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "messages", "has an encoder"),
        ("/tokenize", {"messages": MESSAGES}, "messages", "has an encoder"),
        ("/v1/embeddings", {"input": "hi"}, "model", "this model has both"),
    ],
)
def test_what_is_refused(running: Running, path: str, body: dict[str, Any], param: str, words: str) -> None:
    running.refuses(path, body, param, words)


def test_a_model_that_gives_embeddings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    device = EchoDevice()
    device.generates = False
    with serving(ServerConfig(strict=True, pooling="mean"), device) as running:
        monkeypatch.setitem(running.worker.engine.admission.tokenizer.specials, "cls", 1)
        monkeypatch.setitem(running.worker.engine.admission.tokenizer.specials, "sep", 2)
        assert running.ask("/v1/embeddings", {"input": "ab"}).json()["usage"]["prompt_tokens"] == 4
        row = running.device.seen[0]
        assert row.tokens == [1, *b"ab", 2] and row.pooling == "mean"
        for path, body, method in (
            ("/v1/completions", {"prompt": "a"}, "POST"),
            ("/v1/chat/completions", {"messages": MESSAGES}, "POST"),
            ("/api", {"prompts": ["a"], "tokens_to_generate": 1}, "PUT"),
        ):
            running.refuses(path, body, "model", "no text: use /v1/embeddings", method)
