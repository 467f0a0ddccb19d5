"""Processes for the tests of this folder."""

from collections.abc import Callable, Iterator
from pathlib import Path

import gangs
import pytest


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., gangs.Started]]:
    """start(*command, name=..., **environment) -> a process that ends with the test at the latest."""
    with gangs.started(tmp_path) as begin:
        yield begin
