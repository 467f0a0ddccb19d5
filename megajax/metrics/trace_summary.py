"""Summary of a profiler trace: kernels by time, idle gaps, and exposed communication.

Reads the format of jax's profiler (`*.xplane.pb`): planes are processes, lines are threads. Times of events are in
nanoseconds.
"""

import gzip
import io
import re
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax

from megajax.config.errors import UserError
from megajax.config.read_limits import Limits, OverBudget, read_file, read_stream
from megajax.display.banner import Section

LIMITS = Limits(bytes=2**32)
"""Of a trace, packed and unpacked."""
DEVICE = re.compile(r"/device:(GPU|TPU)")
HOST = "/host:CPU"
COMMUNICATION = re.compile(
    r"nccl|(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|send|recv)\b", re.I
)
WRAPPERS = re.compile(r"(while|call|conditional|async-\w+)(\.|$)")
"""Operations that contain others, so that their time would be counted twice."""
LISTED_GAPS = 10
"""Number of idle gaps in a summary."""

type Interval = tuple[float, float]


class KernelRun(NamedTuple):
    """A run of a kernel."""

    name: str
    begin: float
    end: float
    communicates: bool


class Trace(NamedTuple):
    """The contents of a trace."""

    devices: list[list[KernelRun]]
    """Events of each device; empty for a trace without kernels."""
    steps: int | None
    """Number of steps marked with `jax.profiler.StepTraceAnnotation`; None without marks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCalls:
    """All calls of a kernel (on a CPU: of an operation), per device and step."""

    name: str
    calls: int
    milliseconds: float
    share: float
    """Share of the time of all kernels, 0 to 1."""
    exposed: float = 0.0
    """Milliseconds in which a collective ran and no computation did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """An idle gap of a device, between two kernels."""

    milliseconds: float
    after: str
    before: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSummary:
    """Milliseconds per step, averaged over the devices of this process."""

    devices: int
    steps: int
    busy: float
    """Time in which a kernel ran."""
    idle: float
    """The rest, from the first kernel of the trace to the last."""
    communication: float
    """Time in which a collective ran."""
    exposed: float
    """Time in which only collectives ran."""
    kernels: tuple[KernelCalls, ...]
    """The longest, longest first."""
    collectives: tuple[KernelCalls, ...] = ()
    """Collectives with exposed time, most exposed first."""
    gaps: tuple[Gap, ...] = ()
    """The longest gaps, longest first; not averaged."""

    def sections(self) -> list[Section]:
        """The summary as sections of metrics.banner."""
        total = self.busy + self.idle
        times = [
            (name, f"{time:.3f} ms" + (f" ({time / total:.1%})" if total else ""))
            for name, time in (
                ("kernels", self.busy),
                ("idle", self.idle),
                ("communication", self.communication),
                ("exposed communication", self.exposed),
            )
        ]
        kernels = [(f"{k.share:5.1%}  {k.milliseconds:10.3f} ms", f"{k.calls} x {k.name}") for k in self.kernels]
        collectives = [
            (f"{collective.exposed:.3f} of {collective.milliseconds:.3f} ms", collective.name)
            for collective in self.collectives
        ]
        gaps = [(f"{gap.milliseconds:.3f} ms", f"after {gap.after}, before {gap.before}") for gap in self.gaps]
        sections = [
            (f"a step, mean over {self.steps} steps and {self.devices} devices", times),
            ("longest kernels", kernels),
            ("exposed collectives", collectives),
            ("longest idle gaps", gaps),
        ]
        return [(name, rows) for name, rows in sections if rows]

    def values(self) -> dict[str, Any]:
        """The summary as plain values, for a file."""
        return asdict(self)


def find_trace(path: Path) -> Path:
    """The file itself, or the newest trace in a folder or below it. Raises UserError if there is none."""
    if not path.is_dir():
        if not path.is_file():
            raise UserError(f"{path}: no such file or folder")
        return path
    files = sorted(path.rglob("*.xplane.pb*"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        raise UserError(f"{path}: no *.xplane.pb in this folder or below it.\nTrace some steps: --profile.steps=10:12")
    return files[-1]


def _content(file: Path) -> bytes:
    """The bytes of a file, unpacked if it is compressed. Raises OverBudget for more than LIMITS."""
    packed = read_file(file, LIMITS)
    if packed[:2] != b"\x1f\x8b":
        return packed
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as stream:
        return read_stream(stream, file, LIMITS)


def read_trace(file: Path) -> Trace:
    """Read a trace, plain or compressed by gzip. Raises UserError if the file is not a trace."""
    try:
        data = _content(file)
        return parse_profile(jax.profiler.ProfileData.from_serialized_xspace(data))
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror or error}") from error
    except OverBudget:
        raise
    except (EOFError, zlib.error, ValueError, RuntimeError) as error:
        raise UserError(f"{file} is not a trace of jax's profiler, or it is truncated: {error}") from error


def parse_profile(data: Any) -> Trace:
    """Read a ProfileData: the kernels of each GPU, from its streams if it has any; without GPUs, operations by device.

    Skips records of a host without an operation, which are work of the runtime, and wrappers.
    """
    gpus: list[list[KernelRun]] = []
    hosts: dict[str, list[KernelRun]] = defaultdict(list)
    steps: set[str] = set()
    for plane in data.planes:
        if DEVICE.match(plane.name):
            lines = list(plane.lines)
            streams = [line for line in lines if line.name.startswith("Stream")]
            gpus.append([_event(e, e.name, _stats(e)) for line in streams or lines for e in line.events])
            continue
        for event in (event for line in plane.lines for event in line.events):
            stats = _stats(event)
            if "step_num" in stats:
                steps.add(stats["step_num"])
            operation = stats.get("hlo_op", "")
            if plane.name == HOST and operation and not WRAPPERS.match(operation):
                hosts[stats.get("device_ordinal", "")].append(_event(event, operation, stats))
    devices = [events for events in gpus if events] or list(hosts.values())
    return Trace(devices, len(steps) or None)


def _stats(event: Any) -> dict[str, str]:
    names = ("hlo_op", "device_ordinal", "step_num")
    return {name: str(value) for name, value in event.stats if name in names}


def _event(event: Any, name: str, stats: dict[str, str]) -> KernelRun:
    begin = float(event.start_ns)
    communicates = COMMUNICATION.search(event.name) or COMMUNICATION.match(stats.get("hlo_op", ""))
    return KernelRun(name, begin, begin + float(event.duration_ns), bool(communicates))


def summarize(devices: Sequence[list[KernelRun]], *, steps: int, top: int) -> TraceSummary:
    """Summarise the events of each device; each has at least one. top: number of kernels in the summary."""
    per = 1e-6 / (steps * len(devices))
    busy = span = communication = exposed = 0.0
    gaps: list[tuple[float, str, str]] = []
    for events in devices:
        kernels_run = merge_intervals((e.begin, e.end) for e in events)
        computing = total_length(merge_intervals((e.begin, e.end) for e in events if not e.communicates))
        busy += total_length(kernels_run)
        exposed += total_length(kernels_run) - computing
        communication += total_length(merge_intervals((e.begin, e.end) for e in events if e.communicates))
        span += kernels_run[-1][1] - kernels_run[0][0]
        last, first = {e.end: e.name for e in events}, {e.begin: e.name for e in events}
        gaps += [(b[0] - a[1], last[a[1]], first[b[0]]) for a, b in pairwise(kernels_run)]
    kernels = _kernels(devices, steps)
    longest = sorted(gaps, key=lambda gap: -gap[0])[:LISTED_GAPS]
    return TraceSummary(
        devices=len(devices),
        steps=steps,
        busy=busy * per,
        idle=(span - busy) * per,
        communication=communication * per,
        exposed=exposed * per,
        kernels=tuple(kernels[:top]),
        collectives=tuple(sorted((k for k in kernels if k.exposed), key=lambda k: -k.exposed)[:top]),
        gaps=tuple(Gap(milliseconds=gap * 1e-6, after=after, before=before) for gap, after, before in longest),
    )


def _kernels(devices: Sequence[list[KernelRun]], steps: int) -> list[KernelCalls]:
    """Kernels of all devices, longest total time first."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for events in devices:
        computing = merge_intervals((e.begin, e.end) for e in events if not e.communicates)
        begin_times, end_times = [begin for begin, _ in computing], [end for _, end in computing]
        for e in events:
            total = totals[e.name]
            total[0] += 1
            total[1] += e.end - e.begin
            if e.communicates:
                overlapping = range(bisect_right(end_times, e.begin), bisect_left(begin_times, e.end))
                hidden = sum(min(end_times[i], e.end) - max(begin_times[i], e.begin) for i in overlapping)
                total[2] += e.end - e.begin - hidden
    everything = sum(time for _, time, _ in totals.values()) or 1.0
    number = steps * len(devices)
    return [
        KernelCalls(
            name=name,
            calls=round(calls / number),
            milliseconds=time * 1e-6 / number,
            share=time / everything,
            exposed=exposed * 1e-6 / number,
        )
        for name, (calls, time, exposed) in sorted(totals.items(), key=lambda item: -item[1][1])
    ]


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that overlap or touch; sorted."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def total_length(intervals: Iterable[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)
