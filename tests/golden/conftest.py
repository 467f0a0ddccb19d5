"""Texts that must not change by accident: compare them, or rewrite them with `pytest tests/golden --update-golden`."""

from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """golden(name, text): asserts that `text` equals tests/golden/NAME.txt, line by line."""

    def compare(name: str, text: str) -> None:
        file = FOLDER / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            file.write_text(text, encoding="utf-8")
        stored = file.read_text(encoding="utf-8") if file.exists() else ""
        # As lists of lines, so that pytest shows only lines that differ.
        hint = f"{file.name} says otherwise; if the change is meant: pytest tests/golden --update-golden"
        assert text.splitlines() == stored.splitlines(), hint

    return compare
