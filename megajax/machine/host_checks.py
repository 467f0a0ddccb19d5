"""Checks of the host: packages, environment variables, limits, and the file system of the run folder."""

import os
import platform
import re
import resource
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from megajax.display.text import byte_size
from megajax.machine.check import Check, Finding, Machine, fail, ok, warn
from megajax.processes.gpus import ONE_GPU, SEVERAL_GPUS, VISIBLE, nccl_variables
from megajax.processes.xla_options import flag_names
from megajax.storage.disk import free_bytes

MIB, GIB = 2**20, 2**30
MIN_SHARED, MIN_SHARED_FOR_NCCL = GIB, 128 * MIB
MIN_FILES, FEW_FILES = 1024, 8192
LITTLE_SPACE, TOO_LITTLE_SPACE = 20 * GIB, GIB
SLOW_DISK = 100 * MIB
"""Bytes per second: a checkpoint of 10 GiB takes minutes."""
DISK_SECONDS = 30.0

LISTED_PACKAGES = ("jax", "jaxlib", "flax", "orbax-checkpoint", "grain", "numpy")

HARMFUL = {
    "JAX_DISABLE_JIT": ("1|true", "nothing is compiled: runs are extremely slow"),
    "JAX_DEBUG_NANS": ("1|true", "every step waits for its results"),
    "JAX_ENABLE_X64": ("1|true", "float64 replaces float32"),
    "XLA_PYTHON_CLIENT_ALLOCATOR": ("platform", "every allocation calls the driver: slow"),
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel"),
    "NVIDIA_TF32_OVERRIDE": (".+", "changes the precision of float32 matmuls"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a machine communicate through the host"),
    "NCCL_SHM_DISABLE": ("1", "processes of a machine communicate through the network"),
    "NCCL_IB_DISABLE": ("1", "machines communicate through TCP"),
}
"""Variable -> pattern of harmful values (full match), and the reason."""

# Writes up to 64 MiB in at most 2 s, and prints the bytes per second.
WRITE = """
import os, sys, tempfile, time
data, written = os.urandom(2**22), 0
with tempfile.NamedTemporaryFile(dir=sys.argv[1], prefix=".doctor-") as file:
    start = time.monotonic()
    while written < 2**26 and time.monotonic() - start < 2:
        written += os.write(file.fileno(), data)
    os.fsync(file.fileno())
    print(written / (time.monotonic() - start))
"""


def packages(machine: Machine) -> Finding:
    """The requirements of the library and of jax are met."""
    problems = []
    for package in ("megajax", "jax", "jaxlib"):
        for requirement in map(Requirement, _requirements(package)):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                installed = _version(requirement.name)
                if installed is None or not requirement.specifier.contains(installed, prereleases=True):
                    bounds = f"{requirement.name}{requirement.specifier}"
                    problems.append(f"{package} requires {bounds}, installed is {installed or 'none'}")
    if problems:
        return fail("; ".join(dict.fromkeys(problems)), "uv sync, or pip install --upgrade megajax")
    if not _requirements("megajax"):
        return warn("megajax is not installed, so its requirements are unknown", "uv sync, or pip install -e .")
    versions = [f"{name} {installed}" for name in LISTED_PACKAGES if (installed := _version(name))]
    return ok(f"Python {platform.python_version()}, {', '.join(versions)}")


def _requirements(package: str) -> list[str]:
    try:
        return requires(package) or []
    except PackageNotFoundError:
        return []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def compiler_flags(machine: Machine) -> Finding:
    """XLA accepts all flags. Starts jax on the CPU, which knows the flags for GPUs as well."""
    names = ", ".join(sorted(flag_names(machine.environment)))
    if not names:
        return ok("none set")
    output = machine.run(sys.executable, "-c", "import jax; jax.devices()", seconds=60.0, JAX_PLATFORMS="cpu")
    if unknown := re.search(r"Unknown flags? in (\w+): (.*)", output.err):
        advice = f"remove it from {unknown[1]}: every process would exit at its start"
        return fail(f"{unknown[2].strip()} is not known to this version of XLA", advice)
    if output.code != 0:
        return fail(f"jax does not start with {names}: it {output.reason[:200]}", "unset them")
    return ok(f"{names}: known to XLA")


def platforms(machine: Machine) -> Finding:
    """jax may use the GPUs of this machine."""
    gpus, requested = machine.gpu_files, machine.environment.get("JAX_PLATFORMS", "")
    text, visible = machine.environment.get(VISIBLE), machine.visible_gpus
    wants_gpu = bool({"cuda", "gpu"} & {name.strip() for name in requested.lower().split(",")})
    if requested and bool(gpus) != wants_gpu:
        return fail(f"JAX_PLATFORMS={requested} with {gpus or 'no'} GPUs", "unset JAX_PLATFORMS")
    if gpus and len(visible) < gpus:
        state = f"{VISIBLE}={text} shows {len(visible)} of {gpus} GPUs"
        if not visible:
            return fail(state, "unset it")
        return warn(state, "unset it, unless other programs use the remaining GPUs")
    return ok(f"JAX_PLATFORMS={requested}" if requested else "jax may choose")


def processes(machine: Machine) -> Finding | None:
    """The number of processes that use the GPUs, and the NCCL variables in force."""
    gpus, present = len(machine.visible_gpus), nccl_variables(machine.environment)
    if gpus < 2:
        return None
    single, gang = (f"{variable.name}={variable.value}" for variable in (SEVERAL_GPUS, ONE_GPU))
    return ok(
        f"megajax.train and megajax.launch start {gpus}, with one GPU each and {gang}; other commands drive {gpus} "
        f"GPUs, with {single}" + (f"; set here: {present}" if present else "")
    )


def variables(machine: Machine) -> Finding:
    """No variable slows runs down or changes their numbers."""
    problems = []
    for name, (values, why) in HARMFUL.items():
        value = machine.environment.get(name)
        if value is not None and re.fullmatch(values, value.strip(), re.IGNORECASE):
            problems.append(f"{name}={value}: {why}")
    return warn("; ".join(problems), "unset what you did not set on purpose") if problems else ok("none is harmful")


def shared_memory(machine: Machine) -> Finding:
    """Size of /dev/shm, through which NCCL and data workers communicate within a machine."""
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
    """Limits of open files, and of the locked memory that InfiniBand needs."""
    (files, _), (locked, _) = (resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    if locked != resource.RLIM_INFINITY and any(Path("/sys/class/infiniband").glob("*")):
        text = f"{byte_size(locked)} of locked memory, with InfiniBand"
        return fail(text, "ulimit -l unlimited (docker run --ulimit memlock=-1)")
    if files == resource.RLIM_INFINITY:
        return ok("unlimited open files")
    if files < FEW_FILES:
        verdict = fail if files < MIN_FILES else warn
        return verdict(f"{files:,} open files", "ulimit -n 65536: checkpoints and data need many files")
    return ok(f"{files:,} open files")


def existing_folder(run_dir: Path) -> Path:
    """The run folder, or its nearest existing parent."""
    run_dir = run_dir.expanduser().absolute()
    return next(path for path in (run_dir, *run_dir.parents) if path.is_dir())


def free_space(run_dir: Path) -> Finding:
    """The disk of the run folder has free space."""
    folder = existing_folder(run_dir)
    if (free := free_bytes(folder)) is None:
        return ok(f"{folder} has an unknown size")
    text = f"{folder} has {byte_size(free)} free"
    if free < TOO_LITTLE_SPACE:
        return fail(text, "free some space: not even a small checkpoint fits")
    if free < LITTLE_SPACE:
        return warn(text, "free some space: a checkpoint takes at least 12 bytes per weight, and several are kept")
    return ok(text)


def disk(machine: Machine) -> Finding:
    """The run folder, or its nearest existing parent, is writable, fast enough, and has free space."""
    folder = existing_folder(machine.run_dir)
    # In a separate process: every access to an unreachable network file system blocks.
    output = machine.run(sys.executable, "-S", "-c", WRITE, str(folder), seconds=DISK_SECONDS)
    if output.code != 0:
        return fail(f"{folder} is not writable: {output.reason}", "make it writable, or choose another --run-dir")
    space, speed = free_space(machine.run_dir), float(output.out)
    finding = space._replace(state=f"{space.state}, {byte_size(speed)}/s with fsync")
    if finding.status == "ok" and speed < SLOW_DISK:
        return warn(finding.state, "checkpoints will be slow: use a faster file system for the run folder")
    return finding


CHECKS: tuple[Check, ...] = (
    ("packages", packages),
    ("compiler flags", compiler_flags),
    ("platforms", platforms),
    ("processes", processes),
    ("variables", variables),
    ("shared memory", shared_memory),
    ("limits", limits),
    ("disk", disk),
)
