"""Checks of the operating system: cores, memory, limits, host name, clock."""

import os
import re
import resource
import sys
from pathlib import Path

from megajax.metrics.text import byte_size
from megajax.reporting.machine.check import Check, Finding, fail, ok, warn
from megajax.reporting.machine.machine import Machine

GIB = 2**30
MIN_MEMORY, MIN_SHARED, MIN_SHARED_FOR_NCCL = 4 * GIB, GIB, 2**27
MIN_FILES, FEW_FILES = 1024, 8192
CORES_PER_GPU = 4


def control_groups(machine: Machine) -> list[str]:
    """Folders of this process's control group (version 2) and of all above it."""
    match = re.search(r"^0::(/.*)$", machine.read("/proc/self/cgroup"), re.MULTILINE)
    path = Path(match[1] if match else "/")
    return [f"/sys/fs/cgroup{each}".rstrip("/") for each in (path, *path.parents)]


def cores(machine: Machine) -> Finding:
    """Enough cores to feed the devices, within the limits of affinity and control groups."""
    total = os.cpu_count() or 1
    usable: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    for folder in control_groups(machine):
        share, _, period = machine.read(f"{folder}/cpu.max").partition(" ")
        if share.isdigit():
            usable = min(usable, int(share) / int(period))
    text = f"{usable:g} of {total} usable"
    if usable < CORES_PER_GPU * machine.gpu_files:
        return warn(f"{text}, for {machine.gpu_files} GPUs", f"request at least {CORES_PER_GPU} cores per GPU")
    return ok(text) if usable >= 2 else warn(text, "request at least 2: reading data and computing share one")


def memory(machine: Machine) -> Finding:
    """Free memory of the host, within the limits of control groups."""
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB", machine.read("/proc/meminfo"), re.MULTILINE))
    total, free = (1024 * int(kib.get(name, 0)) for name in ("MemTotal", "MemAvailable"))
    text = f"{byte_size(free)} of {byte_size(total)} free"
    for folder in control_groups(machine):
        limit = machine.read(f"{folder}/memory.max").strip()
        if limit.isdigit():
            left = int(limit) - int(machine.read(f"{folder}/memory.current") or 0)
            if left < free:
                free, text = left, f"{byte_size(left)} of the control group's {byte_size(int(limit))} free"
    if free < MIN_MEMORY:
        return warn(text, f"free or request memory: a small run needs {byte_size(MIN_MEMORY)}")
    return ok(text)


def shared_memory(machine: Machine) -> Finding:
    """/dev/shm, through which NCCL and data workers communicate within a machine."""
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:
        return warn("/dev/shm does not exist", "mount it (docker run --shm-size=8g)")
    size = shared.f_blocks * shared.f_frsize
    if size < MIN_SHARED:
        verdict = fail if machine.gpu_files > 1 and size < MIN_SHARED_FOR_NCCL else warn
        return verdict(f"/dev/shm has {byte_size(size)}", "enlarge it (docker run --shm-size=8g, or emptyDir: Memory)")
    return ok(f"/dev/shm has {byte_size(size)}")


def limits(machine: Machine) -> Finding:
    """Open files, and the locked memory that InfiniBand needs."""
    (files, _), (locked, _) = (resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    infiniband = machine.once("infiniband", lambda _: any(Path("/sys/class/infiniband").glob("*")))
    texts = [f"{files:,} open files" if files != resource.RLIM_INFINITY else "any number of open files"]
    if infiniband and locked != resource.RLIM_INFINITY:
        texts.append(f"{byte_size(locked)} of locked memory, with InfiniBand")
        return fail(", ".join(texts), "ulimit -l unlimited (docker run --ulimit memlock=-1)")
    if files != resource.RLIM_INFINITY and files < FEW_FILES:
        return (fail if files < MIN_FILES else warn)(texts[0], "ulimit -n 65536: checkpoints and data need many files")
    return ok(texts[0])


def host_name(machine: Machine) -> Finding:
    """The host name resolves to an address that other machines can reach."""
    name = os.uname().nodename
    # In a process of its own: a name server may not answer.
    program = "import socket\nfor a in socket.getaddrinfo(socket.gethostname(), None): print(a[4][0])"
    output = machine.run(sys.executable, "-S", "-c", program, seconds=5.0)
    if output.code != 0:
        return warn(
            f"{name} does not resolve: {output.reason}", "add it to /etc/hosts or DNS: several machines need it"
        )
    addresses = sorted(set(output.out.split()))
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        text = f"{name} is {', '.join(addresses)}, which other machines can't reach"
        return warn(text, "on a cluster, add its own address to /etc/hosts or DNS")
    return ok(f"{name} is {', '.join(addresses)}")


CHECKS: tuple[Check, ...] = (
    ("processor cores", cores),
    ("memory", memory),
    ("shared memory", shared_memory),
    ("limits", limits),
    ("host name", host_name),
)
