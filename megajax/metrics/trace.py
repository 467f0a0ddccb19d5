"""A profiler trace in a few lines: kernels by time, idle gaps, streams, and exposed communication.

Records come from a reader: `metrics/xplane.py` for the profiler's own format, `metrics/chrome_trace.py` for the
compressed JSON file beside it. Neither jax nor numpy is imported here.
"""

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from megajax.metrics.banner import Section

DEVICE = re.compile(r"/device:(GPU|TPU)")
HOST = "/host:CPU"
COMMUNICATION = re.compile(
    r"nccl|(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|send|recv)\b", re.I
)
WRAPPERS = re.compile(r"(while|call|conditional|async-\w+)(\.|$)")
"""Operations that contain others, whose time is counted already."""
GAP_CLASSES = (0.0, 10.0, 100.0, 1000.0)
"""Lower ends of the classes of idle gaps, in microseconds."""
LONGEST = 5
"""How many idle gaps are listed one by one."""

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
    exposed: float = 0.0
    """Milliseconds per device and step of a collective, while nothing was computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GapClass:
    """Idle gaps between kernels of a device, by length."""

    over: float
    """Lower end of the class, in microseconds; its upper end is the lower end of the next."""
    gaps: float
    """Per device and step."""
    milliseconds: float
    """Per device and step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """One idle gap of a device."""

    milliseconds: float
    after: str
    """The kernel that ended last before it."""
    before: str
    """The kernel that started after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """One stream of a device (on a CPU: threads of one pool)."""

    name: str
    milliseconds: float
    """Busy time per device and step."""
    share: float
    """Of the time from the first kernel of the trace to the last, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSummary:
    """Milliseconds per step, means over the devices of this process."""

    devices: int
    steps: int
    busy: float
    """Time in which a kernel ran."""
    idle: float
    """The rest, from the first kernel of the trace to the last."""
    communication: float
    """Time in which a collective ran."""
    exposed: float
    """Part of that in which nothing else ran."""
    kernels: tuple[Kernel, ...]
    """By time, longest first."""
    collectives: tuple[Kernel, ...] = ()
    """Those with exposed time, most first."""
    gaps: tuple[GapClass, ...] = ()
    """Shortest first, without classes that have no gap."""
    longest_gaps: tuple[Gap, ...] = ()
    streams: tuple[Stream, ...] = ()
    """By busy time, most first."""

    def sections(self) -> list[Section]:
        """As sections for metrics.banner."""

        def part(milliseconds: float) -> str:
            whole = self.busy + self.idle
            return f"{milliseconds:.3f} ms" + (f" ({milliseconds / whole:.1%})" if whole else "")

        times = [
            ("kernels", part(self.busy)),
            ("idle", part(self.idle)),
            ("communication", part(self.communication)),
            ("of it exposed", part(self.exposed)),
        ]
        kernels = [(f"{k.share:5.1%}  {k.milliseconds:10.3f} ms", f"{k.calls} x {k.name}") for k in self.kernels]
        collectives = [(f"{one.exposed:.3f} of {one.milliseconds:.3f} ms", one.name) for one in self.collectives]
        gaps = [(f"over {one.over:g} us", f"{one.gaps:g} gaps, {part(one.milliseconds)}") for one in self.gaps]
        gaps += [(f"{gap.milliseconds:.3f} ms", f"after {gap.after}, before {gap.before}") for gap in self.longest_gaps]
        streams = [(stream.name, f"{stream.milliseconds:.3f} ms ({stream.share:.1%})") for stream in self.streams]
        title = f"a step, mean over {self.steps} steps and {self.devices} devices"
        rest = [("exposed collectives", collectives), ("idle gaps", gaps), ("busy streams", streams)]
        return [(title, times), ("longest kernels", kernels), *((name, rows) for name, rows in rest if rows)]

    def values(self) -> dict[str, Any]:
        """As plain values, for a file."""
        return asdict(self)


class Record(NamedTuple):
    """One record of a profiler. Times in nanoseconds."""

    process: str
    """/device:GPU:0, /host:CPU."""
    thread: str
    """Stream #13(Compute)."""
    name: str
    begin: float
    end: float
    operation: str = ""
    """The HLO operation it belongs to."""
    ordinal: str = ""
    """The device of an operation that the host ran."""


class Event(NamedTuple):
    """One run of one kernel. Times in nanoseconds."""

    name: str
    begin: float
    end: float
    communicates: bool
    stream: str = ""


def kernels_by_device(records: Iterable[Record]) -> list[list[Event]]:
    """The kernels of each GPU, from its streams if it has any; without GPUs, the operations of each CPU device.

    Records of a host without an operation are the runtime's own work, and wrappers would be counted twice.
    """
    on_device: dict[str, list[Event]] = defaultdict(list)
    on_host: dict[str, list[Event]] = defaultdict(list)
    for process, thread, name, begin, end, operation, ordinal in records:
        communicates = bool(COMMUNICATION.search(name) or COMMUNICATION.match(operation))
        if DEVICE.match(process):
            on_device[process].append(Event(name, begin, end, communicates, thread.partition("/")[0]))
        elif process == HOST and operation and not WRAPPERS.match(operation):
            on_host[ordinal].append(Event(operation, begin, end, communicates, thread.partition("/")[0]))
    streams = [[event for event in events if event.stream.startswith("Stream")] for events in on_device.values()]
    kernels = [some or events for some, events in zip(streams, on_device.values(), strict=True)]
    return kernels or list(on_host.values())


def summary(devices: Sequence[list[Event]], *, steps: int, top: int) -> TraceSummary:
    """Summary of the events of each device, none of them empty. top: how many kernels are listed."""
    per = 1e-6 / (steps * len(devices))
    busy = span = communication = exposed = 0.0
    for events in devices:
        computing = length(union((e.begin, e.end) for e in events if not e.communicates))
        device_busy = length(union((e.begin, e.end) for e in events))
        busy += device_busy
        exposed += device_busy - computing
        communication += length(union((e.begin, e.end) for e in events if e.communicates))
        span += max(e.end for e in events) - min(e.begin for e in events)
    kernels = _kernels(devices, steps)
    classes, longest_gaps = _gaps(devices, per)
    return TraceSummary(
        devices=len(devices),
        steps=steps,
        busy=busy * per,
        idle=(span - busy) * per,
        communication=communication * per,
        exposed=exposed * per,
        kernels=tuple(kernels[:top]),
        collectives=tuple(sorted((k for k in kernels if k.exposed), key=lambda k: -k.exposed)[:top]),
        gaps=classes,
        longest_gaps=longest_gaps,
        streams=_streams(devices, per, span)[:top],
    )


def _kernels(devices: Sequence[list[Event]], steps: int) -> list[Kernel]:
    """By time, longest first."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for events in devices:
        computing = union((e.begin, e.end) for e in events if not e.communicates)
        begins, ends = [begin for begin, _ in computing], [end for _, end in computing]
        for e in events:
            total = totals[e.name]
            total[0] += 1
            total[1] += e.end - e.begin
            if e.communicates:
                overlapping = range(bisect_right(ends, e.begin), bisect_left(begins, e.end))
                hidden = sum(min(ends[i], e.end) - max(begins[i], e.begin) for i in overlapping)
                total[2] += e.end - e.begin - hidden
    everything = sum(time for _, time, _ in totals.values()) or 1.0
    number = steps * len(devices)
    return [
        Kernel(
            name=name,
            calls=round(calls / number),
            milliseconds=time * 1e-6 / number,
            share=time / everything,
            exposed=exposed * 1e-6 / number,
        )
        for name, (calls, time, exposed) in sorted(totals.items(), key=lambda item: -item[1][1])
    ]


def _gaps(devices: Sequence[list[Event]], per: float) -> tuple[tuple[GapClass, ...], tuple[Gap, ...]]:
    """Classes of idle gaps, and the longest one by one."""
    gaps: list[tuple[float, str, str]] = []
    for events in devices:
        busy = union((e.begin, e.end) for e in events)
        last, first = {e.end: e.name for e in events}, {e.begin: e.name for e in events}
        gaps += [(after[0] - before[1], last[before[1]], first[after[0]]) for before, after in pairwise(busy)]
    classes = []
    for over, upper in pairwise((*GAP_CLASSES, float("inf"))):
        inside = [gap for gap, *_ in gaps if 1e3 * over < gap <= 1e3 * upper]
        if inside:
            number = round(len(inside) * per * 1e6, 2)
            classes.append(GapClass(over=over, gaps=number, milliseconds=sum(inside) * per))
    longest = sorted(gaps, key=lambda gap: -gap[0])[:LONGEST]
    return tuple(classes), tuple(Gap(milliseconds=gap * 1e-6, after=a, before=b) for gap, a, b in longest)


def _streams(devices: Sequence[list[Event]], per: float, span: float) -> tuple[Stream, ...]:
    busy: dict[str, float] = defaultdict(float)
    for events in devices:
        streams: dict[str, list[Interval]] = defaultdict(list)
        for e in events:
            streams[e.stream].append((e.begin, e.end))
        for name, intervals in streams.items():
            busy[name] += length(union(intervals))
    return tuple(
        Stream(name=name or "unnamed", milliseconds=time * per, share=time / span if span else 0.0)
        for name, time in sorted(busy.items(), key=lambda item: -item[1])
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that neither overlap nor touch, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Total length of intervals that don't overlap."""
    return sum(end - begin for begin, end in intervals)
