"""Options of XLA, its runtime and its allocator, each with the reason for its value; no other file names them.

Options are passed to the compilation of a program and not through the environment: an unknown option is then an error
of that compilation, while an unknown option in the environment ends the process. All work with jaxlib 0.11.2 and
0.12.0.1; those that the installed version refuses are left out with a warning
(`megajax.training.check_compiler_options`). docs/compiler.md has what they change.
"""

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from megajax.config.bounds import Bounds
from megajax.config.errors import Problem
from megajax.config.paths_and_store_urls import PathText

type Value = bool | int | float | str
"""Value of an option; enumerations are strings."""


class Option(NamedTuple):
    """One option of XLA."""

    name: str
    value: Value
    why: str


CPU = (
    Option(
        "xla_cpu_enable_fast_math",
        False,
        "keeps NaN, infinity and the order of sums, for comparisons with references; XLA's own default too",
    ),
)
"""For every program on CPUs. Not empty, so that runs on CPUs pass options as runs on GPUs do."""

CPU_ONCE = (
    Option("xla_backend_optimization_level", 1, "a third of the time to compile, with the same values bit for bit"),
)
"""For the program of the initial weights on CPUs, which compiles for longer than it runs."""

MOST_QUICK = 2**26
"""Weights from which the program's run, which takes twice as long at level 1, outweighs its compilation."""

GPU = (
    Option(
        "xla_gpu_enable_latency_hiding_scheduler", True, "orders the program so that collectives run beside matmuls"
    ),
    Option(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        6,
        "lets transfers between pipeline stages overlap a loop over layers that has collectives too",
    ),
    Option(
        "xla_gpu_all_reduce_combine_threshold_bytes",
        2**20,
        "keeps the reductions over stages separate: combined, all would wait for the last one",
    ),
    Option(
        "xla_gpu_enable_triton_gemm",
        False,
        "uses cuBLASLt for matmuls, which reads a row of a stack, and adds to a row of an accumulator, in place",
    ),
)
"""For every program on GPUs, real or virtual."""

FP8 = (
    Option(
        "xla_gpu_dot_merger_threshold_mb",
        0,
        "keeps matmuls of the same input separate: merged, scaled weights would be multiplied in 16 bits",
    ),
)
"""In addition to GPU, for programs with precision.matmul."""

PROFILE = "fdo_profile"
"""Compile option of jax, for all platforms: times of a program's instructions, by which XLA's scheduler orders them. A
ProfiledInstructionsProto, binary or as text."""
PROFILES = ("xla_gpu_pgle_profile_file_or_directory_path", PROFILE)
"""Options by which users give a profile of their own."""

INFERENCE = (
    Option(
        "xla_gpu_dot_merger_threshold_mb",
        0,
        "keeps queries, keys and values separate matmuls: merged, their weights would be copied in every step",
    ),
)
"""In addition to GPU, for the steps that generate text."""

DETERMINISTIC = (
    Option(
        "xla_gpu_deterministic_ops",
        True,
        "excludes kernels whose order of sums varies between runs, and choices by timing",
    ),
)
"""In addition to GPU, with xla.deterministic, on real GPUs only: for virtual devices the compiler finds no kernels."""

DEVICELESS = (Option("xla_gpu_autotune_level", 0, "there is no device to time kernels on"),)
"""In addition to GPU, for deviceless compilation."""


def termination(seconds: float) -> tuple[Option, ...]:
    """For every program on real GPUs: end a process whose execution, or connection to other GPUs, takes this long."""
    why = "ends the process by SIGABRT if the watchdog, which waits less, can't"
    return (
        Option("xla_gpu_execution_terminate_timeout", f"{seconds:.0f}s", f"an execution, from its dispatch: {why}"),
        Option("xla_gpu_nccl_termination_timeout_seconds", int(seconds), f"creating a communicator of NCCL: {why}"),
    )


TERMINATION_MARGIN = 600.0
"""Seconds that XLA waits longer than the watchdog."""

CPU_PATIENCE = (
    Option("xla_cpu_collective_call_warn_stuck_timeout_seconds", 60, "on a busy machine, devices may be minutes apart"),
    Option("xla_cpu_collective_call_terminate_timeout_seconds", 600, "40 s would end a run while a process compiles"),
)
"""For the environment of multi-process runs on CPUs."""

FSDP = (
    Option(
        "xla_gpu_pipeline_all_gather",
        "COLLECTIVE_PIPELINING_MODE_ON",
        "gathers a layer's weights while the layer before computes",
    ),
    Option(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        2,
        "spreads gathers and scatters over the matmuls of a layer; with 6 in flight, fewer overlap with one",
    ),
)
"""Override those of GPU, for weights that are gathered layer by layer, without a pipeline."""


SIDE_BY_SIDE = (
    Option(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        1,
        "one collective of a microbatch at a time, beside the kernels of the other; with more, fewer are hidden",
    ),
)
"""Override those of GPU, with batch.side_by_side and without a pipeline."""

_APART = "keeps the collectives of a forward and of a backward separate: combined, they would wait for both"
SIDE_BY_SIDE_IN_TICKS = (
    Option("xla_gpu_all_gather_combine_threshold_bytes", 2**20, _APART),
    Option("xla_gpu_reduce_scatter_combine_threshold_bytes", 2**20, _APART),
)
"""In addition to GPU, with batch.side_by_side in a pipeline."""


class Defaults(NamedTuple):
    """The default options of a platform."""

    always: tuple[Option, ...] = ()
    fsdp: tuple[Option, ...] = ()
    """With data_sharding=fsdp and without a pipeline."""
    side_by_side: tuple[Option, ...] = ()
    """With batch.side_by_side above 1, without a pipeline."""
    in_ticks: tuple[Option, ...] = ()
    """With batch.side_by_side above 1, in a pipeline."""
    fp8: tuple[Option, ...] = ()
    """With precision.matmul."""
    deterministic: tuple[Option, ...] = ()
    """With xla.deterministic."""
    inference: tuple[Option, ...] = ()
    """For steps that generate text."""
    termination: Callable[[float], tuple[Option, ...]] = lambda seconds: ()
    """With resilience.watchdog, for its longest limit."""
    once: tuple[Option, ...] = ()
    """For the program of the initial weights."""


_ON_GPU = Defaults(GPU, FSDP, SIDE_BY_SIDE, SIDE_BY_SIDE_IN_TICKS, FP8, DETERMINISTIC, INFERENCE, termination)

_ON_CPU = Defaults(CPU, once=CPU_ONCE)

DEFAULTS: Mapping[str, Defaults] = MappingProxyType({"cpu": _ON_CPU, "gpu": _ON_GPU, "cuda": _ON_GPU})
"""jax.Device.platform -> default options. Devices of a GPU topology are "cuda", other GPUs "gpu"."""


@dataclass(frozen=True, kw_only=True)
class XlaConfig:
    """Compiler options, the compile cache, and the share of GPU memory that the process reserves.

    Example: `mj.XlaConfig(deterministic=True)`
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    """XLA options by name; they override MegaJAX's. On the command line --xla=name=value,name=value adds to them."""
    schedule: Literal["auto", "costs", "default"] = "auto"
    """How XLA orders kernels and collectives of the train step. costs: by the kernel times of plans, which takes a
    second compilation; default: by its own; auto: by costs on several GPUs."""
    deterministic: bool = False
    """Make runs on GPUs bitwise reproducible: no kernels with a varying order of sums, and no autotuning."""
    memory_fraction: Annotated[float, Bounds(above=0, below=1, hint="try 0.9")] = 0.92
    """Share of GPU memory reserved for arrays at start-up. NCCL, cuDNN and kernels use the rest."""
    compile_cache: bool = True
    """Keep compiled programs on disk for the next start."""
    compile_cache_dir: PathText | None = None
    """Folder of the compile cache; none: compile/ in the user's cache folder. Several machines need a shared one. Verbs
    that read a run ignore the run's without --trust-code: compiled programs are machine code."""
    compile_cache_gib: Annotated[float, Bounds(above=0, hint="xla.compile_cache=false turns the cache off")] = 2.0
    """Size limit of the compile cache in GiB; the least recently used programs are removed first."""

    def code(self) -> dict[str, str]:
        """Options with a text: some name files to write, or folders of programs that XLA runs."""
        plain = r"(?i)(true|false|[-+]?\d+(\.\d*)?(e[-+]?\d+)?)?"
        texts = {name: str(value) for name, value in self.options.items() if not re.fullmatch(plain, str(value))}
        return {f"options.{name}": f"{name}={text}" for name, text in texts.items()}

    def problems(self) -> list[Problem]:
        problems = []
        for name, value in self.options.items():
            if not re.fullmatch(r"\w+", name):
                problems.append(Problem("options", f"{name!r} is no name of an option", "write --xla=name=value"))
            elif not isinstance(value, bool | int | float | str):
                problems.append(Problem(f"options.{name}", f"expected one value, got {value!r}"))
        return problems


def compiler_options(*options: Option) -> dict[str, Value]:
    """For `jax.stages.Lowered.compile(compiler_options=...)`; without those that XLA_FLAGS sets for all programs."""
    flags = flag_names()
    return {option.name: option.value for option in options if option.name not in flags}


def options_for_once(options: Mapping[str, Value], platform: str, weights: int) -> dict[str, Value]:
    """The options of the program that makes initial weights, this many; options: of all programs of the run."""
    quick = DEFAULTS.get(platform, Defaults()).once if weights <= MOST_QUICK else ()
    return {**compiler_options(*quick), **options}


IN_ENVIRONMENT = "XLA_FLAGS=--"
"""Before an option that a user is to set for the whole process."""


def flag_values(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The options that the environment variable XLA_FLAGS sets; one without a value is true."""
    words = re.findall(r"--(\w+)(=\S*)?", environment.get("XLA_FLAGS", ""))
    return {name: value.removeprefix("=") if value else "true" for name, value in words}


def flag_names(environment: Mapping[str, str] = os.environ) -> set[str]:
    """Names of the options that the environment variable XLA_FLAGS sets."""
    return set(flag_values(environment))


def add_flags(options: Iterable[Option], environment: Any = os.environ) -> None:
    """Adds options to XLA_FLAGS, for all programs of the process. Before jax starts; only options of every version."""
    present = flag_names(environment)
    added = [f"--{option.name}={option.value}" for option in options if option.name not in present]
    environment["XLA_FLAGS"] = " ".join([environment.get("XLA_FLAGS", ""), *added]).strip()


MEMORY_FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variables for the reserved share of GPU memory; jax reads them when it initialises devices."""


def set_process(xla: XlaConfig, environment: Any = os.environ) -> None:
    """Sets the environment variables that jax's runtime reads when it starts, unless the user has set them."""
    if not any(environment.get(name) for name in MEMORY_FRACTION):
        environment[MEMORY_FRACTION[0]] = f"{xla.memory_fraction:g}"


def memory_fraction(environment: Mapping[str, str] = os.environ) -> str | None:
    """The reserved share of GPU memory, as set in the environment; None: jax's default."""
    return next((value for name in MEMORY_FRACTION if (value := environment.get(name))), None)


_PER_PROCESS = re.compile(
    r"CACHE|LOG|DUMP|TRACEBACK|TRACER_ERROR|PPRINT|PROCESS|COORDINATOR|LOCAL_DEVICE|VISIBLE_DEVICES|NUM_CPU_DEVICES|"
    r"PLATFORM|MTLS|TRANSPORT|SOCKET|TIMEOUT|CREDENTIALS|PROXY|CUDA_CONSTRAINTS|EXPLAIN"
)
"""Words of variables JAX_* that may differ between processes: ranks, folders, addresses, messages."""
_LOCAL_FLAG = re.compile(r"xla_dump|xla_gpu_cuda_data_dir|xla_force_host_platform|xla_gpu_dump|xla_cpu_collective_call")
"""Flags of XLA that may differ between processes: what is written where, and the number of devices."""
_NUMBERS = (
    *("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE"),
    *("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS"),
    *("NCCL_LAUNCH_MODE", "NCCL_LAUNCH_ORDER_IMPLICIT"),
)
"""Variables of NVIDIA's libraries that decide kernels, orders of sums, or the protocol that all GPUs must share. Those
of interfaces, topology and debugging may differ between machines."""


def program_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Name -> value of environment variables that decide programs or numbers; flags in XLA_FLAGS one by one."""
    variables = {
        name: value
        for name, value in environment.items()
        if value and (name in _NUMBERS or (name.startswith("JAX_") and not _PER_PROCESS.search(name)))
    }
    for flag in environment.get("XLA_FLAGS", "").split():
        name, _, value = flag.partition("=")
        if not _LOCAL_FLAG.search(name):
            variables[f"XLA_FLAGS {name}"] = value or "true"
    return variables


_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
"""Parameters of mallopt, from malloc.h.

XLA allocates the buffers of a step on CPUs with malloc. glibc maps blocks above a limit (128 KiB to 32 MiB) anew each
time and unmaps them when they are freed, so each step faults in, and the kernel clears, every page again: 20,600 page
faults a step in configs/quickstart.py, 13 to 23 % of its processor time. With one arena, no mapped blocks and no
trimming, the next step finds the pages that the last one freed. See mallopt(3).
"""
FREED_MEMORY = "MEGAJAX_FREED_MEMORY"
"""Environment variable with the value "kept" while this process keeps freed memory."""


def keep_freed_memory(environment: MutableMapping[str, str] = os.environ, library: Any = None) -> bool:
    """Keep freed memory from now on, before jax starts its threads -> whether the C library does so.

    It does not if it has no mallopt, or if the user has set its allocator by MALLOC_* or GLIBC_TUNABLES. library: the C
    library, by default that of this process.
    """
    environment.pop(FREED_MEMORY, None)  # inherited from a parent process
    tuned = any(name.startswith("MALLOC_") for name in environment)
    tuned = tuned or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    mallopt = None if tuned else getattr(library or ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    if not all([mallopt(_ARENA_MAX, 1), mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, -1)]):
        return False
    environment[FREED_MEMORY] = "kept"
    return True


def keeps_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process keeps freed memory."""
    return environment.get(FREED_MEMORY) == "kept"


def trim_once(library: Any = None) -> None:
    """Return what is free now, such as the memory of compilation, if this process keeps freed memory."""
    if keeps_freed_memory():
        (library or ctypes.CDLL(None)).malloc_trim(0)
