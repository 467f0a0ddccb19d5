"""The process of a server: its address, its keys, signals and exit codes."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from user_errors import user_error
from waiting import wait_until

from megajax.config.compose import problems_of
from megajax.config.errors import UserError
from megajax.serve import main
from megajax.server.config import Access, ServerConfig, is_loopback
from megajax.server.server import ReadyServer


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server's process and its address."""
    program = Path(__file__).with_name("served.py")
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths}
    server = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout
    yield server, server.stdout.readline().strip()
    server.kill()
    server.communicate()


def ask(url: str, prompt: str, max_tokens: int) -> Any:
    body = {"prompt": prompt, "max_tokens": max_tokens}
    return httpx2.post(f"{url}/v1/completions", json=body, timeout=100, verify=False)


def running(pool: ThreadPoolExecutor, url: str, max_tokens: int) -> list[Future[Any]]:
    """Four requests in progress in the engine."""
    futures = [pool.submit(ask, url, "ab", max_tokens) for _ in range(4)]
    assert wait_until(lambda: 'megajax_running{model="tiny"} 4' in httpx2.get(f"{url}/metrics", verify=False).text)
    return futures


def test_signals_and_exit_codes(process: tuple[subprocess.Popen[str], str]) -> None:
    server, url = process
    with ThreadPoolExecutor(4) as pool:
        futures = running(pool, url, 300)
        server.send_signal(signal.SIGTERM)
        assert wait_until(lambda: httpx2.get(f"{url}/health", verify=False).status_code != 200)
        refused, health = ask(url, "ab", 1), httpx2.get(f"{url}/health", verify=False)
        assert (refused.status_code, health.status_code, health.json()["status"]) == (503, 503, "draining")
        assert refused.headers["retry-after"]
        assert [future.result().json()["choices"][0]["text"] for future in futures] == ["ab" * 150] * 4
    assert server.wait(100) == 0


def test_the_second_signal_ends_at_once(process: tuple[subprocess.Popen[str], str]) -> None:
    server, url = process
    with ThreadPoolExecutor(4) as pool:
        futures = running(pool, url, 4000)
        server.send_signal(signal.SIGTERM)
        assert wait_until(lambda: httpx2.get(f"{url}/health", verify=False).status_code != 200)
        server.send_signal(signal.SIGTERM)
        assert server.wait(100) == 128 + signal.SIGTERM
        assert all(isinstance(future.exception(), httpx2.HTTPError) for future in futures)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("192.168.0.5", False), ("localhost.example", False), ("", False)],
)  # fmt: skip
def test_public_addresses_need_keys(host: str, loopback: bool, tmp_path: Path) -> None:
    assert is_loopback(host) == loopback == (not Access(host=host).problems())
    keys = tmp_path / "keys"
    assert not Access(host=host, api_key_file=keys).problems()
    assert not Access(host=host, insecure=True).problems()
    assert [problem.setting for problem in Access(host=host, insecure=True, api_key_file=keys).problems()] == [
        "--insecure"
    ]


def test_servers_that_do_not_start(tmp_path: Path) -> None:
    with user_error("--host"):
        ReadyServer(ServerConfig(), Access(host="0.0.0.0"))
    for text, message in (("", "is empty"), ("short\n", "fewer than 16")):
        (tmp_path / "keys").write_text(text)
        with pytest.raises(UserError, match=message):
            ReadyServer(ServerConfig(), Access(api_key_file=tmp_path / "keys"))
    with user_error("--api-key-file"):
        ReadyServer(ServerConfig(), Access(api_key_file=tmp_path / "none"))
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, user_error("--host"):
        ReadyServer(ServerConfig(), Access(port=listener.getsockname()[1]))
    assert [problem.setting for problem in problems_of(Access(port=70_000))] == ["port"]
    config = ServerConfig(queue=0, prompts=0, body_bytes=1, body_seconds=0.0, drain_seconds=float("nan"))
    settings = {problem.setting for problem in problems_of(config)}
    assert settings == {"queue", "prompts", "body_bytes", "body_seconds", "drain_seconds"}


def test_invalid_command_lines(tmp_path: Path) -> None:
    with user_error("--run"):
        main([])
    with user_error("--run"):
        main([f"--run={tmp_path}", f"--hf={tmp_path}"])
    with user_error("--run"):
        main([f"--run={tmp_path}"])


@pytest.mark.slow
def test_a_trained_run_is_served(tmp_path: Path) -> None:
    """`python -m megajax.serve` says what it serves, and answers the official client until SIGTERM."""
    run, module = tmp_path / "small", [sys.executable, "-m"]
    settings = ["--config=quickstart.py", "--steps=3", f"--run_dir={run}", "--evaluation.every=none"]
    train = [*module, "megajax.train", "--devices=cpu:1", *settings]
    subprocess.run(train, check=True, capture_output=True, timeout=300)
    settings = ["--inference.rows=2", "--inference.chunk=32", "--inference.template=plain", "--inference.warm_up=false"]
    settings.append("--inference.speculate=2")
    command = [*module, "megajax.serve", f"--run={run}", "--port=0", "--devices=cpu:1", *settings]
    server, banner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), list[str]()
    assert server.stdout
    for line in server.stdout:
        banner.append(line.strip())
        if line.strip().startswith("queue"):
            break
    rows = dict(line.split(maxsplit=1) for line in banner if " " in line)
    try:
        assert rows["parameters"].startswith("918.9k ")  # Without padding of the vocabulary, as in training.
        assert rows["name"] == "small" and rows["cache"].startswith("256 tokens") and rows["kernel"]
        assert rows["drafts"] == "up to 2 tokens of earlier text in a step"
        demand_answers(f"{rows['address']}/v1")
        server.send_signal(signal.SIGTERM)
        assert server.wait(100) == 0
    finally:
        server.kill()
        server.communicate()


def demand_answers(url: str) -> None:
    """Completions at once, streamed and scored; a guided chat; a refusal."""
    client = openai.OpenAI(base_url=url, api_key="none", timeout=300, max_retries=0)
    body = {"model": "small", "prompt": "The king", "max_tokens": 10, "temperature": 0}
    plain = client.completions.create(**body).choices[0].text
    streamed = client.completions.create(**body, stream=True)
    assert "".join(event.choices[0].text for event in streamed) == plain
    scored = client.completions.create(**body, logprobs=2, echo=True).choices[0]
    assert scored.text == f"The king{plain}" and scored.logprobs and scored.logprobs.token_logprobs
    first, *following = scored.logprobs.token_logprobs
    assert first is None and len(following) == 17 and all(-20 < logprob <= 0 for logprob in following)
    messages = [{"role": "user", "content": "Is it so?"}]
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "boolean"}}}
    guided = client.chat.completions.create(model="small", messages=messages, response_format=schema, max_tokens=20)
    assert guided.choices[0].message.content in ("true", "false")
    with pytest.raises(openai.BadRequestError, match=r"at most|may have"):
        client.completions.create(model="small", prompt="a" * 5000)
