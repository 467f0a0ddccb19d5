"""Reads what jax's profiler recorded, from its own format (`*.xplane.pb`), which holds every event."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax

from megajax.metrics.trace import Event, TraceSummary, event, summary

DEVICE = re.compile(r"/device:(GPU|TPU)")
HOST = "/host:CPU"


def summarize(folder: Path, *, steps: int, top: int) -> TraceSummary | None:
    """Summary of the newest trace below `folder`, of `steps` steps; None for a trace without kernels."""
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    if not files:
        return None
    data: Any = jax.profiler.ProfileData.from_file(str(files[-1]))
    devices = list(_devices(data).values())
    return summary(devices, steps=steps, top=top) if devices else None


def _devices(data: Any) -> dict[str, list[Event]]:
    """Kernels by device: the streams of GPUs where there are GPUs, else operations by the CPU device that ran them."""
    found: dict[str, list[Event]] = defaultdict(list)
    for plane in data.planes:
        if DEVICE.match(plane.name):
            for line in [line for line in plane.lines if line.name.startswith("Stream")] or list(plane.lines):
                for _, one in _events(line, on_host=False):
                    found[plane.name].append(one)
    if found:
        return found
    for plane in data.planes:
        if plane.name == HOST:
            for line in plane.lines:
                for device, one in _events(line, on_host=True):
                    found[device].append(one)
    return found


def _events(line: Any, *, on_host: bool) -> list[tuple[str, Event]]:
    """(device ordinal, event) of each."""
    found = []
    for one in line.events:
        stats = {name: value for name, value in one.stats if name in ("hlo_op", "device_ordinal")}
        begin = float(one.start_ns)
        stream = line.name.partition("/")[0]
        made = event(
            one.name, str(stats.get("hlo_op", "")), begin, begin + float(one.duration_ns), stream, on_host=on_host
        )
        if made is not None:
            found.append((str(stats.get("device_ordinal", "")), made))
    return found
