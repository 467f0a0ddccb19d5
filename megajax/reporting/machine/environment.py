"""Checks of environment variables."""

import re
import sys
from pathlib import Path

from megajax.mesh.xla import flag_names
from megajax.reporting.machine.check import Check, Finding, fail, ok, warn
from megajax.reporting.machine.machine import Machine

CUDA_LIBRARY = re.compile(r"lib(cudart|cublas|cublasLt|cudnn\w*|nccl|cufft|cusolver|cusparse|nvrtc|cupti)\.so[.\d]*")

PROXY = ".+", "connections between processes may use the proxy"
HARMFUL = {
    "JAX_DISABLE_JIT": ("1|true", "nothing is compiled: runs are extremely slow"),
    "JAX_DEBUG_NANS": ("1|true", "every step waits for its results"),
    "JAX_ENABLE_X64": ("1|true", "float64 appears where float32 is meant"),
    "JAX_DEFAULT_MATMUL_PRECISION": (".+", "the config decides the precision of matmuls"),
    "XLA_PYTHON_CLIENT_ALLOCATOR": ("platform", "every allocation goes to the driver: slow"),
    "XLA_PYTHON_CLIENT_PREALLOCATE": ("0|false", "memory is allocated piecemeal: it may run out earlier"),
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel"),
    "NVIDIA_TF32_OVERRIDE": (".+", "changes how float32 is multiplied"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a machine communicate through the host"),
    "NCCL_SHM_DISABLE": ("1", "processes of a machine communicate through the network"),
    "NCCL_IB_DISABLE": ("1", "machines communicate through TCP"),
    "NCCL_DEBUG": ("info|trace", "NCCL logs a lot"),
    **dict.fromkeys(("grpc_proxy", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), PROXY),
}
"""Variable -> values that are warned of (a pattern for the whole value), and why."""


def compiler_flags(machine: Machine) -> Finding:
    """XLA knows all flags it is given. Starts jax on the CPU, which knows the flags for GPUs as well."""
    names = ", ".join(sorted(flag_names(machine.environment)))
    if not names:
        return ok("none set")
    output = machine.run(sys.executable, "-c", "import jax; jax.devices()", seconds=60.0, JAX_PLATFORMS="cpu")
    if unknown := re.search(r"Unknown flags? in (\w+): (.*)", output.err):
        advice = f"remove it from {unknown[1]}: every process would exit at its start"
        return fail(f"{unknown[2].strip()} is not known to this XLA", advice)
    if output.code != 0:
        return fail(f"with {names}, jax does not start: it {output.reason[:200]}", "unset them")
    return ok(f"{names}: known to XLA")


def platforms(machine: Machine) -> Finding:
    """jax may use the GPUs of this machine."""
    gpus, chosen = machine.gpu_files, machine.environment.get("JAX_PLATFORMS", "")
    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    names = {name.strip() for name in chosen.lower().split(",")} - {""}
    wants_gpu = bool(names & {"cuda", "gpu"})
    if names and bool(gpus) != wants_gpu and (gpus or wants_gpu):
        return fail(f"JAX_PLATFORMS={chosen} with {gpus or 'no'} GPUs", "unset JAX_PLATFORMS")
    if gpus and visible is not None:
        shown = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
        text = f"CUDA_VISIBLE_DEVICES={visible} shows {len(shown)} of {gpus} GPUs"
        if not shown:
            return fail(text, "unset it")
        if len(shown) < gpus:
            return warn(text, "unset it, unless others use the rest")
    return ok(f"JAX_PLATFORMS={chosen}" if chosen else "jax may choose")


def library_path(machine: Machine) -> Finding:
    """No other CUDA precedes the one of jax's wheels."""
    folders = []
    for folder in filter(None, machine.environment.get("LD_LIBRARY_PATH", "").split(":")):
        names = sorted(path.name for path in Path(folder).glob("lib*.so*") if CUDA_LIBRARY.fullmatch(path.name))
        if names:
            folders.append(f"{folder} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})")
    text = f"CUDA libraries in LD_LIBRARY_PATH: {'; '.join(folders)}"
    if folders and any(name.startswith("nvidia-cu") for name in machine.packages):
        return warn(f"{text}, before those of jax's wheels", "unset LD_LIBRARY_PATH, or remove these folders")
    return ok(text if folders else "no CUDA libraries in LD_LIBRARY_PATH")


def variables(machine: Machine) -> Finding:
    """None that makes runs slow or changes their numbers."""
    problems = []
    for name, (values, why) in HARMFUL.items():
        value = machine.environment.get(name)
        if value is not None and re.fullmatch(values, value.strip(), re.IGNORECASE):
            problems.append(f"{name}={value}: {why}")
    return warn("; ".join(problems), "unset what you did not set on purpose") if problems else ok("none is harmful")


CHECKS: tuple[Check, ...] = (
    ("compiler flags", compiler_flags),
    ("platforms", platforms),
    ("library path", library_path),
    ("variables", variables),
)
