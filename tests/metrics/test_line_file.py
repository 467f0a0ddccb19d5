"""Lines that a full disk rejects are written when there is space again, complete and in order."""

import contextlib
import errno
import json
import os
import threading
from pathlib import Path

import pytest
from user_errors import user_error

from megajax.metrics.event_log import append_event
from megajax.metrics.line_file import LineFile
from megajax.metrics.run_folder import RunFolder
from megajax.metrics.writers import EventsWriter
from megajax.reporting.history import read_history

WRITE = os.write


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """{"room": number of bytes that can still be written}."""
    space = {"room": 10**9}

    def limited(descriptor: int, data: bytes) -> int:
        if space["room"] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[: space["room"]]
        space["room"] -= len(data)
        return WRITE(descriptor, data)

    monkeypatch.setattr("megajax.metrics.line_file.os.write", limited)
    return space


def whole_lines(path: Path) -> list[int]:
    numbers = []
    for line in path.read_text().splitlines():
        try:
            numbers.append(json.loads(line)["n"])
        except ValueError:
            continue
    return numbers


@pytest.mark.parametrize("room", [0, 1, 5, 8, 9, 10])
def test_lines_wait_for_room(tmp_path: Path, disk: dict[str, int], room: int) -> None:
    messages: list[str] = []
    file = LineFile(tmp_path / "x.jsonl", messages.append)
    file.write('{"n": 0}\n')
    disk["room"] = room
    for number in (1, 2, 3):
        file.write(f'{{"n": {number}}}\n')
    assert len(messages) == 1 and "(No space left on device; free space there" in messages[0]
    disk["room"] = 10**9
    file.write('{"n": 4}\n')
    assert len(messages) == 2 and messages[1].endswith("is written again; no line was lost")
    file.close()
    assert [json.loads(line)["n"] for line in (tmp_path / "x.jsonl").read_text().splitlines()] == [0, 1, 2, 3, 4]


def test_a_partial_line_is_not_retried_forever(
    tmp_path: Path, disk: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk whose last block has room for a part of each line."""
    truncate, taken_back = os.ftruncate, []

    def truncated(descriptor: int, size: int) -> None:
        disk["room"] += os.fstat(descriptor).st_size - size
        taken_back.append(size)
        assert len(taken_back) < 100, "the line is retried forever"
        truncate(descriptor, size)

    monkeypatch.setattr("megajax.metrics.line_file.os.ftruncate", truncated)
    messages: list[str] = []
    file = LineFile(tmp_path / "x.jsonl", messages.append)
    disk["room"] = 5
    for number in range(3):
        file.write(f'{{"n": {number}}}\n')
    assert len(messages) == 1 and "No space left on device" in messages[0] and len(taken_back) == 3
    disk["room"] = 10**9
    file.close()
    assert (tmp_path / "x.jsonl").read_text() == '{"n": 0}\n{"n": 1}\n{"n": 2}\n'


def test_a_partial_line_followed_by_one_of_another_process_is_repeated(tmp_path: Path, disk: dict[str, int]) -> None:
    path = tmp_path / "events.jsonl"
    file = LineFile(path, lambda _: None)
    pread, appended = os.pread, b'{"n": 9}\n'

    def another_appends(descriptor: int, size: int, start: int) -> bytes:
        WRITE(os.open(path, os.O_WRONLY | os.O_APPEND), appended)
        return pread(descriptor, size, start + len(appended))

    disk["room"] = 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megajax.metrics.line_file.os.pread", another_appends)
        file.write('{"n": 0}\n')
    disk["room"] = 10**9
    file.write('{"n": 1}\n')
    file.close()
    assert whole_lines(path) == [0, 1]


def test_lost_lines_do_not_hide_the_error_that_ended_the_run(
    tmp_path: Path, disk: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint that could not be saved on the same full disk."""
    with pytest.raises(ValueError, match="not saved"), EventsWriter(tmp_path / "x.jsonl") as events:
        disk["room"] = 0
        events.event("start")
        raise ValueError("not saved")
    assert "the last 1 lines could not be written" in capsys.readouterr().err


def test_a_line_after_a_partial_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"n": 0}\n{"n": ')
    append_event(path, "lost", n=1)
    with path.open("a") as torn:
        torn.write('{"n": ')
    file = LineFile(path)
    file.write('{"n": 2}\n')
    file.close()
    assert whole_lines(path) == [0, 1, 2] and path.read_text().count("\n\n") == 0


def test_threads_do_not_mix_lines(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "x.jsonl")
    threads = [
        threading.Thread(target=lambda first=first: [file.write(f'{{"n": {first + n}}}\n') for n in range(200)])
        for first in (0, 1000, 2000)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    assert sorted(whole_lines(tmp_path / "x.jsonl")) == [first + n for first in (0, 1000, 2000) for n in range(200)]


FILES = ("config.yaml", "config.diff", "metrics.jsonl", "events.jsonl", "layers.jsonl", "on_event.log", ".on_event",
         "metrics.superseded.jsonl", "report.html", "loss.png")  # fmt: skip


@pytest.mark.parametrize("name", [*FILES, "checkpoints", "tensorboard", "profile"])
def test_what_is_in_the_way_of_a_run_is_named(tmp_path: Path, name: str) -> None:
    path, file = tmp_path / name, name in FILES
    if file:
        os.mkfifo(path)
    else:
        path.write_text("")
    with user_error():
        RunFolder.create(tmp_path)
    path.unlink()
    path.mkdir()
    with user_error() if file else contextlib.nullcontext():
        RunFolder.create(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "events.jsonl"
    os.mkfifo(pipe)
    (tmp_path / "null").symlink_to("/dev/null")
    for path in (pipe, tmp_path / "null"):
        for write in (LineFile, lambda path: append_event(path, "lost")):
            with pytest.raises(OSError, match="not a regular file"):
                write(path)
    assert "cannot be read: not a regular file" in " ".join(read_history(tmp_path).faults)
