"""Reads the file `*.trace.json.gz` that jax's profiler writes, with the standard library alone.

The format is Chrome's trace events: processes are devices, threads are streams, "X" events have a start and a duration
in microseconds. The profiler writes at most MOST_EVENTS of them and drops the rest.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megajax.config.errors import UserError
from megajax.metrics.trace import Event, Record, kernels_by_device

SUFFIX = ".trace.json.gz"
MOST_EVENTS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ChromeTrace:
    """The contents of a trace file."""

    file: Path
    devices: tuple[list[Event], ...]
    """Events of each device; empty for a trace without kernels."""
    steps: int | None
    """Steps marked with `jax.profiler.StepTraceAnnotation`; None if none is."""
    complete: bool
    """Whether the file has fewer events than the profiler writes at most."""


def find(path: Path) -> Path:
    """The file itself, or the newest trace file in a folder or below it. Raises UserError if there is none."""
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
        lines = json.loads(text)["traceEvents"]
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror or error}") from error
    except (EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is no trace of jax's profiler, or it is cut off: {error}") from error
    spans = [line for line in lines if line.get("ph") == "X"]
    marked = {span["args"]["step_num"] for span in spans if "step_num" in span.get("args", ())}
    return ChromeTrace(
        file=file,
        devices=tuple(kernels_by_device(_records(lines, spans))),
        steps=len(marked) or None,
        complete=len(spans) < MOST_EVENTS,
    )


def _records(lines: Iterable[dict[str, Any]], spans: Iterable[dict[str, Any]]) -> Iterator[Record]:
    processes: dict[Any, str] = {}
    threads: dict[tuple[Any, Any], str] = {}
    for line in lines:
        if line.get("ph") == "M" and line["name"] == "process_name":
            processes[line["pid"]] = line["args"]["name"]
        if line.get("ph") == "M" and line["name"] == "thread_name":
            threads[line["pid"], line["tid"]] = line["args"]["name"]
    for span in spans:
        process, thread = processes.get(span["pid"], ""), threads.get((span["pid"], span["tid"]), "")
        # Recorded in picoseconds: without rounding to them, gaps open between kernels that touch.
        begin = round(1e3 * float(span["ts"]), 3)
        end = round(1e3 * (float(span["ts"]) + float(span.get("dur", 0.0))), 3)
        fields = span.get("args", {})
        operation, ordinal = str(fields.get("hlo_op", "")), str(fields.get("device_ordinal", ""))
        yield Record(process, thread, str(span["name"]), begin, end, operation, ordinal)
