"""What a profiler trace says in a few lines: kernels by time, idle gaps, streams, and exposed communication.

The events come from a reader: `megajax.metrics.xplane` of what the profiler recorded, `megajax.metrics.chrome_trace` of
the compressed JSON file beside it. Neither jax nor numpy is imported here.
"""

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from megajax.metrics.banner import Section

COMMUNICATION = re.compile(
    r"nccl|(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|send|recv)\b", re.I
)
WRAPPERS = re.compile(r"(while|call|conditional|async-\w+)(\.|$)")
"""Operations that contain others, whose time is counted already."""
CLASSES = (0.0, 10.0, 100.0, 1000.0)
"""Lower ends of the classes of idle gaps, in microseconds."""
LONGEST = 5
"""Idle gaps that are listed one by one."""

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
class Collective:
    """All calls of one collective of which some time is exposed."""

    name: str
    milliseconds: float
    """Per device and step."""
    exposed: float
    """Milliseconds per device and step in which nothing was computed beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GapClass:
    """Idle gaps between kernels of a device, by length."""

    over: float
    """Shortest of the class, in microseconds; the next class begins where this one ends."""
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
    """The kernel that began after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """One stream of a device (on a CPU: threads of one pool)."""

    name: str
    milliseconds: float
    """In which a kernel of it ran, per device and step."""
    share: float
    """Of the time from the first kernel of the trace to the last, 0 to 1."""


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
    collectives: tuple[Collective, ...] = ()
    """Those with exposed time, most first."""
    gaps: tuple[GapClass, ...] = ()
    """Shortest first; classes without a gap are left out."""
    longest_gaps: tuple[Gap, ...] = ()
    streams: tuple[Stream, ...] = ()
    """By busy time, most first."""

    def sections(self) -> list[Section]:
        """As sections for metrics.banner."""
        whole = self.busy + self.idle
        times = [
            ("kernels", _of(self.busy, whole)),
            ("idle", _of(self.idle, whole)),
            ("communication", _of(self.communication, whole)),
            ("of it exposed", _of(self.exposed, whole)),
        ]
        kernels = [
            (f"{kernel.share:5.1%}  {kernel.milliseconds:10.3f} ms", f"{kernel.calls} x {kernel.name}")
            for kernel in self.kernels
        ]
        collectives = [(f"{one.exposed:.3f} of {one.milliseconds:.3f} ms", one.name) for one in self.collectives]
        gaps = [(f"over {one.over:g} us", f"{one.gaps:g} gaps, {_of(one.milliseconds, whole)}") for one in self.gaps]
        gaps += [(f"{gap.milliseconds:.3f} ms", f"after {gap.after}, before {gap.before}") for gap in self.longest_gaps]
        streams = [(stream.name, f"{stream.milliseconds:.3f} ms ({stream.share:.1%})") for stream in self.streams]
        title = f"a step, mean over {self.steps} steps and {self.devices} devices"
        rest = [("exposed collectives", collectives), ("idle gaps", gaps), ("busy streams", streams)]
        return [(title, times), ("longest kernels", kernels), *((name, rows) for name, rows in rest if rows)]

    def values(self) -> dict[str, Any]:
        """As plain values, for a file."""
        return asdict(self)


def _of(part: float, whole: float) -> str:
    return f"{part:.3f} ms" + (f" ({part / whole:.1%})" if whole else "")


@dataclass(frozen=True, slots=True)
class Event:
    """One run of one kernel. Times in nanoseconds."""

    name: str
    begin: float
    end: float
    communicates: bool
    stream: str = ""


def summary(devices: Sequence[list[Event]], *, steps: int, top: int) -> TraceSummary:
    """Summary of the events of each device, none of them empty. top: how many kernels are listed."""
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
    classes, long_gaps = _gaps(devices, per)
    return TraceSummary(
        devices=len(devices),
        steps=steps,
        busy=busy * per,
        idle=(span - busy) * per,
        communication=talk * per,
        exposed=exposed * per,
        kernels=kernels,
        collectives=_collectives(devices, per)[:top],
        gaps=classes,
        longest_gaps=long_gaps,
        streams=_streams(devices, per, span)[:top],
    )


def _collectives(devices: Sequence[list[Event]], per: float) -> tuple[Collective, ...]:
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for events in devices:
        working = union((e.begin, e.end) for e in events if not e.communicates)
        begins, ends = [begin for begin, _ in working], [end for _, end in working]
        for e in events:
            if not e.communicates:
                continue
            beside = range(bisect_right(ends, e.begin), bisect_left(begins, e.end))
            covered = sum(min(ends[i], e.end) - max(begins[i], e.begin) for i in beside)
            times[e.name][0] += e.end - e.begin
            times[e.name][1] += e.end - e.begin - covered
    found = sorted(times.items(), key=lambda item: -item[1][1])
    return tuple(
        Collective(name=name, milliseconds=time * per, exposed=alone * per) for name, (time, alone) in found if alone
    )


def _gaps(devices: Sequence[list[Event]], per: float) -> tuple[tuple[GapClass, ...], tuple[Gap, ...]]:
    """Classes of idle gaps, and the longest one by one."""
    found: list[tuple[float, str, str]] = []
    for events in devices:
        busy = union((e.begin, e.end) for e in events)
        last, first = ({} for _ in range(2))
        for e in events:
            last[e.end], first[e.begin] = e.name, e.name
        found += [(after[0] - before[1], last[before[1]], first[after[0]]) for before, after in pairwise(busy)]
    classes = []
    for place, over in enumerate(CLASSES):
        upper = CLASSES[place + 1] if place + 1 < len(CLASSES) else float("inf")
        inside = [gap for gap, *_ in found if 1e3 * over < gap <= 1e3 * upper]
        if inside:
            count = len(inside) * per * 1e6
            classes.append(GapClass(over=over, gaps=round(count, 2), milliseconds=sum(inside) * per))
    longest = sorted(found, key=lambda gap: -gap[0])[:LONGEST]
    return tuple(classes), tuple(Gap(milliseconds=gap * 1e-6, after=a, before=b) for gap, a, b in longest)


def _streams(devices: Sequence[list[Event]], per: float, span: float) -> tuple[Stream, ...]:
    busy: dict[str, float] = defaultdict(float)
    for events in devices:
        streams: dict[str, list[Interval]] = defaultdict(list)
        for e in events:
            streams[e.stream].append((e.begin, e.end))
        for name, intervals in streams.items():
            busy[name] += length(union(intervals))
    found = sorted(busy.items(), key=lambda item: -item[1])
    return tuple(
        Stream(name=name or "unnamed", milliseconds=time * per, share=time / span if span else 0.0)
        for name, time in found
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


def event(name: str, operation: str, begin: float, end: float, stream: str, *, on_host: bool) -> Event | None:
    """One record of a profiler as an Event; None for what is no kernel.

    operation: the HLO operation it belongs to, or "". On a host, records without one are the runtime's own work, and an
    operation that contains others would be counted twice.
    """
    if on_host and (not operation or WRAPPERS.match(operation)):
        return None
    talks = COMMUNICATION.search(name) is not None or COMMUNICATION.match(operation) is not None
    return Event(operation if on_host else name, begin, end, talks, stream)
