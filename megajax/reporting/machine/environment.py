"""Checks of environment variables that spoil runs."""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megajax.mesh.xla import flag_names
from megajax.reporting.machine.check import Check, Finding, fail, ok, warn
from megajax.reporting.machine.machine import Machine, Output

CUDA_LIBRARY = re.compile(r"lib(cudart|cublas|cublasLt|cudnn\w*|nccl|cufft|cusolver|cusparse|nvrtc|cupti)\.so[.\d]*")

SPOILERS: Mapping[str, tuple[str, str]] = {
    "JAX_DISABLE_JIT": (r"1|true", "nothing is compiled: runs take forever"),
    "JAX_DEBUG_NANS": (r"1|true", "every step waits for its numbers"),
    "JAX_ENABLE_X64": (r"1|true", "float64 appears where float32 is meant"),
    "JAX_NUMPY_DTYPE_PROMOTION": (r"strict", "library code may be refused"),
    "JAX_DEFAULT_MATMUL_PRECISION": (r".+", "the config decides how matmuls are done (precision)"),
    "XLA_PYTHON_CLIENT_ALLOCATOR": (r"platform", "every allocation goes to the driver: slow"),
    "XLA_PYTHON_CLIENT_PREALLOCATE": (r"0|false", "memory is taken piece by piece: it may end too soon"),
    "TF_GPU_ALLOCATOR": (r".+", "another allocator than jax's own"),
    "CUDA_LAUNCH_BLOCKING": (r"1", "the host waits for every kernel"),
    "NVIDIA_TF32_OVERRIDE": (r".+", "changes how float32 is multiplied"),
    "NCCL_P2P_DISABLE": (r"1", "GPUs of a machine talk by way of the host"),
    "NCCL_SHM_DISABLE": (r"1", "processes of a machine talk over the network"),
    "NCCL_IB_DISABLE": (r"1", "machines talk over TCP"),
    "NCCL_DEBUG": (r"(?i)info|trace", "NCCL writes a lot"),
}
"""Variable -> values (a pattern for the whole) that are warned of, and why."""

PROXIES = ("grpc_proxy", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")


class Platforms(NamedTuple):
    """Where jax is told to compute, and what is there."""

    platforms: str
    """JAX_PLATFORMS."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES."""
    gpus: int


class Paths(NamedTuple):
    """CUDA libraries on the search path."""

    libraries: tuple[str, ...]
    """Folders of LD_LIBRARY_PATH with some, and which."""
    wheels: bool
    """jax's own lie in Python packages."""


def judge_flags(found: tuple[Sequence[str], Output | None]) -> Finding:
    """XLA takes the flags it is given for all programs. (their names, what came of starting jax with them)."""
    names, output = found
    if output is None:
        return ok("none set")
    text = ", ".join(names)
    unknown = re.search(r"Unknown flags? in (\w+): (.*)", output.err)
    if unknown is not None:
        advice = f"take it out of {unknown[1]}: every process would be ended at its start"
        return fail(f"{unknown[2].strip()} is not known to this XLA", advice)
    if output.code is None:
        return warn(f"with {text}, jax {output.why}", "unset them and see whether that helps")
    if output.code != 0:
        last = (output.err.strip().splitlines() or [f"exit code {output.code}"])[-1]
        return fail(f"with {text}, jax does not start: {last[:200]}", "unset them")
    return ok(f"{text}: known to XLA")


def probe_flags(machine: Machine) -> tuple[Sequence[str], Output | None]:
    """Start jax with the flags, on the CPU: every flag is known there, those of GPUs as well."""
    names = sorted(flag_names(machine.environment))
    if not names:
        return names, None
    program = "import jax; jax.devices()"
    return names, machine.run(sys.executable, "-c", program, seconds=60.0, JAX_PLATFORMS="cpu")


def judge_platforms(found: Platforms) -> Finding:
    """jax is not kept from the GPUs that are there."""
    asked = [name.strip() for name in found.platforms.lower().split(",") if name.strip()]
    if found.gpus and asked and not {"cuda", "gpu"}.intersection(asked):
        return fail(
            f"JAX_PLATFORMS={found.platforms} keeps jax from {found.gpus} GPU{'s' * (found.gpus > 1)}",
            "unset JAX_PLATFORMS",
        )
    if found.gpus and found.visible is not None:
        seen = [name for name in found.visible.split(",") if name.strip() and name.strip() != "-1"]
        if not seen:
            return fail(f"CUDA_VISIBLE_DEVICES={found.visible!r} hides all {found.gpus} GPUs", "unset it")
        if len(seen) < found.gpus:
            text = f"CUDA_VISIBLE_DEVICES={found.visible} shows {len(seen)} of {found.gpus} GPUs"
            return warn(text, "unset it, unless others are to use the rest")
    if not found.gpus and {"cuda", "gpu"}.intersection(asked):
        return fail(f"JAX_PLATFORMS={found.platforms} without a GPU", "unset it")
    return ok(f"JAX_PLATFORMS={found.platforms}" if found.platforms else "jax may choose")


def judge_paths(found: Paths) -> Finding:
    """No other CUDA comes before that of jax's wheels."""
    if found.libraries and found.wheels:
        text = f"LD_LIBRARY_PATH has CUDA libraries that come before jax's own: {'; '.join(found.libraries)}"
        return warn(text, "unset LD_LIBRARY_PATH, or leave these folders out of it")
    if found.libraries:
        return ok(f"CUDA libraries by LD_LIBRARY_PATH: {'; '.join(found.libraries)}")
    return ok("no CUDA libraries in LD_LIBRARY_PATH")


def probe_paths(machine: Machine) -> Paths:
    """Folders of the search path."""
    found = []
    for folder in filter(None, machine.environment.get("LD_LIBRARY_PATH", "").split(":")):
        names = sorted(path.name for path in Path(folder).glob("lib*.so*") if CUDA_LIBRARY.fullmatch(path.name))
        if names:
            found.append(f"{folder} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})")
    return Paths(tuple(found), any(name.startswith("nvidia-cu") for name in machine.packages))


def judge_variables(environment: Mapping[str, str]) -> Finding:
    """None of those that make runs slow or change their numbers."""
    found = [
        f"{name}={environment[name]}: {why}"
        for name, (values, why) in SPOILERS.items()
        if name in environment and re.fullmatch(values, environment[name].strip(), re.IGNORECASE)
    ]
    proxies = [name for name in PROXIES if environment.get(name)]
    if proxies:
        found.append(f"{', '.join(proxies)}: connections between processes may take the proxy")
    if found:
        return warn("; ".join(found), "unset what you did not set on purpose")
    return ok("none that spoils runs")


CHECKS = (
    Check("compiler flags", probe_flags, judge_flags),
    Check(
        "platforms",
        lambda machine: Platforms(
            machine.environment.get("JAX_PLATFORMS", ""),
            machine.environment.get("CUDA_VISIBLE_DEVICES"),
            machine.gpu_files,
        ),
        judge_platforms,
    ),
    Check("library path", probe_paths, judge_paths),
    Check("variables", lambda machine: machine.environment, judge_variables),
)
