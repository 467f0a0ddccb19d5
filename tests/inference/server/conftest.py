"""A server that the tests of a module share."""

from collections.abc import Iterator

import pytest
from served import Running, start, stop

from megajax.inference.server.config import ServerConfig


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """With small limits, and without unknown fields."""
    config = ServerConfig(
        strict=True,
        queue=32,
        prompts=8,
        body_bytes=64 * 1024,
        header_bytes=4096,
        connections=100,
        header_seconds=0.4,
        body_seconds=0.4,
        write_seconds=1.0,
    )
    running = start(config)
    yield running
    stop(running)
