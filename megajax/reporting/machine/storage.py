"""Checks of the file system that runs are written to."""

import os
import sys

from megajax.metrics.text import byte_size
from megajax.reporting.machine.check import Check, Finding, fail, ok, warn
from megajax.reporting.machine.machine import Machine

GIB, MIB = 2**30, 2**20
LITTLE_SPACE, TOO_LITTLE_SPACE, FEW_INODES = 20 * GIB, GIB, 10_000
SLOW_DISK = 100 * MIB
"""Bytes per second: a checkpoint of 10 GiB takes minutes."""

DISK_SECONDS = 30.0

# Writes 64 MiB, or as much as 2 s allow, and prints the bytes per second.
PROGRAM = """
import os, sys, tempfile, time
data, written = os.urandom(2**22), 0
with tempfile.NamedTemporaryFile(dir=sys.argv[1], prefix=".doctor-") as file:
    start = time.monotonic()
    while written < 2**26 and time.monotonic() - start < 2:
        written += os.write(file.fileno(), data)
    os.fsync(file.fileno())
    print(written / (time.monotonic() - start))
"""


def disk(machine: Machine) -> Finding:
    """The run folder, or the nearest one above it that exists, is writable, fast enough, and has space."""
    wanted = machine.run_dir.expanduser().absolute()
    folder = next(each for each in (wanted, *wanted.parents) if each.is_dir())
    # In a process of its own: a network file system that is gone blocks every access.
    output = machine.run(sys.executable, "-S", "-c", PROGRAM, str(folder), seconds=DISK_SECONDS)
    if output.code != 0:
        return fail(f"{folder} is not writable: {output.reason}", "make it writable, or choose another --run-dir")
    system, speed = os.statvfs(folder), float(output.out)
    free = system.f_bavail * system.f_frsize
    text = f"{folder} has {byte_size(free)} free, {byte_size(speed)}/s with fsync"
    if free < TOO_LITTLE_SPACE:
        return fail(text, "free some space: not even a small checkpoint fits")
    if free < LITTLE_SPACE:
        return warn(text, "free some space: a checkpoint takes at least 12 bytes per weight, and several are kept")
    if system.f_files and system.f_favail < FEW_INODES:
        return warn(f"{text}, {system.f_favail:,} inodes", "delete files: a checkpoint has many")
    if speed < SLOW_DISK:
        return warn(text, "checkpoints will be slow: use a faster file system for the run folder")
    return ok(text)


CHECKS: tuple[Check, ...] = (("disk", disk),)
