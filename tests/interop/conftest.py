"""Conversions in the process of the tests."""

import pytest

from megajax import convert


@pytest.fixture(autouse=True)
def quiet_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """`convert.main` leaves no settings of devices and signals for later programs."""
    monkeypatch.setattr(convert, "use_devices", lambda devices: None)
    monkeypatch.setattr(convert.signal, "signal", lambda number, handler: None)
