"""Reads what jax's profiler recorded, from its own format (`*.xplane.pb`), which has every event."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from megajax.metrics.trace import Record, TraceSummary, kernels_by_device, summary


def summarize(folder: Path, *, steps: int, top: int) -> TraceSummary | None:
    """Summary of the newest trace below `folder`, of `steps` steps; None for a trace without kernels."""
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    if not files:
        return None
    devices = kernels_by_device(records(jax.profiler.ProfileData.from_file(str(files[-1]))))
    return summary(devices, steps=steps, top=top) if devices else None


def records(data: Any) -> Iterator[Record]:
    """Of a ProfileData: planes are processes, lines are threads."""
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                stats = {name: str(value) for name, value in event.stats if name in ("hlo_op", "device_ordinal")}
                begin = float(event.start_ns)
                end = begin + float(event.duration_ns)
                of = stats.get("hlo_op", ""), stats.get("device_ordinal", "")
                yield Record(plane.name, line.name, event.name, begin, end, *of)
