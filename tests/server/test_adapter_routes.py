"""Adapters of a server: names of models in requests, and the routes that load and drop them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from served import Running, serving
from user_errors import user_error
from waiting import wait_until

from megajax.config.errors import ConfigError, UserError
from megajax.inference.engine import Engine
from megajax.server.config import ServerConfig, ServingConfig, named_folders, with_slots


def read(folder: Path) -> str:
    if folder.name == "bad":
        raise UserError(f"{folder} has rank 64, and slots have rank 16")
    return folder.name


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A server with two slots for adapters."""
    with serving(ServerConfig(load_adapters=True, strict=True), slots=2, read_adapter=read) as server:
        yield server


def load(server: Running, name: str, folder: Path) -> tuple[int, str]:
    answer = server.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
    return answer.status_code, answer.text


def names(server: Running) -> list[str]:
    return [card["id"] for card in server.ask("/v1/models", method="GET").json()["data"]]


def test_a_request_chooses_an_adapter_by_its_model(running: Running, tmp_path: Path) -> None:
    (tmp_path / "law").mkdir()
    (tmp_path / "bad").mkdir()
    assert names(running) == ["tiny"]
    assert load(running, "law", tmp_path / "law")[0] == 200
    card = running.ask("/v1/models/law", method="GET").json()
    assert (card["id"], card["parent"], card["max_model_len"]) == ("law", "tiny", 4096)
    assert "parent" not in running.ask("/v1/models/tiny", method="GET").json() and names(running) == ["tiny", "law"]
    routes = [
        ("/v1/completions", {"prompt": "abc", "max_tokens": 2}, "POST"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}, "POST"),
        ("/api", {"prompts": ["abc"], "tokens_to_generate": 2}, "PUT"),
    ]
    for name, adapter in (("law", "law"), ("tiny", None), (None, None)):
        for path, body, method in routes:
            answer = running.ask(path, body | {"model": name}, method)
            assert answer.status_code == 200 and answer.json().get("model", name) == (
                name if method == "PUT" else name or "tiny"
            )
            (row,) = running.device.seen
            assert (row.adapter and row.adapter.name) == adapter
    assert running.ask("/tokenize", {"prompt": "abc", "model": "law"}).json()["count"] == 3
    assert wait_until(lambda: any("POST" in line and '"law"' in line for line in running.log))
    gone = running.complete(prompt="a", model="gone")
    assert gone.status_code == 404 and "there are tiny, law" in gone.text
    answer = running.ask("/v1/unload_lora_adapter", {"lora_name": "law"})
    assert answer.json() == {"id": "law", "object": "model", "deleted": True}
    assert running.complete(prompt="a", model="law").status_code == 404 and names(running) == ["tiny"]


def test_an_unfinished_request_keeps_its_adapter(running: Running, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    assert [load(running, name, tmp_path / name)[0] for name in ("a", "b")] == [200, 200]
    with running.client.stream(
        "POST", f"{running.url}/v1/completions", json={"prompt": "ab", "max_tokens": 4000, "model": "a", "stream": True}
    ) as stream:
        events = stream.iter_lines()
        next(events)
        assert running.ask("/v1/unload_lora_adapter", {"lora_name": "a"}).status_code == 200
        status, message = load(running, "c", tmp_path / "c")
        assert status == 400 and "1 dropped ones are still in use" in message
        (row,) = running.device.seen
        assert row.adapter is not None and row.adapter.name == "a"
    assert running.all_free()
    assert load(running, "c", tmp_path / "c")[0] == 200
    for name in ("b", "c"):
        assert running.ask("/v1/unload_lora_adapter", {"lora_name": name}).status_code == 200


@pytest.mark.parametrize("guide", [{}, {"guided_regex": "a"}])
def test_a_request_that_arrives_while_its_adapter_is_dropped(
    running: Running, tmp_path: Path, guide: dict[str, str]
) -> None:
    """It was checked before the drop, and starts after it."""
    (tmp_path / "late").mkdir()
    assert load(running, "late", tmp_path / "late")[0] == 200
    dropping, dropped = Event(), Event()

    def drop(engine: Engine) -> None:
        dropping.set()
        assert dropped.wait(100)
        engine.drop_adapter("late")

    running.worker.call(drop)
    assert dropping.wait(100)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(running.complete, prompt="a", model="late", max_tokens=2, **guide)
        assert wait_until(lambda: running.worker._inbox)
        dropped.set()
        error = answer.result(100).json()["error"]
    assert (error["code"], error["param"]) == (400, "model") and "'late' is not loaded" in error["message"]
    running.worker.call(lambda engine: engine.load_adapter("late", "late")).result(100)
    assert running.ask("/v1/unload_lora_adapter", {"lora_name": "late"}).status_code == 200


def test_refusals(running: Running, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    for name, folder, text in (
        ("tiny", "bad", "'tiny' is in use"),
        ("x", "none", "is not a folder"),
        ("x", "bad", "rank 64, and slots have rank 16"),
        ("", "bad", "printable"),
        ("x", "x" * 5000, "lora_path cannot be read"),
    ):
        status, message = load(running, name, tmp_path / folder)
        assert status == 400 and text in message
    for body in ({"lora_name": "x"}, {"lora_name": "x", "lora_path": ""}):
        running.refuses("/v1/load_lora_adapter", body, "lora_path")
    assert running.ask("/v1/unload_lora_adapter", {"lora_name": "x"}).status_code == 404
    body = {"lora_name": "x", "lora_path": str(tmp_path), "load_inplace": True}
    assert "unload the adapter first" in running.ask("/v1/load_lora_adapter", body).text
    assert names(running) == ["tiny"]


def test_the_routes_are_off_by_default(served: Running, tmp_path: Path) -> None:
    assert load(served, "law", tmp_path)[0] == 404
    assert served.ask("/v1/unload_lora_adapter", {"lora_name": "law"}).status_code == 404


def test_adapters_of_the_command_line() -> None:
    assert named_folders(("a=x/y", "b=z=1")) == {"a": Path("x/y"), "b": Path("z=1")}
    for flag in (("a",), ("=x",), ("a=",), ("a=x", "a=y")):
        with user_error("--adapters", kind=ConfigError):
            named_folders(flag)
    config = ServingConfig(model=None)  # ty: ignore[invalid-argument-type]
    assert with_slots(config, 3).inference.adapters == 3 and with_slots(config, 0) == config
    with user_error("server.load_adapters", kind=ConfigError):
        with_slots(ServingConfig(model=None, server=ServerConfig(load_adapters=True)), 0)  # ty: ignore[invalid-argument-type]
