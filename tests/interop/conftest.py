"""Conversions in the process of the tests, and processes that no test leaves behind."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gangs import Started, started

from megajax import convert
from megajax.checkpoint import boxes


@pytest.fixture(autouse=True)
def quiet_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """`convert.main` leaves no settings of devices and signals for later programs."""
    monkeypatch.setattr(convert, "use_devices", lambda devices: None)
    monkeypatch.setattr(convert.signal, "signal", lambda number, handler: None)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts commands."""
    with started(tmp_path) as start:
        yield start


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks for each array."""
    monkeypatch.setattr(boxes, "CHUNK_BYTES", 1600)
