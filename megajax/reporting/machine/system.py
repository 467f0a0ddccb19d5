"""Checks of the operating system: cores, memory, limits, names, clock."""

import os
import re
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from megajax.reporting.machine.check import Check, Finding, fail, ok, warn
from megajax.reporting.machine.machine import Machine, Output

GIB = 2**30
LEAST_MEMORY, LEAST_SHARED = 4 * GIB, GIB
LEAST_FILES, FEW_FILES = 1024, 8192
CORES_PER_GPU = 4


class Processors(NamedTuple):
    """Cores, and what of them may be used."""

    machine: int
    allowed: int
    """By affinity."""
    quota: float | None
    """Cores the control group grants; None: no limit."""
    gpus: int


class Memory(NamedTuple):
    """Bytes."""

    total: int
    available: int
    limit: int | None
    """Of the control group; None: none."""
    used: int | None
    """By the control group."""


def judge_processors(found: Processors) -> Finding:
    """Enough cores to feed the devices."""
    cores = min(found.allowed, found.quota or found.allowed)
    text = f"{cores:g} of {found.machine} may be used" + (
        " (limit of the control group)" if cores == found.quota else ""
    )
    if found.gpus and cores < CORES_PER_GPU * found.gpus:
        return warn(f"{text}, for {found.gpus} GPUs", f"ask for {CORES_PER_GPU} cores or more for each GPU")
    if cores < 2:
        return warn(text, "ask for 2 or more: reading data and computing share one")
    return ok(text)


def probe_processors(machine: Machine) -> Processors:
    """Affinity, and the quota of the control group (version 2, else 1)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = None
    for folder in control_groups(machine.read("/proc/self/cgroup") or ""):
        text = machine.read(f"{folder}/cpu.max")
        if text and text.split()[0].isdigit():
            share, period = map(int, text.split()[:2])
            quota = min(quota or share / period, share / period)
    share, period = (machine.read(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    if quota is None and share and period and int(share) > 0:
        quota = int(share) / int(period)
    return Processors(os.cpu_count() or 1, allowed, quota, machine.gpu_files)


def control_groups(text: str) -> list[str]:
    """Folders of the unified hierarchy from /proc/self/cgroup: the process's own and all above it."""
    found = re.search(r"^0::(/.*)$", text, re.MULTILINE)
    path = Path(found[1] if found else "/")
    return [f"/sys/fs/cgroup{each}".rstrip("/") for each in (path, *path.parents)]


def judge_memory(found: Memory) -> Finding:
    """Memory of the host."""
    free = found.available
    text = f"{found.available / GIB:.1f} of {found.total / GIB:.1f} GiB free"
    if found.limit is not None:
        free = min(free, found.limit - (found.used or 0))
        text += f"; the control group has {(found.used or 0) / GIB:.1f} of its {found.limit / GIB:.1f} GiB in use"
    if free < LEAST_MEMORY:
        return warn(text, f"free memory up, or ask for more: a small run needs {LEAST_MEMORY / GIB:g} GiB")
    return ok(text)


def probe_memory(machine: Machine) -> Memory:
    """/proc/meminfo and the tightest limit of the control groups."""
    text = machine.read("/proc/meminfo") or ""
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    limit = used = None
    for folder in control_groups(machine.read("/proc/self/cgroup") or ""):
        most, now = (machine.read(f"{folder}/memory.{name}") for name in ("max", "current"))
        if most and most.strip().isdigit() and (limit is None or int(most) < limit):
            limit, used = int(most), int(now) if now else None
    most = machine.read("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    if limit is None and most and int(most) < 2**60:
        limit = int(most)
    return Memory(1024 * kib.get("MemTotal", 0), 1024 * kib.get("MemAvailable", 0), limit, used)


def judge_shared(found: tuple[int | None, int]) -> Finding:
    """/dev/shm, over which NCCL's processes of a machine and data workers talk. (bytes or None, GPUs)."""
    size, gpus = found
    if size is None:
        return warn("/dev/shm is not there", "mount it (docker run --shm-size=8g)")
    text = f"/dev/shm has {size / GIB:.2f} GiB"
    if size < LEAST_SHARED:
        finding = fail if gpus > 1 and size < 2**27 else warn
        return finding(text, "make it larger (docker run --shm-size=8g, or an emptyDir of medium Memory)")
    return ok(text)


def probe_shared(machine: Machine) -> tuple[int | None, int]:
    """Its size."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None, machine.gpu_files
    return found.f_blocks * found.f_frsize, machine.gpu_files


def judge_files(found: tuple[int, int]) -> Finding:
    """Files a process may have open. (soft limit, hard limit)."""
    soft, hard = found
    text = f"{soft:,} files may be open (at most {hard:,})" if soft != resource.RLIM_INFINITY else "no limit"
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        return fail(text, "ulimit -n 65536: checkpoints and data keep many files open")
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        return warn(text, "ulimit -n 65536: many data files or processes may need more")
    return ok(text)


def judge_locked(found: tuple[int, int]) -> Finding:
    """Memory that may be locked, which InfiniBand needs. (soft limit, InfiniBand adapters)."""
    soft, adapters = found
    text = "no limit" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:g} MiB may be locked"
    if adapters and soft != resource.RLIM_INFINITY:
        return fail(f"{text}, and there is InfiniBand", "ulimit -l unlimited (docker run --ulimit memlock=-1)")
    return ok(f"{text}; no InfiniBand adapters" if not adapters else f"{text}; {adapters} InfiniBand adapters")


def judge_name(found: tuple[str, Output]) -> Finding:
    """The machine's own name leads to an address others can reach. (name, what resolving it printed)."""
    name, output = found
    addresses = sorted(set(output.out.split()))
    if output.code != 0:
        why = output.why or (output.err.strip().splitlines() or ["no address"])[-1]
        return warn(f"{name} does not resolve: {why}", "put it into /etc/hosts or DNS: several machines need it")
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        text = f"{name} is {', '.join(addresses)}, which other machines cannot reach"
        return warn(text, "on a cluster, put its own address into /etc/hosts or DNS; alone it does not matter")
    return ok(f"{name} is {', '.join(addresses)}")


def probe_name(machine: Machine) -> tuple[str, Output]:
    """In a process of its own: a name server that does not answer takes its time."""
    program = "import socket\nfor a in socket.getaddrinfo(socket.gethostname(), None): print(a[4][0])"
    return os.uname().nodename, machine.run(sys.executable, "-S", "-c", program, seconds=5.0)


def judge_synchronised(found: Mapping[str, Output]) -> Finding:
    """The clock is kept right by somebody. Output of timedatectl and chronyc where they are there."""
    told = found.get("timedatectl")
    if told is not None and told.code == 0 and told.out.strip() in ("yes", "no"):
        if told.out.strip() == "yes":
            return ok("synchronised, says timedatectl")
        return warn(
            "not synchronised, says timedatectl", "start chrony or systemd-timesyncd: logs of machines are compared"
        )
    told = found.get("chronyc")
    if told is not None and told.code == 0:
        offset = re.search(r"System time\s*:\s*([\d.]+) seconds", told.out)
        normal = re.search(r"Leap status\s*:\s*Normal", told.out)
        text = f"chronyc: off by {float(offset[1]) * 1000:.1f} ms" if offset else "chronyc"
        return ok(text) if normal else warn(f"{text}, not synchronised", "see chronyc sources")
    return ok("nobody here can say whether it is synchronised (no timedatectl, no chronyc)")


def probe_synchronised(machine: Machine) -> dict[str, Output]:
    """Both, with a time limit."""
    return {
        "timedatectl": machine.run("timedatectl", "show", "-p", "NTPSynchronized", "--value", seconds=3.0),
        "chronyc": machine.run("chronyc", "tracking", seconds=3.0),
    }


CHECKS = (
    Check("processor cores", probe_processors, judge_processors),
    Check("memory", probe_memory, judge_memory),
    Check("shared memory", probe_shared, judge_shared),
    Check("open files", lambda machine: resource.getrlimit(resource.RLIMIT_NOFILE), judge_files),
    Check(
        "locked memory",
        lambda machine: (
            resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            len(list(Path("/sys/class/infiniband").glob("*"))),
        ),
        judge_locked,
    ),
    Check("host name", probe_name, judge_name),
    Check("clock", probe_synchronised, judge_synchronised),
)
