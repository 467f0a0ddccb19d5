"""Lines of progress appear only for long work, and not too often."""

import io

import pytest

from megajax.data import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_progress(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.sys, "stderr", stream)
    progress_line = progress.Progress("images", "listing x")
    for second in range(30):
        now[0] = 100.0 + second
        progress_line(second * 1000, second / 30)
    progress_line.clear()
    live = stream.isatty()
    lines = stream.getvalue().replace("\r", "\n").split("\n")
    assert [line for line in lines if ": 2,000 images" in line] == [
        "listing x: 2,000 images, 7 %, 1,000 images/s" + "\x1b[K" * live
    ]
    assert sum("images/s" in line for line in lines) == (28 if live else 3)
    assert stream.getvalue().endswith("\r\x1b[K" if live else "\n")


def test_quick_work_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    line = progress.Progress("images", "listing")
    line(10, 1.0)
    line.clear()
    assert capsys.readouterr() == ("", "")
