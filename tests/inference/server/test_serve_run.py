"""`python -m megajax.serve` on a run that was just trained, with requests of the official client."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps."""
    folder = tmp_path_factory.mktemp("serve") / "small"
    command = [
        "--config=quickstart.py",
        "--devices=cpu:1",
        "--steps=3",
        f"--run_dir={folder}",
        "--evaluation.every=none",
    ]
    subprocess.run([sys.executable, "-m", "megajax.train", *command], check=True, capture_output=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def process(run: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server and its address. It says what it serves before it answers."""
    settings = ["--inference.rows=2", "--inference.chunk=32", "--inference.template=plain", "--inference.warm_up=false"]
    command = [sys.executable, "-m", "megajax.serve", f"--run={run}", "--port=0", "--devices=cpu:1", *settings]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout
    banner = []
    for line in server.stdout:
        banner.append(line.strip())
        if line.strip().startswith("queue"):
            break
    rows = dict(line.split(maxsplit=1) for line in banner if " " in line)
    assert rows["parameters"].startswith("918.9k ")  # Without padding of the vocabulary, as in training.
    assert rows["name"] == "small" and rows["cache"].startswith("256 tokens") and rows["kernel"]
    yield server, rows["address"]
    server.kill()
    server.communicate()


def test_the_official_client_and_the_end(process: tuple[subprocess.Popen[str], str]) -> None:
    server, url = process
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)
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
    server.send_signal(signal.SIGTERM)
    assert server.wait(30) == 0
