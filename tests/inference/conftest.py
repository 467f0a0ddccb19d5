"""The compilations of a test."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Compilations since the beginning of the test."""
    events: list[str] = []

    def note(name: str, seconds: float, **more: Any) -> None:
        if "compile" in name:
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield events
    jax.monitoring.clear_event_listeners()
