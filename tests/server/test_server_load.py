"""Overload, slow clients, lost clients: the effect on other clients and the engine."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from echo_device import BAD, DEATH, EchoDevice
from served import Running, serving
from user_errors import user_error
from waiting import wait_until

from megajax.config.errors import ConfigError
from megajax.server.config import Access, ServerConfig
from megajax.server.server import ReadyServer


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """Four rows, eight waiting requests."""
    config = ServerConfig(queue=8, prompts=8, write_seconds=2.0, stall_seconds=2.0)
    with serving(config, EchoDevice(rows=4, blocks=400, length=4096, seconds=0.002)) as running:
        yield running


KEY = "0123456789abcdef"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with KEY and two other keys."""
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n  second-key-of-some-length \n\nfedcba9876543210\n")
    return file


def test_more_requests_than_the_queue_holds(small: Running) -> None:
    with ThreadPoolExecutor(40) as pool, small.device.hanging() as ends:
        futures = [pool.submit(small.complete, prompt=f"p{number:02d}", max_tokens=60) for number in range(40)]
        assert wait_until(lambda: sum(future.done() for future in futures) >= 40 - 12)
        assert small.ask("/metrics", method="GET").status_code == 200
        ends.set()
        answers = [future.result() for future in futures]
    assert sum(answer.status_code == 200 for answer in answers) == 12
    for number, answer in enumerate(answers):
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == f"p{number:02d}" * 20
        else:
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["type"] == "rate_limit_error"
    assert {answer.status_code for answer in answers} == {200, 429} and small.all_free()


def test_a_list_of_prompts_is_accepted_completely_or_not_at_all(small: Running) -> None:
    with ThreadPoolExecutor(2) as pool, small.device.hanging() as ends:
        first = pool.submit(small.complete, prompt=["a"] * 8, max_tokens=2)
        assert wait_until(lambda: small.worker.statistics().requests == 8)
        assert small.complete(prompt=["a"] * 8, max_tokens=2).status_code == 429
        ends.set()
        assert len(first.result().json()["choices"]) == 8
    assert small.all_free()


def open_request(small: Running, *, unsent: int = 0, **body: Any) -> socket.socket:
    """A connection whose answer is not read. unsent: announced bytes of the body that do not follow."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", int(small.url.rpartition(":")[2])))
    text = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(head + b"Content-Length: %d\r\n\r\n" % (len(text) + unsent) + text)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_disconnect_free_their_blocks(small: Running, stream: bool) -> None:
    for _ in range(3):
        before = len(small.posts())
        connections = [open_request(small, prompt="abc", max_tokens=4000, stream=stream) for _ in range(10)]
        assert wait_until(small.blocks_used)
        if stream:
            assert connections[0].recv(10)
        for connection in connections:
            connection.close()
        # The answers alone would take 80 seconds. The last clients may disconnect before their requests are read.
        assert wait_until(lambda count=before + 10: len(small.posts()) >= count)
        assert small.all_free(), "blocks are not free"


@pytest.mark.parametrize("unsent", [0, 100])
def test_clients_that_disconnect_early_are_no_error_of_the_server(small: Running, unsent: int) -> None:
    """They do so while the body is read, or while the answer is computed."""
    small.log.clear()
    connection = open_request(small, prompt="abc", max_tokens=4000, unsent=unsent)
    assert wait_until(lambda: small.readiness.active)
    connection.close()
    assert wait_until(small.posts)
    assert " POST /v1/completions 499 " in small.posts()[0]
    assert '{code="499",route="/v1/completions"}' in small.ask("/metrics", method="GET").text
    assert small.all_free()


def test_a_reader_that_does_not_read_is_disconnected(small: Running) -> None:
    """It delays no other client, and frees its blocks when its time is over."""
    slow = open_request(small, prompt=["abc" * 100] * 2, max_tokens=3000, logprobs=20, stream=True)
    assert wait_until(small.blocks_used)
    assert small.complete(prompt="ab", max_tokens=4).json()["choices"][0]["text"] == "abab"
    before = small.worker.statistics().tokens_total
    assert small.all_free(10)
    assert small.worker.statistics().tokens_total - before < 2 * 3000
    slow.close()
    assert small.complete(prompt="ab", max_tokens=4).status_code == 200


def test_an_error_of_one_request_ends_only_that_request(small: Running) -> None:
    failing_prompt = bytes(BAD).decode()
    with ThreadPoolExecutor(4) as pool:
        unaffected = [pool.submit(small.complete, prompt="ab", max_tokens=100) for _ in range(3)]
        failure = small.complete(prompt=failing_prompt, max_tokens=5)
        assert failure.status_code == 500 and failure.json()["error"]["type"] == "server_error"
        assert "choices" not in failure.text
        assert all(future.result().json()["choices"][0]["text"] == "ab" * 50 for future in unaffected)
    stream = small.complete(prompt=failing_prompt, max_tokens=5, stream=True).text
    last = stream.strip().split("\n\n")[-1]
    assert json.loads(last[6:])["error"]["type"] == "server_error" and "[DONE]" not in last
    # Health needs a step with finite numbers, so a request causes one.
    assert wait_until(lambda: small.ask("/health", method="GET").status_code == 503)
    assert small.complete(prompt="ab", max_tokens=2).status_code == 200
    assert small.ask("/health", method="GET").status_code == 200


def test_a_server_that_compiles_says_so() -> None:
    compiled = threading.Event()

    def prepare() -> Iterator[None]:
        assert compiled.wait(100)
        yield

    with serving(ServerConfig(), prepare=prepare()) as running:
        health = running.ask("/health", method="GET")
        assert health.status_code == 503 and health.json() == {"status": "starting"}
        refused = running.complete(prompt="ab", max_tokens=2)
        assert refused.status_code == 503 and "compiles its programs" in refused.json()["error"]["message"]
        compiled.set()
        assert wait_until(lambda: running.ask("/health", method="GET").status_code == 200)
        assert running.complete(prompt="ab", max_tokens=2).json()["choices"][0]["text"] == "ab"


def test_health_reports_a_hanging_engine(small: Running) -> None:
    with ThreadPoolExecutor(1) as pool, small.device.hanging() as ends:
        waiting = pool.submit(small.complete, prompt="ab", max_tokens=2)
        assert wait_until(lambda: small.ask("/health", method="GET").json() == {"status": "stalled"})
        assert small.ask("/health", method="GET").status_code == 503
        ends.set()
        assert waiting.result().status_code == 200
    # The answer arrives before the engine's thread has finished its step.
    assert wait_until(lambda: small.ask("/health", method="GET").status_code == 200)


def test_the_death_of_the_engine_ends_the_server() -> None:
    with serving(ServerConfig(), EchoDevice(seconds=0.002)) as running, ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(running.complete, prompt="ab", max_tokens=4000) for _ in range(2)]
        assert wait_until(lambda: running.worker.statistics().running == 2)
        assert running.complete(prompt=bytes(DEATH).decode(), max_tokens=5).status_code == 500
        assert [future.result().status_code for future in futures] == [500, 500]
        running.thread.join(100)
        assert running.server.exit_code == 1 and not running.thread.is_alive()
    assert any("the server ends" in line for line in running.log)


def test_each_key_has_a_cache_of_its_own(keys: Path) -> None:
    shared, other = [], "fedcba9876543210"
    with serving(ServerConfig(cache_per_key=True), access=Access(api_key_file=keys)) as running:
        for key, salt in ((KEY, None), (other, None), (KEY, None), (other, None), (KEY, "mine")):
            body, headers = {"prompt": "a" * 40, "cache_salt": salt}, {"Authorization": f"Bearer {key}"}
            answer = running.ask("/v1/completions", body, headers=headers).json()
            shared.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert shared == [0, 0, 32, 32, 0]
    with user_error("server.cache_per_key", kind=ConfigError):
        ReadyServer(ServerConfig(cache_per_key=True), Access(port=0))


def test_keys_on_every_route_except_health(keys: Path) -> None:
    routes = [("GET", "/"), ("GET", "/metrics"), ("GET", "/v1/models"), ("POST", "/v1/completions"), ("PUT", "/api"),
              ("POST", "/tokenize"), ("GET", "/none"), ("GET", "/health/")]  # fmt: skip
    with serving(ServerConfig(), template=None, access=Access(api_key_file=keys)) as running:
        for method, path in routes:
            for headers in ({}, {"authorization": f"Bearer {KEY[:-1]}"}, {"authorization": KEY}):
                answer = running.ask(path, {} if method != "GET" else None, method, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
                assert answer.headers["www-authenticate"].startswith("Basic ")
        assert running.ask("/health", method="GET").status_code == 200
        for header in (f"Bearer {KEY}", "bearer second-key-of-some-length", "Basic OjAxMjM0NTY3ODlhYmNkZWY="):
            assert running.ask("/v1/models", method="GET", headers={"authorization": header}).status_code == 200
        chat, headers = {"messages": [{"role": "user", "content": "a"}]}, {"authorization": f"Bearer {KEY}"}
        without = running.ask("/v1/chat/completions", chat, headers=headers)
    assert without.status_code == 400 and "chat template" in without.json()["error"]["message"]


@pytest.mark.parametrize("method, path", [("GET", "/"), ("GET", "/metrics"), ("PUT", "/api"), ("GET", "/missing")])
def test_a_server_without_keys_refuses_other_host_names(small: Running, method: str, path: str) -> None:
    """After DNS rebinding, a browser sends the requests of a web page here with the name of the page's server."""
    for host in ("evil.example", "evil.example:5000", "localhost.evil.example", "127.0.0.1.evil.example:80", ""):
        answer = small.ask(path, {} if method != "GET" else None, method, headers={"host": host})
        assert answer.status_code == 403 and answer.json()["error"]["type"] == "permission_error"
        assert host.partition(":")[0] in answer.json()["error"]["message"]
        assert "server.hosts" in answer.json()["error"]["message"]
        assert small.ask("/health", method="GET", headers={"host": host}).status_code == 200
    for host in ("localhost", "LOCALHOST.:5000", "127.0.0.1:1", "[::1]:5000", "192.168.0.5"):
        assert small.ask(path, {} if method != "GET" else None, method, headers={"host": host}).status_code != 403


def test_host_names_that_the_settings_allow(keys: Path) -> None:
    authorization = {"authorization": f"Bearer {KEY}"}
    for config, access, allowed, headers in (
        (ServerConfig(hosts=("gpu-1.example",)), Access(), "gpu-1.example", {}),
        (ServerConfig(), Access(host="GPU-2", insecure=True), "gpu-2:5000", {}),
        (ServerConfig(), Access(api_key_file=keys), "any.example", authorization),
        (ServerConfig(hosts=("gpu-1.example",)), Access(api_key_file=keys), "gpu-1.example", authorization),
    ):
        status = 401 if access.api_key_file and not config.hosts else 403
        with serving(config, access=access) as running:
            assert running.ask("/v1/models", method="GET", headers={"host": allowed} | headers).status_code == 200
            assert running.ask("/v1/models", method="GET", headers={"host": "evil.example"}).status_code == status
    for name in ("Upper.example", "name:80", "http://name", "[::1]"):
        assert [problem.setting for problem in ServerConfig(hosts=(name,)).problems()] == ["hosts"]


def test_prompts_and_answers_are_logged_unless_the_request_forbids_it() -> None:
    with serving(ServerConfig(), access=Access(log_prompts=True)) as running:
        running.complete(prompt="ab", max_tokens=4)
        running.complete(prompt="cd", max_tokens=4, stream=True)
        private = running.ask("/api", {"prompts": ["xyz"], "tokens_to_generate": 6, "no_log": True}, "PUT")
    assert private.json()["text"] == ["xyzxyzxyz"]
    plain, streamed, without = running.log
    assert 'prompt="ab"' in plain and 'answer=["abab"]' in plain
    assert 'prompt="cd"' in streamed and 'answer=["cdcd"]' in streamed
    assert "tokens=6" in without and "xyz" not in without


def test_requests_beyond_the_time_limit_are_ended() -> None:
    config, device = ServerConfig(drain_seconds=0.3), EchoDevice(seconds=0.005)
    with serving(config, device) as running, ThreadPoolExecutor(1) as pool:
        futures = pool.submit(running.complete, prompt="ab", max_tokens=4000)
        assert wait_until(lambda: running.worker.statistics().running)
        running.server.handle_exit(15, None)
        assert futures.result().status_code == 503
        running.thread.join(100)
        assert running.server.exit_code == 0 and not running.thread.is_alive()
