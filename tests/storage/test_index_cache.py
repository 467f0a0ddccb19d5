"""Index files are reused if intact and of the same key; otherwise one process rebuilds them and others wait."""

import errno
import fcntl
import gc
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from token_files import tokenizer, write
from user_errors import user_error
from waiting import wait_until

from megajax.data.rows.splits import Rows
from megajax.data.text import gpt
from megajax.data.text.config import BlendConfig
from megajax.models.decoder.config import text_schema
from megajax.storage.cache_limit import VARIABLE
from megajax.storage.index_cache import load_or_build, verify


class Builder:
    """Counts how often it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _: object = None) -> dict[str, np.ndarray]:
        self.calls += 1
        return {
            "a": np.arange(6, dtype=np.int64).reshape(3, 2),
            "c": np.array([], np.int16),
            "b": np.arange(5, dtype="u1"),
        }


def check(arrays: dict[str, np.ndarray]) -> None:
    for name, expected in Builder()().items():
        assert arrays[name].dtype == expected.dtype and arrays[name].shape == expected.shape
        np.testing.assert_array_equal(arrays[name], expected)


def test_built_once_per_description(tmp_path: Path) -> None:
    build = Builder()
    for _ in range(2):
        check(load_or_build(tmp_path / "new", {"seed": 1}, build))
    assert build.calls == 1
    check(load_or_build(tmp_path / "new", {"seed": 2}, build))
    assert build.calls == 2 and len(list((tmp_path / "new").iterdir())) == 2


@pytest.mark.parametrize("harm", ["cut", "contents", "empty", "other", "header"])
def test_a_damaged_file_is_built_again(tmp_path: Path, harm: str) -> None:
    build = Builder()
    load_or_build(tmp_path, {"seed": 1}, build)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    if harm == "other":
        load_or_build(tmp_path / "other", {"seed": 2}, build)
        content = bytearray(next((tmp_path / "other").iterdir()).read_bytes())
        build.calls = 1
    elif harm in ("contents", "header"):
        content[5 if harm == "header" else -60] ^= 1
    path.write_bytes({"cut": content[:-40], "empty": b""}.get(harm, bytes(content)))
    with pytest.warns(UserWarning, match=rf"{path}: damaged: built again") as warned:
        check(load_or_build(tmp_path, {"seed": 1}, build))
    assert len(warned) == 1
    assert build.calls == 2
    check(load_or_build(tmp_path, {"seed": 1}, build))
    assert build.calls == 2


def test_arrays_are_compared_with_their_checksum_on_request(tmp_path: Path) -> None:
    """They are not compared at each start, which would read terabytes."""
    (path,) = load_or_build(tmp_path, {"seed": 1}, Builder()).files
    verify(path)
    content = bytearray(path.read_bytes())
    content[64] ^= 1  # of the first array
    path.write_bytes(content)
    assert load_or_build(tmp_path, {"seed": 1}, pytest.fail)["a"][0, 0] == 1
    with user_error():
        verify(path)


KILLED = """
import os, pathlib, sys
import numpy as np
from megajax.storage import index_cache as cache

def killed(*_):
    os.kill(os.getpid(), 9)

setattr(*{"written": (os, "fsync", killed), "renamed": (pathlib.Path, "replace", killed)}[sys.argv[2]])
arrays = {"a": np.arange(6, dtype=np.int64).reshape(3, 2)}
cache.load_or_build(pathlib.Path(sys.argv[1]), {"seed": 1}, lambda _: arrays)
"""


@pytest.mark.parametrize("before", ["written", "renamed"])
def test_a_job_that_is_killed_while_it_writes_leaves_nothing_under_the_name(tmp_path: Path, before: str) -> None:
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), before], check=False)
    assert process.returncode == -9 and not list(tmp_path.glob("*.arrays"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build = Builder()
        for _ in range(2):
            check(load_or_build(tmp_path, {"seed": 1}, build))
    assert build.calls == 1


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks in the folder"])
def test_one_job_builds_while_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    if not locks:
        lock = fcntl.flock

        def of_other_folders(descriptor: int, operation: int) -> None:
            if Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent == tmp_path / "cache":
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
            lock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", of_other_folders)
        (tmp_path / "host").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "host"))
    build, started = Builder(), list[int]()

    def build_when_all_have_started(new: Any) -> dict[str, np.ndarray]:
        assert wait_until(lambda: len(started) == 4)
        return build(new)

    def job(number: int) -> dict[str, np.ndarray]:
        started.append(number)
        return load_or_build(tmp_path / "cache", {"seed": 1}, build_when_all_have_started)

    with ThreadPoolExecutor(4) as pool:
        for arrays in pool.map(job, range(4)):
            check(arrays)
    assert build.calls == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".arrays"]
    assert locks or not list((tmp_path / "host").glob("*/*"))


DIES = """
import os, pathlib, sys
import numpy as np
from megajax.storage import index_cache as cache

def build(new):
    new((1000, 3), np.int64)[:] = 7
    print("building", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), 9)

cache.load_or_build(pathlib.Path(sys.argv[1]), {"seed": 1}, build)
"""


def test_a_builder_that_dies_leaves_no_one_waiting(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DIES, str(tmp_path)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as dying,
        ThreadPoolExecutor(1) as pool,
    ):
        assert dying.stdout is not None and dying.stdout.readline() == b"building\n"
        build = Builder()
        waiting = pool.submit(load_or_build, tmp_path, {"seed": 1}, build)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        dying.communicate(b"\n")
        check(waiting.result(100))
    assert build.calls == 1 and dying.returncode == -9
    assert [path.suffix for path in tmp_path.iterdir()] == [".arrays"]


def test_arrays_are_filled_in_the_file(tmp_path: Path) -> None:
    def build(new: Any) -> dict[str, np.ndarray]:
        large, empty = new((3, 70_000), np.int32), new(0, np.uint8)
        assert not large.any()
        large[:] = np.arange(210_000).reshape(3, -1)
        return {"large": large, "more": np.arange(5), "empty": empty}

    for _ in range(2):
        arrays = load_or_build(tmp_path, {}, build)
        np.testing.assert_array_equal(arrays["large"].ravel(), np.arange(210_000, dtype=np.int32))
        assert arrays["more"].tolist() == [0, 1, 2, 3, 4] and arrays["empty"].shape == (0,)
        assert not arrays["large"].flags.writeable
        verify(*arrays.files)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space is reserved before it is written: a write to a memory map of a full disk would kill the process."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.warns(UserWarning, match=r"cannot be written \(No space left on device; .*\): .* kept in memory"):
        check(load_or_build(tmp_path, {"seed": 1}, Builder()))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_at_the_last_bytes(tmp_path: Path) -> None:
    """The first write to a disk with too little space writes a part, without an error."""
    (path,) = load_or_build(tmp_path / "whole", {"seed": 1}, Builder()).files
    size, limits = path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, limits[1]))
    try:
        with pytest.warns(UserWarning, match=r"cannot be written \(File too large; .*\): .* kept in memory"):
            check(load_or_build(tmp_path / "full", {"seed": 1}, Builder()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "full").iterdir())


def test_a_folder_that_is_deleted_while_one_waits(tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def build_and_wait(_: Any) -> dict[str, np.ndarray]:
        entered.set()
        assert leave.wait(60)
        return Builder()()

    waits, build = Builder(), tmp_path / "cache"
    with ThreadPoolExecutor(2) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first one cannot store its arrays
        first = pool.submit(load_or_build, build, {"seed": 1}, build_and_wait)
        assert entered.wait(60)
        second = pool.submit(load_or_build, build, {"seed": 1}, waits)
        with pytest.raises(TimeoutError):
            second.result(0.2)
        shutil.rmtree(build)
        leave.set()
        check(first.result(100))
        arrays = second.result(100)
    check(arrays)
    assert waits.calls == 1 and [*arrays.files] == [*build.iterdir()]


LOCAL = """
import fcntl, pathlib, sys
import numpy as np
from megajax.storage import index_cache as cache

fcntl.flock = lambda *_: None  # the locks of another host are not seen here

def build(new):
    values = new(100_000, np.int64)
    print("building", flush=True)
    sys.stdin.readline()
    values[:] = np.arange(100_000)
    return {"values": values}

arrays = cache.load_or_build(pathlib.Path(sys.argv[1]), {"seed": 1}, build)
cache.verify(*arrays.files)
assert np.array_equal(arrays["values"], np.arange(100_000))
"""


def test_hosts_whose_locks_are_their_own_do_not_share_a_file(tmp_path: Path) -> None:
    """On NFS with `nolock`, a second host would cut the memory-mapped file of the first one."""
    hosts = []
    with ExitStack() as stack:
        for number in range(2):
            name = f"import os; os.uname = lambda: os.uname_result(('', 'host{number}', '', '', ''))\n"
            command = [sys.executable, "-W", "error", "-c", name + LOCAL, str(tmp_path)]
            host = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert host.stdout is not None and host.stdout.readline() == b"building\n"
            hosts.append(host)
        for host in hosts:
            host.communicate(b"\n")
    assert [host.returncode for host in hosts] == [0, 0]
    assert [path.suffix for path in tmp_path.iterdir()] == [".arrays"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match=r"cannot be written .* kept in memory") as warned:
        check(load_or_build(tmp_path / "file" / "cache", {"seed": 1}, Builder()))
    assert len(warned) == 1


HOLDS = """
import pathlib, sys
import numpy as np
from megajax.storage.cache_limit import VARIABLE
from megajax.storage.index_cache import load_or_build

arrays = load_or_build(pathlib.Path(sys.argv[1]), {"seed": 0}, lambda new: pathlib.Path("it is there already").stat())
print("holds", flush=True)
sys.stdin.readline()
"""


def test_the_oldest_files_beyond_the_limit_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that another process reads stays, and so do those outside the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "megajax/indices"

    def file_of(seed: int, folder: Path = folder) -> Path:
        (file,) = load_or_build(folder, {"seed": seed}, lambda _: {"a": np.full(1000, seed)}).files
        return file

    files = [file_of(seed) for seed in range(4)]
    gc.collect()  # The maps of the files end.
    for age, file in enumerate(files):
        os.utime(file, ns=(age, age))
    file_of(1)  # It is the youngest now.
    monkeypatch.setenv(VARIABLE, str(3.5 * files[0].stat().st_size / 2**30))
    command = [sys.executable, "-c", HOLDS, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"holds\n"
        os.utime(files[0], ns=(0, 0))
        file_of(4)
        assert [file.exists() for file in files] == [True, True, False, False]
        elsewhere = [file_of(seed, tmp_path / "named") for seed in range(9)]
        assert all(file.exists() for file in elsewhere)
        other.communicate(b"\n")
    monkeypatch.setenv(VARIABLE, "0")
    newest = file_of(5)
    assert newest.exists() and not files[0].exists()
    monkeypatch.setenv(VARIABLE, "much")
    with user_error():
        file_of(6)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the indices built, in order."""
    names: list[str] = []
    original = gpt.build_index

    def build_and_count(lengths: np.ndarray, request: Any, name: str, new: Any) -> Any:
        names.append(name)
        return original(lengths, request, name, new)

    monkeypatch.setattr(gpt, "build_index", build_and_count)
    return names


def test_every_option_and_the_data_are_in_the_key(tmp_path: Path, builds: list[str]) -> None:
    prefix = write(tmp_path / "c", [[1] * 30, [2] * 30])

    def build(rows: int = 5, length: int = 8, seed: int = 1, **options: Any) -> None:
        config = BlendConfig(paths=(str(prefix),), split="1", cache_dir=str(tmp_path / "cache"), **options)
        config.build(tokenizer=tokenizer(), schema=text_schema(length, 2**31), rows=Rows(rows), seed=seed)

    changes: list[dict[str, Any]] = [{}, {"rows": 6}, {"length": 9}, {"seed": 2}, {"extra_token": False}]
    names = ("reset_positions", "reset_attention_mask", "eod_mask_loss", "isolate_documents")
    changes += [{name: True} for name in names]
    for change in changes:
        build(**change)
        build(**change)
    build(drop_last=False)  # of validation alone
    assert len(builds) == len(changes)
    times = os.stat(f"{prefix}.idx")
    write(tmp_path / "c", [[1] * 30, [2] * 30])
    os.utime(f"{prefix}.idx", ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
    build()
    assert len(builds) == len(changes)  # the same content, written later
    write(tmp_path / "c", [[1] * 29, [2] * 31])
    os.utime(f"{prefix}.idx", ns=(times.st_atime_ns, times.st_mtime_ns))
    build()
    assert len(builds) == len(changes) + 1  # other content, of the same size and date
