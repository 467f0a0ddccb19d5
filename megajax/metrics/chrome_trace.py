"""Reads the file `*.trace.json.gz` that jax's profiler writes, with the standard library alone.

The format is Chrome's trace events: processes are devices, threads are streams, "X" events have a begin and a duration
in microseconds. The profiler writes at most MOST_EVENTS of them and drops the rest.
"""

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megajax.config.errors import UserError
from megajax.metrics.trace import Event, event

SUFFIX = ".trace.json.gz"
MOST_EVENTS = 1_000_000
DEVICE = re.compile(r"/device:(GPU|TPU)")
HOST = "/host:CPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChromeTrace:
    """What a trace file holds."""

    file: Path
    devices: tuple[list[Event], ...]
    """Events of each device; empty for a trace without kernels."""
    steps: int | None
    """Steps marked with `jax.profiler.StepTraceAnnotation`; None where none is."""
    complete: bool
    """Whether the profiler may be taken to have written every event."""


def find(path: Path) -> Path:
    """The file itself, or the newest trace file in a folder or below it. Raises UserError where there is none."""
    if path.is_dir():
        files = sorted(path.rglob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime_ns)
        if not files:
            raise UserError(
                f"{path}: no *{SUFFIX} in this folder or below it.\nTrace some steps: --profile.steps=10:12"
            )
        return files[-1]
    if not path.is_file():
        raise UserError(f"{path}: no such file or folder")
    return path


def read(path: Path) -> ChromeTrace:
    """Of a file, plain or compressed, or of the newest one below a folder. Raises UserError for anything else."""
    file = find(path)
    try:
        packed = file.read_bytes()
        text = gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed
        records = json.loads(text)["traceEvents"]
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror or error}") from error
    except (EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is no trace of jax's profiler, or it is cut off: {error}") from error
    spans = [record for record in records if record.get("ph") == "X"]
    marked = {record["args"]["step_num"] for record in spans if "step_num" in record.get("args", ())}
    return ChromeTrace(
        file=file,
        devices=tuple(_devices(records, spans).values()),
        steps=len(marked) or None,
        complete=len(spans) < MOST_EVENTS,
    )


def _devices(records: Iterable[dict[str, Any]], spans: list[dict[str, Any]]) -> dict[Any, list[Event]]:
    processes: dict[Any, str] = {}
    threads: dict[tuple[Any, Any], str] = {}
    for record in records:
        if record.get("ph") == "M" and record["name"] == "process_name":
            processes[record["pid"]] = record["args"]["name"]
        if record.get("ph") == "M" and record["name"] == "thread_name":
            threads[record["pid"], record["tid"]] = record["args"]["name"]
    streamed = {pid for (pid, _), name in threads.items() if name.startswith("Stream")}
    on_device: dict[Any, list[Event]] = defaultdict(list)
    on_host: dict[Any, list[Event]] = defaultdict(list)
    for record in spans:
        pid, process = record["pid"], processes.get(record["pid"], "")
        thread, fields = threads.get((pid, record["tid"]), ""), record.get("args", {})
        host = process == HOST
        if not host and (not DEVICE.match(process) or (pid in streamed and not thread.startswith("Stream"))):
            continue
        # In picoseconds, as they were recorded: otherwise rounding opens gaps between kernels that touch.
        begin = round(1e3 * float(record["ts"]), 3)
        end = round(1e3 * (float(record["ts"]) + float(record.get("dur", 0.0))), 3)
        operation, stream = str(fields.get("hlo_op", "")), thread.partition("/")[0]
        made = event(str(record["name"]), operation, begin, end, stream, on_host=host)
        if made is not None and host:
            on_host[str(fields.get("device_ordinal", ""))].append(made)
        elif made is not None:
            on_device[pid].append(made)
    return on_device or on_host
