"""A server that the tests of a module share."""

from collections.abc import Iterator

import openai
import pytest
from served import Running, serving

from megajax.server.config import ServerConfig


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """A server with small limits, which refuses unknown fields."""
    config = ServerConfig(
        strict=True,
        queue=32,
        prompts=8,
        body_bytes=64 * 1024,
        header_bytes=4096,
        connections=100,
        header_seconds=3.0,
        body_seconds=3.0,
        write_seconds=3.0,
    )
    with serving(config) as running:
        yield running


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server with the module's chat template. Answers repeat the prompt, so a request decides what the model says."""
    with serving(ServerConfig(reasoning=True, strict=True), template=request.module.TEMPLATE) as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
