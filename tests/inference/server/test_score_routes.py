"""Routes of scores, by embeddings and by the next token, on a device whose states are simple functions of tokens."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from echo_device import BAD, EchoDevice, state_of
from served import Running, start, stop

from megajax.config.errors import UserError
from megajax.inference.server.config import ServerConfig
from megajax.inference.server.pooling.reranker import reranker_of
from megajax.tokenizers.byte import ByteTokenizer
from megajax.tokenizers.config import ByteTokenizerConfig

LONG = "a" * (EchoDevice().length + 1)
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}?{% endif %}"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    running = start(ServerConfig(strict=True, prompts=8))
    yield running
    stop(running)


@pytest.fixture(scope="module")
def reranking() -> Iterator[Running]:
    running = start(ServerConfig(strict=True, prompts=8, score_template=TEMPLATE, score_answers=("y", "n")))
    yield running
    stop(running)


def cosine(first: str, second: str) -> float:
    """The score of two texts by the states of their last tokens."""
    one, other = (np.array(state_of(text.encode()[-1]), float) for text in (first, second))
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def answer_of(running: Running, path: str, **body: Any) -> Any:
    answer = running.ask(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("ab", "xy"), ("ab", ["ax", "b", "zz"]), (["ab", "c"], ["xy", "c"]), (["a"], "b")],
    ids=["pair", "one with all", "each with its own", "list and text"],
)
def test_cosines_of_pairs(running: Running, path: str, first: Any, second: Any) -> None:
    body = answer_of(running, path, text_1=first, text_2=second, model="tiny", user=None)
    left, right = ([texts] if isinstance(texts, str) else texts for texts in (first, second))
    expected = [cosine(left[place % len(left)], text) for place, text in enumerate(right)]
    assert [(entry["index"], entry["object"]) for entry in body["data"]] == [(i, "score") for i in range(len(right))]
    np.testing.assert_allclose([entry["score"] for entry in body["data"]], expected, atol=1e-6)
    tokens = len("".join([*left, *right]))
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    assert (body["object"], body["model"]) == ("list", "tiny")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_in_the_order_of_their_scores(running: Running, path: str) -> None:
    texts = ["z", "a", "p", "a"]
    documents = ["z", {"text": "a"}, "p", "a"]
    body = answer_of(running, path, query="b", documents=documents)
    scores = [cosine("b", text) for text in texts]
    # Equal documents stay in their order.
    assert [entry["index"] for entry in body["results"]] == sorted(range(4), key=lambda place: -scores[place])
    assert [entry["index"] for entry in body["results"]][:2] == [1, 3]
    for entry in body["results"]:
        assert entry["document"] == {"text": texts[entry["index"]]}
        assert entry["relevance_score"] == pytest.approx(scores[entry["index"]], abs=1e-6)
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    few = answer_of(running, path, query="b", documents=documents, top_n=2, return_documents=False)
    assert [set(entry) for entry in few["results"]] == [{"index", "relevance_score"}] * 2
    assert [entry["index"] for entry in few["results"]] == [1, 3]
    for top in (0, None, 9):
        assert len(answer_of(running, path, query="b", documents=documents, top_n=top)["results"]) == 4


def test_scores_by_the_next_token(reranking: Running) -> None:
    """The device gives a token t the log-probability -t / 100, so the score is the sigmoid of (n - y) / 100."""
    expected = 1 / (1 + math.exp((ord("y") - ord("n")) / 100))
    body = answer_of(reranking, "/score", text_1="Q", text_2="D", instruction="I")
    assert body["data"][0]["score"] == pytest.approx(expected)
    row = reranking.device.seen[0]
    prompt = b"system:I\nquery:Q\ndocument:D\n?"
    assert bytes(row.tokens[: row.prompt]) == prompt
    assert body["usage"]["prompt_tokens"] == len(prompt)
    ranked = answer_of(reranking, "/rerank", query="Q", documents=["D"] * 8, top_n=3)
    assert [entry["relevance_score"] for entry in ranked["results"]] == pytest.approx([expected] * 3)
    assert reranking.all_free()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": None}, "text_2"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["a", ""]}, "text_2"),
        ("/score", {"text_1": [1, 2], "text_2": "a"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": "a"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, "text_1"),
        ("/score", {"text_1": "a", "text_2": ["a"] * 8}, "text_2"),
        ("/score", {"text_1": "a", "text_2": LONG}, "text_2"),
        ("/score", {"text_1": [LONG, "a"], "text_2": ["a", "b"]}, "text_1"),
        ("/rerank", {"query": LONG, "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["a", LONG]}, "documents"),
        ("/score", {"text_1": "a", "text_2": "a", "instruction": "b"}, "instruction"),
        ("/score", {"text_1": "a", "text_2": "a", "text_3": "a"}, "text_3"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"title": "a"}]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"] * 8}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": True}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["a"], "return_documents": 1}, "return_documents"),
        ("/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
    ],
)
def test_what_is_refused(running: Running, path: str, body: dict[str, Any], param: str) -> None:
    answer = running.ask(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_texts_that_are_cut(running: Running, reranking: Running) -> None:
    body = {"text_1": "abc", "text_2": "xyz", "truncate_prompt_tokens": 2}
    assert answer_of(running, "/score", **body)["data"][0]["score"] == pytest.approx(cosine("ab", "xy"), abs=1e-6)
    answer = reranking.ask("/score", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_fields_of_texts_that_a_reranker_cannot_read(reranking: Running) -> None:
    for query, document, param in ((LONG, "a", "query"), ("a", LONG, "documents")):
        answer = reranking.ask("/rerank", {"query": query, "documents": ["b", document]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_1": "!", "text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": ["a", "!"]}, "text_2"),
        ("/rerank", {"query": "!", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["!"]}, "documents"),
        ("/v1/embeddings", {"input": ["a", "!"]}, "input"),
        ("/v1/completions", {"prompt": "!"}, "prompt"),
    ],
)
def test_the_field_of_a_text_that_the_tokenizer_rejects(
    running: Running, reranking: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, param: str
) -> None:
    encode = ByteTokenizer.encode

    def rejecting(self: ByteTokenizer, text: str) -> Any:
        if "!" in text:
            raise UserError("no !")
        return encode(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode", rejecting)
    for server in (running, *((reranking,) if path in ("/score", "/rerank") else ())):
        answer = server.ask(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_text_that_fails(running: Running) -> None:
    assert running.ask("/score", {"text_1": "a", "text_2": ["b", bytes(BAD).decode()]}).status_code == 500
    assert running.all_free()


@pytest.mark.parametrize(
    ("template", "answers", "message"),
    [
        (TEMPLATE, ("yes", "n"), "'yes' is 3 tokens"),
        ("{{ messages[0].content }}", ("y", "n"), "does not show"),
        ("{{ raise_exception('no') }}", ("y", "n"), "server.score_template"),
        ("{% if %}", ("y", "n"), "server.score_template"),
    ],
)
def test_invalid_rerankers(template: str, answers: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        reranker_of(ServerConfig(score_template=template, score_answers=answers), ByteTokenizerConfig().build())
    with pytest.raises(UserError, match="gives no text"):
        reranker_of(ServerConfig(score_template=TEMPLATE), ByteTokenizerConfig().build(), generates=False)
    (problem,) = ServerConfig(score_answers=("y", "y")).problems()
    assert problem.setting == "score_answers"
