"""OpenAI's route of embeddings, on a device whose states are simple functions of tokens."""

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from echo_device import BAD, EchoDevice, state_of
from served import Running, serving

from megajax.config.errors import UserError
from megajax.server.config import ServerConfig
from megajax.tokenizers.byte import ByteTokenizer

LONGEST = EchoDevice().length


@pytest.fixture(scope="module", params=["last", "mean"])
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    with serving(ServerConfig(strict=True, prompts=8, pooling=request.param)) as running:
        running.pooling = request.param  # type: ignore[attr-defined]
        yield running


def vector_of(running: Running, text: bytes) -> np.ndarray:
    """The expected embedding."""
    states = np.array([state_of(token) for token in text], float)
    by_pooling = {"first": states[0], "last": states[-1], "mean": states.mean(0)}
    state = by_pooling[running.pooling]  # type: ignore[attr-defined]
    return state / np.linalg.norm(state)


def embed(running: Running, **body: Any) -> Any:
    answer = running.ask("/v1/embeddings", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param("hello", id="text"),
        pytest.param(["hello", "a", "xyz " * 300], id="texts"),
        pytest.param(list(b"hello"), id="tokens"),
        pytest.param([list(b"hello"), list(b"a")], id="lists"),
    ],
)
def test_vectors_of_every_form_of_input(running: Running, texts: Any) -> None:
    body = embed(running, input=texts, model="tiny", user="me", encoding_format="float")
    prompts = texts if isinstance(texts, list) and not isinstance(texts[0], int) else [texts]
    contents = [prompt.encode() if isinstance(prompt, str) else bytes(prompt) for prompt in prompts]
    assert [entry["index"] for entry in body["data"]] == list(range(len(contents)))
    for entry, content in zip(body["data"], contents, strict=True):
        np.testing.assert_allclose(entry["embedding"], vector_of(running, content), atol=1e-6)
    count = sum(map(len, contents))
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (body["object"], body["model"], body["data"][0]["object"]) == ("list", "tiny", "embedding")


def test_equal_texts_have_equal_vectors_beside_answers(running: Running) -> None:
    """The cache may have all blocks but the last, or all but the last token."""
    for text in ("0123456789" * 20, "0123456789" * 20 + "01234567", "01234567" * 4 + "8"):
        first = embed(running, input=text)["data"][0]["embedding"]
        assert running.complete(prompt=text, max_tokens=3).json()["choices"][0]["text"] == text[:3]
        again = [entry["embedding"] for entry in embed(running, input=[text, text])["data"]]
        for vector in (first, *again):
            np.testing.assert_allclose(vector, vector_of(running, text.encode()), atol=1e-6)
    assert running.all_free()


def test_bytes_and_fewer_dimensions(running: Running) -> None:
    encoded = embed(running, input="hello", encoding_format="base64")["data"][0]["embedding"]
    expected = vector_of(running, b"hello")
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(encoded), "<f4"), expected, atol=1e-6)
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    response = client.embeddings.create(model="tiny", input=["a", "hello"], dimensions=2)
    np.testing.assert_allclose(response.data[1].embedding, expected[:2] / np.linalg.norm(expected[:2]), atol=1e-6)
    assert response.usage.prompt_tokens == 6


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [300]}, "input"),
        ({"input": ["a"] * 9}, "input"),
        ({"input": "a" * (LONGEST + 1)}, "input"),
        ({"input": "a", "dimensions": 4}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "temperature": 0}, "temperature"),
    ],
)
def test_what_is_refused(running: Running, body: dict[str, Any], param: str) -> None:
    running.refuses("/v1/embeddings", body, param)


def test_tokens_of_a_text(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A special token ends it, unless it is cut to its first tokens; it may be as long as a row."""
    monkeypatch.setattr(running.worker.engine.admission.tokenizer, "suffix", (2,))
    for text, more, content in (
        ("ab", {}, b"ab\x02"),
        ("ab", {"add_special_tokens": False}, b"ab"),
        (list(b"ab"), {}, b"ab"),
        ("a" * LONGEST, {"add_special_tokens": False}, b"a" * LONGEST),
        ("abcde", {"truncate_prompt_tokens": 3}, b"ab\x02"),
        ("abcde", {"truncate_prompt_tokens": 6}, b"abcde\x02"),
        ("abcde", {"truncate_prompt_tokens": 1}, b"a"),
        (list(b"abcde"), {"truncate_prompt_tokens": 3}, b"abc"),
        ("x" * 2 * LONGEST, {"truncate_prompt_tokens": -1}, b"x" * (LONGEST - 1) + b"\x02"),
    ):
        body = embed(running, input=text, **more)
        np.testing.assert_allclose(body["data"][0]["embedding"], vector_of(running, content), atol=1e-6)
        assert body["usage"]["prompt_tokens"] == len(content)


def test_a_text_that_the_tokenizer_rejects(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(self: ByteTokenizer, text: str) -> Any:
        raise UserError("no !")

    monkeypatch.setattr(ByteTokenizer, "encode", reject)
    for path, field in (("/v1/embeddings", "input"), ("/v1/completions", "prompt")):
        running.refuses(path, {field: "!"}, field)


def test_a_text_that_fails(running: Running) -> None:
    assert running.ask("/v1/embeddings", {"input": ["a", list(BAD)]}).status_code == 400
    assert running.ask("/v1/embeddings", {"input": [[97], list(BAD)]}).status_code == 500
    assert running.all_free()
