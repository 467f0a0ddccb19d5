"""Traces of a window of steps, their summaries, and invalid traces."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.config.read_limits import Limits, OverBudget
from megajax.metrics.config import ProfileConfig
from megajax.metrics.profile import Profile
from megajax.metrics.trace_summary import KernelCalls, KernelRun, find_trace, parse_profile, read_trace, summarize
from megajax.tools import trace as tool


def event(name: str, begin: float, end: float, communicates: bool = False) -> KernelRun:
    return KernelRun(name, begin * 1e6, end * 1e6, communicates)


@pytest.mark.parametrize("text", ["3", "0:2", "5:4", "x", "1:2:3", ""])
def test_windows(text):
    config = ProfileConfig(steps=text)
    if text == "3":
        assert config.window() == (3, 3) and config.problems() == []
    else:
        assert [problem.setting for problem in config.problems()] == ["steps"]


def recorded(name: str, begin: float, end: float, **stats: object) -> SimpleNamespace:
    """An event of the profiler; `begin` and `end` in microseconds."""
    return SimpleNamespace(name=name, start_ns=1e3 * begin, duration_ns=1e3 * (end - begin), stats=stats.items())


def line(name: str, *events: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(name=name, events=events)


def plane(name: str, *lines: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(name=name, lines=lines)


HOST = plane(
    "/host:CPU",
    line("worker", recorded("dot", 0, 4000, hlo_op="dot.1", device_ordinal=0), recorded("python", 0, 9000)),
    line("steps", recorded("train", 0, 100, step_num=7), recorded("train", 100, 200, step_num=8)),
)
# Two steps of 5000 us: matmuls on one stream, collectives on the other; half of the first all-gather is exposed.
GPU = plane(
    "/device:GPU:0",
    line(
        "Stream #13(Compute)",
        *(recorded("gemm", 0, 4000), recorded("gemm", 5000, 8000)),
        *(recorded("fusion", 8200, 9980), recorded("memset", 9985, 10000)),
    ),
    line(
        "Stream #20(Compute)",
        recorded("ncclDevKernel_AllGather", 3000, 5000),
        recorded("ncclDevKernel_AllGather", 6000, 7000),
    ),
    line("XLA Modules", recorded("jit_train_step", 0, 10000)),
)


def test_a_trace_of_a_gpu_by_hand() -> None:
    trace = parse_profile(SimpleNamespace(planes=[HOST, GPU]))
    assert (trace.steps, len(trace.devices)) == (2, 1)
    result = summarize(trace.devices, steps=2, top=2)
    assert (result.busy, result.idle) == pytest.approx((9.795 / 2, 0.205 / 2))
    assert (result.communication, result.exposed) == pytest.approx((1.5, 0.5))
    assert result.kernels == (
        KernelCalls(name="gemm", calls=1, milliseconds=3.5, share=pytest.approx(7 / 11.795)),
        KernelCalls(
            name="ncclDevKernel_AllGather", calls=1, milliseconds=1.5, share=pytest.approx(3 / 11.795), exposed=0.5
        ),
    )
    (collective,) = result.collectives
    assert (collective.milliseconds, collective.exposed) == pytest.approx((1.5, 0.5))
    longest, shorter = result.gaps
    assert (longest.milliseconds, longest.after, longest.before) == (pytest.approx(0.2), "gemm", "fusion")
    assert shorter.milliseconds == pytest.approx(0.005)


@pytest.mark.parametrize("planes", [[HOST], [plane("/device:GPU:0"), HOST]], ids=["cpu", "idle GPU"])
def test_without_kernels_of_gpus_operations_of_the_host_count(planes) -> None:
    (events,) = parse_profile(SimpleNamespace(planes=planes)).devices
    assert events == [KernelRun("dot.1", 0.0, 4e6, False)]


def test_a_real_trace_by_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    x, work = jnp.ones((64, 64)), jax.jit(lambda x: (x @ x.T).sum())
    work(x).block_until_ready()
    options: Any = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(str(tmp_path), profiler_options=options)
    for number in range(3):
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            work(x).block_until_ready()
    jax.profiler.stop_trace()
    trace = read_trace(find_trace(tmp_path))
    assert trace.steps == 3 and len(trace.devices) == 1
    packed = tmp_path / "one.xplane.pb.gz"
    packed.write_bytes(gzip.compress(find_trace(tmp_path).read_bytes()))
    assert read_trace(packed) == trace
    assert tool.main([str(tmp_path), "--top=1", f"--json={tmp_path / 'out.json'}"]) == 0
    text = capsys.readouterr().out
    for part in ("mean over 3 steps and 1 devices", "longest kernels", "1 x "):
        assert part in text
    assert tool.main([str(packed), "--top=1", "--steps=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 1
    assert json.loads((tmp_path / "out.json").read_text())["kernels"][0]["calls"] == 1
    truncated = tmp_path / "cut.xplane.pb.gz"
    truncated.write_bytes(packed.read_bytes()[:100])
    with user_error():
        tool.main([str(truncated)])


def test_files_that_are_not_traces_are_rejected(tmp_path: Path) -> None:
    text, empty = tmp_path / "text.json", tmp_path / "empty.xplane.pb"
    text.write_text("[]")
    empty.touch()
    (tmp_path / "folder").mkdir()
    cases = [
        ([str(tmp_path / "none")], "no such file or folder"),
        ([str(text)], "is not a trace of jax's profiler"),
        ([str(empty)], "has no kernels"),
        (["--top=3"], "the first argument must be a folder or a file"),
        ([str(empty), "--top=0"], "must be at least 1"),
        ([str(tmp_path / "folder")], r"no \*\.xplane\.pb in this folder"),
    ]
    for arguments, message in cases:
        with pytest.raises(UserError, match=message):
            tool.main(arguments)


@pytest.mark.parametrize(("index", "traces"), [(0, False), (1, True)])
def test_only_configured_processes_trace(index, traces, tmp_path: Path, monkeypatch):
    calls = []
    monkeypatch.setattr(jax, "process_index", lambda: index)
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    profile = Profile(ProfileConfig(steps="3:4", processes=(1,)), tmp_path, 0, lambda summary: None)
    due = [step for step in range(8) for hook in (profile.stop_hook(), profile.start_hook()) if hook.due(step)]
    assert due == [2, 4], "on every process: hooks that are due are followed by a collective"
    for hook, step in ((profile.start_hook(), 2), (profile.stop_hook(), 4)):
        hook(None, step)
    assert calls == ["start", "stop"] * traces


def test_processes_of_one_machine_trace_into_folders_of_their_own(tmp_path: Path, monkeypatch):
    folders = []
    for index in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        folders.append(Profile(ProfileConfig(steps="3:4", processes=(0, 1)), tmp_path, 0, print).folder)
    assert folders == [tmp_path / "process_0", tmp_path / "process_1"]


def test_a_compressed_trace_is_unpacked_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("megajax.metrics.trace_summary.LIMITS", Limits(bytes=2**20))
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(gzip.compress(bytes(2**24)))
    with pytest.raises(OverBudget, match=r"a\.xplane\.pb: refused: .* bytes, at most 1,048,576"):
        read_trace(path)
