"""Checks of the file system a run is to be written to."""

import json
import sys
from pathlib import Path
from typing import Any

from megajax.reporting.machine.check import Check, Finding, fail, ok, warn
from megajax.reporting.machine.machine import Machine, Output

GIB, MIB = 2**30, 2**20
LITTLE_SPACE, TOO_LITTLE_SPACE = 20 * GIB, GIB
FEW_INODES = 10_000
SLOW_DISK = 100 * MIB
"""Bytes per second: a checkpoint of 10 GiB would take minutes."""
SLOW_FSYNC = 0.5
SKEW = 1.0
DISK_SECONDS = 30.0

# In a process of its own, for a network file system that is gone holds whoever touches it. Writes what 2 s allow.
PROGRAM = """
import json, os, sys, tempfile, time
folder, most, patience = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
data, written = os.urandom(1 << 22), 0
with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
    before = time.time()
    os.write(file.fileno(), b"x")
    os.fsync(file.fileno())
    after, touched = time.time(), os.fstat(file.fileno()).st_mtime
    begun = time.monotonic()
    while written < most and time.monotonic() - begun < patience:
        written += os.write(file.fileno(), data)
    syncing = time.monotonic()
    os.fsync(file.fileno())
    ended = time.monotonic()
    small = []
    for _ in range(5):
        start = time.monotonic()
        os.pwrite(file.fileno(), b"x", 0)
        os.fsync(file.fileno())
        small.append(time.monotonic() - start)
    system = os.fstatvfs(file.fileno())
print(json.dumps({"bytes": written, "seconds": ended - begun, "fsync": sorted(small)[2],
    "free": system.f_bavail * system.f_frsize, "inodes": system.f_favail if system.f_files else None,
    "skew": 0.0 if before - 0.02 <= touched <= after + 0.02 else touched - (before + after) / 2}))
"""


def probe(machine: Machine) -> tuple[str, dict[str, Any] | Output]:
    """The folder, and what writing to it showed, or what became of the attempt."""
    folder = place(machine.run_dir)
    words = (sys.executable, "-S", "-c", PROGRAM, str(folder), str(64 * MIB), "2.0")
    output = machine.run(*words, seconds=DISK_SECONDS)
    try:
        return str(folder), json.loads(output.out)
    except ValueError:
        return str(folder), output


def place(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there: a run makes its own."""
    folder = folder.expanduser().absolute()
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def judge_disk(found: tuple[str, dict[str, Any] | Output]) -> Finding:
    """How fast it writes, up to the disk."""
    folder, told = found
    if isinstance(told, Output):
        why = told.why or (told.err.strip().splitlines() or ["nothing was told"])[-1]
        return fail(f"{folder} cannot be written: {why}", "make it writable, or give another --run_dir")
    speed = told["bytes"] / max(told["seconds"], 1e-6)
    text = f"{speed / MIB:,.0f} MiB/s with fsync, a small fsync {1000 * told['fsync']:.1f} ms, in {folder}"
    if speed < SLOW_DISK or told["fsync"] > SLOW_FSYNC:
        return warn(text, "checkpoints will be slow: use a faster file system for the run folder")
    return ok(text)


def judge_space(found: tuple[str, dict[str, Any] | Output]) -> Finding | None:
    """Bytes and files there is room for."""
    _, told = found
    if isinstance(told, Output):
        return None
    text = f"{told['free'] / GIB:,.1f} GiB free"
    if told["inodes"] is not None:
        text += f", room for {told['inodes']:,} files"
    if told["free"] < TOO_LITTLE_SPACE:
        return fail(text, "free space up: not even a small checkpoint fits")
    if told["free"] < LITTLE_SPACE or (told["inodes"] is not None and told["inodes"] < FEW_INODES):
        return warn(text, "free space up: a checkpoint takes 12 bytes or more for each weight, and several are kept")
    return ok(text)


def judge_skew(found: tuple[str, dict[str, Any] | Output]) -> Finding | None:
    """The clock of the file system against this machine's."""
    _, told = found
    if isinstance(told, Output):
        return None
    skew = told["skew"]
    text = f"the file system's clock is {abs(skew):.2f} s {'ahead of' if skew > 0 else 'behind'} this machine's"
    if abs(skew) >= SKEW:
        return warn(text, "have both clocks synchronised (chrony)")
    return ok("file times and the system's clock agree" + (f" to {abs(skew):.2f} s" if skew else ""))


def _once(machine: Machine) -> tuple[str, dict[str, Any] | Output]:
    return machine.once("disk", probe)


CHECKS = (
    Check("disk", _once, judge_disk),
    Check("disk space", _once, judge_space),
    Check("file times", _once, judge_skew),
)
