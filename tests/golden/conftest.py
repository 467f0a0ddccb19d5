"""Texts that may not change by accident: compare, or write them anew with `pytest tests/golden --update-golden`."""

from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """golden(name, text): `text` is what tests/golden/NAME.txt holds, line by line."""

    def compare(name: str, text: str) -> None:
        file = FOLDER / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            file.write_text(text, encoding="utf-8")
        kept = file.read_text(encoding="utf-8") if file.exists() else ""
        # By lines, so that the difference shown is of those that differ.
        hint = f"{file.name} says otherwise; if the change is meant: pytest tests/golden --update-golden"
        assert text.splitlines() == kept.splitlines(), hint

    return compare
