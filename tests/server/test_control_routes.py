"""Routes that pause the engine, let it sleep, abort its requests, and give it other weights."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from echo_device import EchoDevice
from served import Running, serving
from waiting import wait_until

from megajax.config.errors import UserError
from megajax.server.config import Access, ServerConfig

POSTS = ("/pause", "/resume", "/sleep", "/wake_up", "/abort_request", "/update_weights_from_disk")


def read(folder: Path) -> Any:
    """The name of a folder is the number that is added to tokens."""
    if folder.name == "other":
        raise UserError("other has the weights of another model")
    return lambda: int(folder.name)


@pytest.fixture
def running() -> Iterator[Running]:
    device = EchoDevice(rows=4, blocks=400, seconds=0.002)
    with serving(ServerConfig(control=True, strict=True), device, read_weights=read) as server:
        yield server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def ask(running: Running, path: str, body: Any = None, method: str = "POST", **more: Any) -> Any:
    answer = running.ask(path, body, method, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def begun(running: Running, pool: ThreadPoolExecutor, **body: Any) -> Future[Any]:
    """A request of many tokens that has some of them."""
    before = running.worker.statistics().tokens_total
    future = pool.submit(running.complete, prompt="aaaa", max_tokens=300, **body)
    assert wait_until(lambda: running.worker.statistics().tokens_total > before + 3)
    return future


def update(running: Running, folder: Path, name: str, **body: Any) -> Any:
    (folder / name).mkdir(exist_ok=True)
    return ask(running, "/update_weights_from_disk", {"model_path": str(folder / name), **body})


def choice_of(future: Future[Any]) -> Any:
    return future.result(100).json()["choices"][0]


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_pause_and_resume(running: Running, pool: ThreadPoolExecutor, mode: str) -> None:
    first = begun(running, pool)
    assert ask(running, "/is_paused", method="GET") == {"is_paused": False}
    ask(running, f"/pause?mode={mode}" if mode != "abort" else "/pause")
    assert ask(running, "/is_paused", method="GET") == {"is_paused": True}
    assert mode != "keep" or not first.done()
    late, tokens = pool.submit(running.complete, prompt="b", max_tokens=2), running.worker.statistics().tokens_total
    assert wait_until(lambda: running.worker.engine.requests == (2 if mode == "keep" else 1))
    assert running.worker.statistics().tokens_total == tokens and not late.done()
    assert running.ask("/health", method="GET").status_code == 200
    ask(running, "/resume")
    assert choice_of(late)["text"] == "bb"
    choice = choice_of(first)
    assert choice["finish_reason"] == ("abort" if mode == "abort" else "length")
    assert len(choice["text"]) == 300 if mode != "abort" else 3 < len(choice["text"]) < 300


def test_weights_of_a_folder_after_the_requests_before_it(
    running: Running, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    first = begun(running, pool)
    changed = pool.submit(update, running, tmp_path, "1")
    late = pool.submit(running.complete, prompt="aaaa", max_tokens=2)
    assert changed.result(100) == {
        "success": True, "message": f"the weights are those of {tmp_path / '1'}", "num_paused_requests": 0
    }  # fmt: skip
    assert choice_of(first)["text"] == "a" * 300
    assert choice_of(late)["text"] in ("aa", "bb"), "as it came before or after"
    answer = running.complete(prompt="aaaa" * 8, max_tokens=3).json()
    assert answer["choices"][0]["text"] == "bbb"


@pytest.mark.parametrize("flush", [True, False])
def test_weights_while_requests_are_paused(
    running: Running, pool: ThreadPoolExecutor, tmp_path: Path, flush: bool
) -> None:
    """The routes of vLLM and SGLang pause the engine, update its weights and resume it."""
    first = begun(running, pool)
    ask(running, "/pause?mode=keep" + "&clear_cache=false" * (not flush))
    assert running.worker.statistics().preemptions_total == (1 if flush else 0)
    assert update(running, tmp_path, "1", flush_cache=flush)["num_paused_requests"] == 1
    ask(running, "/resume")
    text = choice_of(first)["text"]
    assert len(text) == 300 and text.strip("b").strip("a") == "" and text.endswith("b") and text.startswith("aaa")


def test_weights_with_all_requests_aborted(running: Running, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    first = begun(running, pool)
    update(running, tmp_path, "1", abort_all_requests=True)
    assert choice_of(first)["finish_reason"] == "abort"


def test_weights_that_do_not_fit(running: Running, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    words = "must be a string that is not empty"
    running.refuses("/update_weights_from_disk", {"model_path": ""}, "model_path", words)
    for name, message in (("other", "of another model"), ("nowhere", "is not a folder")):
        answer = running.ask("/update_weights_from_disk", {"model_path": str(tmp_path / name)})
        body = answer.json()
        assert answer.status_code == 400 and not body["success"] and body["error"]["param"] == "model_path"
        assert message in body["message"] == body["error"]["message"]
    assert running.complete(prompt="a", max_tokens=2).json()["choices"][0]["text"] == "aa"


def test_sleep_and_wake(running: Running, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    first = begun(running, pool)
    assert ask(running, "/sleep?level=1&mode=keep") == {"status": "sleeping", "level": 1}
    assert ask(running, "/is_sleeping", method="GET") == {"is_sleeping": True}
    assert not first.done()
    assert ask(running, "/wake_up?tags=weights") == {"status": "sleeping"}
    assert ask(running, "/wake_up?tags=weights&tags=kv_cache") == {"status": "awake"}
    assert choice_of(first)["text"] == "a" * 300
    ask(running, "/sleep?level=2")
    answer = running.ask("/wake_up")
    assert answer.status_code == 400 and "has no weights" in answer.json()["error"]["message"]
    update(running, tmp_path, "1")
    ask(running, "/wake_up")
    assert running.complete(prompt="a", max_tokens=2).json()["choices"][0]["text"] == "bb"


def test_all_requests_are_aborted_in_every_form(running: Running, pool: ThreadPoolExecutor) -> None:
    """They end with the tokens that they have; embeddings and scores have none."""
    texts: list[str] = []

    def stream() -> str | None:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
        for chunk in client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "aaaa"}], max_tokens=300, stream=True
        ):
            texts.append(chunk.choices[0].delta.content or "")
            if chunk.choices[0].finish_reason:
                return chunk.choices[0].finish_reason
        return None

    streamed = pool.submit(stream)
    whole = pool.submit(running.complete, prompt="aaaa", max_tokens=300)
    assert wait_until(lambda: running.worker.engine.requests == 2 and len(texts) > 3)
    ask(running, "/pause?mode=keep&clear_cache=false")
    vectors = pool.submit(running.ask, "/v1/embeddings", {"input": "abc"})
    scores = pool.submit(running.complete, prompt="abc", max_tokens=2, prompt_logprobs=1)
    assert wait_until(lambda: running.worker.engine.requests == 4)
    assert ask(running, "/abort_request", {"abort_all": True}) == {"status": "aborted"}
    assert streamed.result(100) == "abort"
    assert choice_of(whole)["finish_reason"] == "abort"
    assert running.all_free()
    for future in (vectors, scores):
        assert future.result(100).status_code == 503
    answer = running.ask("/abort_request", {"rid": "cmpl-1"})
    assert answer.status_code == 400 and "closing its connection" in answer.json()["error"]["message"]
    assert running.ask("/abort_request", {}).json()["error"]["param"] == "abort_all"


def test_requests_are_aborted_while_a_pause_waits_for_them(running: Running, pool: ThreadPoolExecutor) -> None:
    with running.device.hanging():
        first = pool.submit(running.complete, prompt="aaaa", max_tokens=4000)
        assert wait_until(lambda: running.worker.engine.requests == 1)
        paused = pool.submit(ask, running, "/pause?mode=wait")
        assert wait_until(lambda: running.worker._calls)
        aborted = pool.submit(ask, running, "/abort_request", {"abort_all": True})
        assert wait_until(lambda: len(running.worker._calls) == 2)
    assert aborted.result(100) == {"status": "aborted"} and paused.result(100) == {"status": "paused"}
    assert choice_of(first)["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("path", "param"),
    [("/pause?mode=stop", "mode"), ("/pause?clear_cache=1", "clear_cache"), ("/sleep?level=3", "level"),
     ("/sleep?mode=in_place", "mode"), ("/wake_up?tags=all", "tags"), ("/resume?now=true", "now")],
)  # fmt: skip
def test_parameters_are_checked(running: Running, path: str, param: str) -> None:
    running.refuses(path, None, param)


def test_the_routes_are_off_by_default_and_refuse_web_pages_and_clients_without_a_key(tmp_path: Path) -> None:
    with serving(ServerConfig()) as plain:
        assert [plain.ask(path, {}).status_code for path in POSTS] == [404] * len(POSTS)
    (tmp_path / "keys").write_text("0123456789abcdef\n")
    with serving(ServerConfig(control=True), access=Access(api_key_file=tmp_path / "keys")) as keyed:
        assert [keyed.ask(path, {}).status_code for path in POSTS] == [401] * len(POSTS)
        headers = {"Authorization": "Bearer 0123456789abcdef"}
        assert keyed.ask("/pause", headers=headers).status_code == 200
        page = {**headers, "Origin": "http://web.example"}
        assert [keyed.ask(path, {}, headers=page).status_code for path in POSTS] == [403] * len(POSTS)
        document = json.dumps(keyed.ask("/openapi.json", method="GET", headers=headers).json())
    assert all(f'"{path}"' in document for path in POSTS)


def test_weights_that_stay_are_not_read(running: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Several processes read a run together: process 0 would wait for the others for ever."""
    # This folder would be refused when it is read.
    (folder := tmp_path / "other").mkdir()
    assert "of another model" in running.ask("/update_weights_from_disk", {"model_path": str(folder)}).text
    monkeypatch.setattr(running.worker.engine, "weights", None)
    answer = running.ask("/update_weights_from_disk", {"model_path": str(folder)})
    assert answer.status_code == 400 and "cannot be replaced" in answer.json()["message"], answer.text
