"""Compiled programs on disk: the next start finds, verifies, bounds and reports them."""

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from gangs import CONFIG, REPOSITORY
from gpu_stand_in import stand_in
from peer_threads import together
from run_folder import events

from megajax.job.compile_log import COMPILED, Compile, CompileLog
from megajax.job.start import compile_cache
from megajax.job.start.compile_cache import (
    cache_in_use,
    delete_damaged,
    delete_unused,
    machine,
    record,
    unusable,
    use_cache,
)
from megajax.job.steps import first_step
from megajax.metrics.console import PlainConsole
from megajax.processes.xla_options import XlaConfig

PATIENCE = 300


def command(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess:
    """`python -m megajax.WORDS` in a new process with its cache in `folder`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    environment |= {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(folder / "cache")} | variables
    call = [sys.executable, "-m", f"megajax.{words[0]}", *words[1:]]
    return subprocess.run(call, capture_output=True, text=True, timeout=PATIENCE, cwd=REPOSITORY, env=environment)


def start(folder: Path, run: str, *arguments: str) -> tuple[str, list[dict]]:
    """Two steps of training: the output, and events about programs."""
    settings = (f"--config={CONFIG}", "--devices=cpu:1", "--steps=2", "--schedule.warmup_steps=1")
    process = command(folder, "train", *settings, f"--run_dir={folder / run}", "--evaluation.batches=0", *arguments)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout + process.stderr, events(folder / run, "compile")


def step_of(programs: list[dict]) -> dict:
    (actual,) = [program for program in programs if program["name"] == "train_step"]
    return actual


@pytest.mark.slow
def test_later_starts_find_the_programs_of_the_first(tmp_path):
    """A damaged one is compiled and written again. Generation keeps its programs, too, with their SHA-256."""
    text, programs = start(tmp_path, "first", "--checkpoint.every=2")
    assert not step_of(programs)["cached"] and "compiled the train step: cached" not in text
    folder = tmp_path / "cache/megajax/compile" / machine()
    assert f"compiled programs in {folder}" in text
    (entry,) = folder.glob("jit_train_step-*-cache")
    entry.write_bytes(entry.read_bytes()[:-9] + b"\1" * 9)
    text, programs = start(tmp_path, "damaged")
    assert not step_of(programs)["cached"] and "1 damaged entries deleted" in text
    assert "Error reading persistent compilation cache" not in text
    text, programs = start(tmp_path, "after")
    assert step_of(programs)["cached"] and "compiled the train step: cached" in text
    words = ("generate", f"--run={tmp_path / 'first'}", "--prompt=1 2", "--max-tokens=2", "--devices=cpu:1")
    process = command(tmp_path, *words, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    assert process.returncode == 0 and "damaged" not in process.stderr, process.stderr
    assert any("jit_step-" in path.name for path in folder.glob("*-cache"))
    assert all(path.with_name(f"{path.name}.sha256").exists() for path in folder.glob("*-cache"))


def compile_something() -> None:
    jax.clear_caches()

    @jax.jit
    def train_step(x):
        return jnp.sin(x) + 3

    train_step(jnp.ones(7)).block_until_ready()


def test_each_program_is_reported_once(cache, monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    use_cache(XlaConfig(compile_cache_dir=str(cache)))
    assert cache_in_use() == cache / machine()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    messages, told = [], []
    with CompileLog(messages.append, lambda event, **fields: told.append((event, fields["name"], fields["cached"]))):
        compile_something()
        assert len(messages) >= 1
        compile_something()
    compile_something()
    assert told == [("compile", "train_step", False), ("compile", "train_step", True)]
    # On a slow machine, small programs of jax itself take long enough to be reported too.
    first, second = (message for message in messages if "the train step" in message)
    assert "cached" not in first and "compiled the train step: cached, read in" in second


def test_the_terminal_shows_compilation_and_then_steps():
    messages, waits = [], []
    console = PlainConsole(total_steps=1, stream=StringIO())

    @contextmanager
    def ticker(message, **options):
        messages.append((message, signals.when))
        yield lambda renamed: messages.append((renamed, signals.when))

    console.ticker = ticker
    signals = SimpleNamespace(when="")

    def infos():
        compile_something()
        waits.append(signals.when)
        yield "the first step"

    with CompileLog(console.say) as log:
        job = SimpleNamespace(signals=signals, console=console, compiles=log)
        assert first_step(job, infos()) == "the first step"
    compiling = "after the first step, which is being compiled"
    assert messages == [("compiling the train step", compiling), ("first step", compiling)]
    assert waits == ["after this step"]


def test_a_cache_that_cannot_be_written_is_no_error(cache, capsys):
    (cache / "file").write_text("")
    use_cache(XlaConfig(compile_cache_dir=str(cache / "file")))
    assert cache_in_use() is None
    assert "can't be written" in capsys.readouterr().err


def test_the_cache_can_be_switched_off(cache):
    use_cache(XlaConfig(compile_cache=False))
    assert not jax.config.jax_enable_compilation_cache and cache_in_use() is None


def test_a_folder_that_the_user_gives_is_left_to_jax(cache, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
    use_cache(XlaConfig(compile_cache_dir=str(cache / "other")))
    assert not (cache / "other").exists()


def test_jax_evicts_the_least_recently_used_programs(cache, monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    limit = 2**14
    use_cache(XlaConfig(compile_cache_dir=str(cache), compile_cache_gib=limit / 2**30))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    folder = cache / machine()
    with CompileLog(lambda text: None):
        for number in range(1, 12):
            jax.jit(lambda x, number=number: jnp.sin(x) * number)(jnp.ones(number)).block_until_ready()
            newest = max(folder.glob("*-atime"), key=lambda path: int.from_bytes(path.read_bytes(), "little"))
    entries = list(folder.glob("*-cache"))
    assert 1 < len(entries) < 11 and sum(path.stat().st_size for path in entries) <= limit
    assert newest.with_name(newest.name.removesuffix("-atime") + "-cache") in entries
    assert len(list(folder.glob("*.sha256"))) > len(entries)
    assert delete_damaged(folder) == [], "neither jax's times of use nor what it evicted are damaged"
    assert len(list(folder.glob("*.sha256"))) == len(list(folder.glob("*-cache"))) == len(entries)


def test_folders_of_other_versions_are_deleted_when_no_run_uses_them(tmp_path):
    for name, age in (("jax-1", 40), ("jax-2", 1), ("mine", 40)):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".writable").write_text("")
        os.utime(tmp_path / name / ".writable", (10**9 - age * 86400,) * 2)
    delete_unused(tmp_path, now=10**9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jax-2", "mine"]


def test_files_without_a_matching_checksum_are_deleted(tmp_path):
    for name in ("a-cache", "b-cache", "c-cache"):
        (tmp_path / name).write_bytes(os.urandom(50))
    record(tmp_path)
    (tmp_path / "b-cache").write_bytes(b"torn")
    (tmp_path / "c-cache.sha256").unlink()
    assert delete_damaged(tmp_path) == ["b-cache"], "c-cache may be of a process that was killed, or still compiles"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-cache", "a-cache.sha256"]


def test_results_of_autotuning_are_kept_with_the_programs(cache):
    """On GPUs, XLA writes them below the folder; they are not damaged programs."""
    use_cache(XlaConfig(compile_cache_dir=str(cache)))
    folder = cache / machine()
    results = folder / "xla_gpu_per_fusion_autotune_cache_dir"
    results.mkdir()
    with CompileLog(lambda text: None):
        (results / "fusion.textproto").write_text("algorithm")
    assert delete_damaged(folder) == [] and (results / "fusion.textproto").exists()
    (results / "killed.textproto").write_text("algo")
    assert delete_damaged(folder) == []
    assert [path.name for path in results.glob("*.textproto")] == ["fusion.textproto"]


def test_programs_of_GPUs_and_of_each_processor_have_separate_folders(monkeypatch):
    monkeypatch.setattr(compile_cache, "_processor", lambda: "one")
    this_machine = machine()
    monkeypatch.setattr(compile_cache, "_processor", lambda: "another")
    assert machine() != this_machine and "-cpu-" in this_machine
    stand_in(monkeypatch)
    assert machine().endswith("-gpu")


@pytest.mark.parametrize("index", [0, 1])
def test_several_processes_use_one_folder_or_none(index, tmp_path, monkeypatch):
    """Each process has its own HOME, or sees those of the others."""
    monkeypatch.setattr(compile_cache, "SHARED_SECONDS", 0.2)
    assert together(2, lambda peers: unusable(peers, tmp_path, tmp_path / "shared")) == [None, None]
    assert not list((tmp_path / "shared").glob(".seen-*"))
    reasons = together(2, lambda peers: unusable(peers, tmp_path, tmp_path / f"own{peers.index}"))
    assert reasons[0] == reasons[1] and re.fullmatch(
        r"process 1: the compile cache .*own1 is not the folder that process 0 sees", reasons[index]
    )
    # A path that can't be inspected, such as one below a folder that process 1 may not enter.
    folders = [tmp_path / "shared", tmp_path / ("x" * 300)]
    reasons = together(2, lambda peers: unusable(peers, tmp_path, folders[peers.index]))
    assert reasons[0] == reasons[1] and "is not the folder that process 0 sees" in str(reasons[index])


@pytest.mark.parametrize("index", [0, 1])
def test_a_cache_that_one_process_cannot_write_is_used_by_none(index, tmp_path):
    """Process 0 must not skip a call that the others wait for."""
    (tmp_path / "file").write_text("")
    bases = [tmp_path, tmp_path]
    bases[0] = tmp_path / "file"
    reasons = together(2, lambda peers: unusable(peers, bases[peers.index], bases[peers.index] / "cache"))
    assert reasons[0] == reasons[1] and "can't be written" in reasons[index]


def test_a_world_writable_cache_is_not_used(tmp_path):
    """Its programs are machine code."""
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    assert "anyone may write" in str(together(1, lambda peers: unusable(peers, tmp_path, folder))[0])
    folder.chmod(0o775)
    assert together(1, lambda peers: unusable(peers, tmp_path, folder)) == [None]


def test_a_long_compilation_on_a_gpu_has_advice(monkeypatch):
    long = Compile("train_step", 140.0, False, None)
    assert long.advice() == "", "on a CPU nothing is timed"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert long.advice().endswith("--xla=xla_gpu_experimental_enable_fusion_autotuner=false")
    assert long._replace(seconds=60.0).advice() == long._replace(cached=True).advice() == ""


def test_sentences():
    assert Compile("train_step", 61.0, False, None).description() == "compiled the train step: 1m01s"
    lines, events = [], []
    log = CompileLog(lines.append, lambda event, **fields: events.append(fields["name"]))
    for name, seconds in (
        ("jit(slice)", 1.5),
        ("copy", 0.2),
        ("broadcast_in_dim", 1.5),
        ("huge", 20.0),
        ("slice", 2.0),
    ):
        log._on_duration(COMPILED, seconds, fun_name=name)
    log._on_duration(COMPILED, 3.0, fun_name="jit(train_step)")
    assert lines[0] == "compiled huge: 20 s; 2 small programs before it: 3.0 s"
    assert lines[1:] == ["compiled the train step: 3.0 s; 1 small program before it: 2.0 s"]
    assert events == ["slice", "broadcast_in_dim", "huge", "slice", "train_step"]
    assert Compile("f", 0.52, True, 40.2).description() == "compiled f: cached, read in 0.5 s, 40 s saved"
