"""Trace files: a hand-made one with known answers, a real one by both readers, and the tool that prints them."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.config.errors import UserError
from megajax.metrics import chrome_trace, xplane
from megajax.metrics.trace import Kernel, kernels_by_device, summary
from megajax.tools import trace as tool


def named(pid: int, name: str, tid: int | None = None) -> dict[str, Any]:
    what = {"name": "process_name"} if tid is None else {"name": "thread_name", "tid": tid}
    return {"ph": "M", "pid": pid, "args": {"name": name}, **what}


def span(tid: int, name: str, begin: float, end: float, *, pid: int = 1, **args: str) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": begin, "dur": end - begin, "args": args}


GPU = [
    named(1, "/device:GPU:0"),
    named(1, "Stream #13(Compute)", 13),
    named(1, "Stream #20(Compute)", 20),
    named(1, "XLA Modules", 99),
    named(2, "/host:CPU"),
    named(2, "python", 1),
    # Two steps of 5000 us: matmuls on one stream, collectives on the other; half of the first all-gather is exposed.
    span(13, "gemm", 0, 4000),
    span(20, "ncclDevKernel_AllGather", 3000, 5000),
    span(13, "gemm", 5000, 8000),
    span(20, "ncclDevKernel_AllGather", 6000, 7000),
    span(13, "fusion", 8200, 9980),
    span(13, "memset", 9985, 10000),
    span(99, "jit_train_step", 0, 10000),
    span(1, "train", 0, 100, pid=2, step_num="7"),
    span(1, "train", 100, 200, pid=2, step_num="8"),
    span(1, "ThunkExecute", 0, 9000, pid=2),
    {},
]


def written(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"displayTimeUnit": "ns", "traceEvents": records}).encode()))
    return path


def test_a_trace_of_a_gpu_by_hand(tmp_path: Path) -> None:
    file = written(tmp_path / "profile" / "one.trace.json.gz", GPU)
    found = chrome_trace.read(tmp_path)
    assert (found.file, found.steps, found.complete, len(found.devices)) == (file, 2, True, 1)
    said = summary(found.devices, steps=2, top=2)
    assert (said.busy, said.idle) == pytest.approx((9.795 / 2, 0.205 / 2))
    assert (said.communication, said.exposed) == pytest.approx((1.5, 0.5))
    assert said.kernels == (
        Kernel(name="gemm", calls=1, milliseconds=3.5, share=pytest.approx(7 / 11.795)),
        Kernel(name="ncclDevKernel_AllGather", calls=1, milliseconds=1.5, share=pytest.approx(3 / 11.795), exposed=0.5),
    )
    (collective,) = said.collectives
    assert (collective.milliseconds, collective.exposed) == pytest.approx((1.5, 0.5))
    classes = {one.over: (one.gaps, one.milliseconds) for one in said.gaps}
    assert classes == {0.0: (0.5, pytest.approx(0.0025)), 100.0: (0.5, pytest.approx(0.1))}
    longest = said.longest_gaps[0]
    assert (longest.milliseconds, longest.after, longest.before) == (pytest.approx(0.2), "gemm", "fusion")
    busy = {stream.name: stream.share for stream in said.streams}
    assert busy == {"Stream #13(Compute)": pytest.approx(8795 / 10000), "Stream #20(Compute)": pytest.approx(0.3)}


def test_kernels_that_touch_leave_no_gap(tmp_path: Path) -> None:
    """Microseconds with three digits do not add up in binary."""
    records = [named(1, "/device:GPU:0"), named(1, "Stream #1", 1)]
    records += [{**span(1, "k", 0, 0), "ts": round(0.1 * n, 3), "dur": 0.1} for n in range(1000)]
    (events,) = chrome_trace.read(written(tmp_path / "x.trace.json.gz", records)).devices
    assert summary([events], steps=1, top=1).gaps == ()


@pytest.mark.gpu
def test_both_readers_say_the_same_of_a_real_trace(tmp_path: Path) -> None:
    devices = jax.devices()[:2]
    place = NamedSharding(Mesh(devices, ("data",)), PartitionSpec("data"))
    x = jax.device_put(jnp.ones((64, 64)), place)
    work = jax.jit(lambda x: (x @ x.T).sum())
    work(x).block_until_ready()
    options: Any = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(str(tmp_path), profiler_options=options)
    for number in range(3):
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            work(x).block_until_ready()
    jax.profiler.stop_trace()
    trace, expected = chrome_trace.read(tmp_path), xplane.summarize(tmp_path, steps=3, top=50)
    assert trace.steps == 3 and trace.complete and len(trace.devices) == len(devices)
    found = summary(trace.devices, steps=3, top=50)
    assert expected is not None and found.kernels and found.streams
    assert {k.name: (k.calls, pytest.approx(k.milliseconds)) for k in found.kernels} == {
        k.name: (k.calls, k.milliseconds) for k in expected.kernels
    }
    for name in ("busy", "idle", "communication", "exposed"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-5)


def test_the_tool_prints_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = written(tmp_path / "one.trace.json.gz", GPU)
    assert tool.main([str(tmp_path), "--top=1", f"--json={tmp_path / 'out.json'}"]) == 0
    text = capsys.readouterr().out
    for part in ("mean over 2 steps and 1 devices", "1 x gemm", "exposed collectives", "idle gaps", "Stream #13"):
        assert part in text
    assert tool.main([str(file), "--top=1", "--steps=1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["kernels"][0]["calls"] == 2 and printed["complete"]
    assert json.loads((tmp_path / "out.json").read_text())["steps"] == 2


def test_a_file_at_the_profilers_limit_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chrome_trace, "MOST_EVENTS", 5)
    assert tool.main([str(written(tmp_path / "one.trace.json.gz", GPU))]) == 0
    assert "the profiler drops the rest" in capsys.readouterr().out


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut.trace.json.gz"
    cut.write_bytes(written(tmp_path / "whole.json.gz", GPU).read_bytes()[:100])
    text = tmp_path / "text.json"
    text.write_text("[]")
    host = written(tmp_path / "host.trace.json.gz", [named(2, "/host:CPU"), span(1, "python", 0, 1, pid=2)])
    refused = [
        ([str(tmp_path / "none")], "no such file or folder"),
        ([str(cut)], "is no trace of jax's profiler, or it is cut off"),
        ([str(text)], "is no trace of jax's profiler"),
        ([str(host)], "has no kernels"),
        (["--top=3"], "the first word must be a folder or a file"),
        ([str(host), "--top=0"], "must be at least 1"),
    ]
    (tmp_path / "empty").mkdir()
    refused.append(([str(tmp_path / "empty")], r"no \*\.trace\.json\.gz in this folder"))
    for words, said in refused:
        with pytest.raises(UserError, match=said):
            tool.main(words)


def test_the_readers_agree_on_a_gpu(tmp_path: Path) -> None:
    """The profiler's own format of the trace above, with its planes, lines and events stood in for."""
    names = {
        (record.get("pid"), record.get("tid")): record["args"]["name"] for record in GPU if record.get("ph") == "M"
    }

    def line(pid: int, tid: int) -> Any:
        spans = [record for record in GPU if record.get("ph") == "X" and (record["pid"], record["tid"]) == (pid, tid)]
        events = [
            SimpleNamespace(name=one["name"], start_ns=1e3 * one["ts"], duration_ns=1e3 * one["dur"], stats=[])
            for one in spans
        ]
        return SimpleNamespace(name=names[pid, tid], events=events)

    lines = {1: [line(1, tid) for tid in (13, 20, 99)], 2: [line(2, 1)]}
    data = SimpleNamespace(planes=[SimpleNamespace(name=names[pid, None], lines=lines[pid]) for pid in (1, 2)])
    devices = kernels_by_device(xplane.records(data))
    expected = chrome_trace.read(written(tmp_path / "one.trace.json.gz", GPU)).devices
    assert summary(devices, steps=2, top=9) == summary(expected, steps=2, top=9)
