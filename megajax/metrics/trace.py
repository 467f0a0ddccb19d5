"""What a profiler trace says in a few lines: kernels by time, and communication that nothing was computed beside."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from megajax.metrics.banner import Section

COMMUNICATION = re.compile(
    r"nccl|(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|send|recv)\b", re.I
)
WRAPPERS = re.compile(r"(while|call|conditional|async-\w+)(\.|$)")
"""Operations that hold others, whose time is counted already."""

type Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """All calls of one kernel (on a CPU: of one operation)."""

    name: str
    calls: int
    """Per device and step."""
    milliseconds: float
    """Per device and step."""
    share: float
    """Of the time of all kernels, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSummary:
    """Milliseconds are per step, means over the devices of this process."""

    devices: int
    steps: int
    busy: float
    """Time in which a kernel ran."""
    idle: float
    """The rest, from the first kernel of the trace to the last."""
    communication: float
    """Time in which a collective ran."""
    exposed: float
    """Of that, time in which nothing else did."""
    kernels: tuple[Kernel, ...]
    """By time, longest first."""

    def sections(self) -> list[Section]:
        """As sections for metrics.banner."""
        whole = self.busy + self.idle
        times = [
            ("kernels", _of(self.busy, whole)),
            ("idle", _of(self.idle, whole)),
            ("communication", _of(self.communication, whole)),
            ("of it exposed", _of(self.exposed, whole)),
        ]
        rows = [
            (f"{kernel.share:5.1%}  {kernel.milliseconds:10.3f} ms", f"{kernel.calls} x {kernel.name}")
            for kernel in self.kernels
        ]
        return [(f"a step, mean over {self.steps} steps and {self.devices} devices", times), ("longest kernels", rows)]

    def values(self) -> dict[str, Any]:
        """As plain values, for a file."""
        return asdict(self)


def _of(part: float, whole: float) -> str:
    return f"{part:.3f} ms" + (f" ({part / whole:.1%})" if whole else "")


@dataclass(frozen=True, slots=True)
class _Event:
    name: str
    begin: float
    end: float
    communicates: bool


def summarize(folder: Path, *, steps: int, top: int) -> TraceSummary | None:
    """Summary of the newest trace below `folder`, of `steps` steps; None for a trace without kernels."""
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    if not files:
        return None
    data: Any = jax.profiler.ProfileData.from_file(str(files[-1]))
    devices = list(_devices(data).values())
    return summary(devices, steps=steps, top=top) if devices else None


def summary(devices: list[list[_Event]], *, steps: int, top: int) -> TraceSummary:
    """Summary of what each device did; times in ns."""
    per = 1e-6 / (steps * len(devices))
    total: dict[str, tuple[int, float]] = {}
    busy = span = talk = exposed = 0.0
    for events in devices:
        talking = union((e.begin, e.end) for e in events if e.communicates)
        working = union((e.begin, e.end) for e in events if not e.communicates)
        busy += length(union([*talking, *working]))
        talk += length(talking)
        exposed += length(union([*talking, *working])) - length(working)
        span += max(e.end for e in events) - min(e.begin for e in events)
        for e in events:
            calls, time = total.get(e.name, (0, 0.0))
            total[e.name] = calls + 1, time + e.end - e.begin
    everything = sum(time for _, time in total.values())
    longest = sorted(total.items(), key=lambda item: -item[1][1])[:top]
    kernels = tuple(
        Kernel(
            name=name,
            calls=round(calls / (steps * len(devices))),
            milliseconds=time * per,
            share=time / everything if everything else 0.0,
        )
        for name, (calls, time) in longest
    )
    return TraceSummary(
        devices=len(devices),
        steps=steps,
        busy=busy * per,
        idle=(span - busy) * per,
        communication=talk * per,
        exposed=exposed * per,
        kernels=kernels,
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same set of moments as intervals that neither overlap nor touch, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Of intervals that don't overlap."""
    return sum(end - begin for begin, end in intervals)


def _devices(data: Any) -> dict[str, list[_Event]]:
    """Kernels by device: the streams of GPUs where there are GPUs, else operations by the CPU device that ran them."""
    found: dict[str, list[_Event]] = {}
    for plane in data.planes:
        if re.match(r"/device:(GPU|TPU)", plane.name):
            streams = [line for line in plane.lines if line.name.startswith("Stream")] or list(plane.lines)
            events = [event for line in streams for event in _kernels(line, on_host=False)]
            if events:
                found[plane.name] = [event for _, event in events]
    if found:
        return found
    for plane in data.planes:
        if plane.name == "/host:CPU":
            for line in plane.lines:
                for device, event in _kernels(line, on_host=True):
                    found.setdefault(device, []).append(event)
    return found


def _kernels(line: Any, *, on_host: bool) -> Iterator[tuple[str, _Event]]:
    for event in line.events:
        stats = {name: value for name, value in event.stats if name in ("hlo_op", "device_ordinal")}
        operation = str(stats.get("hlo_op", ""))
        if on_host and (not operation or WRAPPERS.match(operation)):
            continue
        name = operation if on_host else event.name
        talks = COMMUNICATION.search(event.name) is not None or COMMUNICATION.match(operation) is not None
        begin = float(event.start_ns)
        yield str(stats.get("device_ordinal", "")), _Event(name, begin, begin + float(event.duration_ns), talks)
