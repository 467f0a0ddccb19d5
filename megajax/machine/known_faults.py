"""Known faults of drivers, NVIDIA's libraries and XLA, one row each, and what runs and the doctor do about them.

Read by `megajax.doctor`, the start banner, the choice of compiler options (`megajax.training.check_compiler_options`),
and where an error ends a run (`megajax.job.device_faults`). Whether jax can use the GPUs at all is in
`megajax.processes.installation`; rows of attention kernels are in `megajax.kernels.attention.faults`.

Imports no jax.
"""

import re
from importlib.metadata import PackageNotFoundError, version

from megajax.config.errors import Problem
from megajax.kernels.attention.faults import KERNEL_FAULTS
from megajax.layers.expert_facts import RAGGED_FAULT
from megajax.machine.check import Check, Finding, Machine, fail, ok, warn
from megajax.machine.gpu_checks import driver
from megajax.machine.run_fault import Answer, Conditions, RunFault, processors
from megajax.processes.installation import find_installation
from megajax.processes.known_fault import KnownFault, Version, VersionRange, version_of
from megajax.processes.xla_options import IN_ENVIRONMENT, Option, flag_values

NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
CPUS_PER_GPU = 4
"""Threads of a process that has one GPU: Python, the loader, XLA's dispatch and NCCL's proxy."""
MOST_RAGGED = 32
"""Slots of the barrier in XLA's kernel of ragged exchanges."""
DCGM = frozenset(("nv-hostengine", "dcgm-exporter"))
VIRTUAL_GPU = re.compile(r"\bGRID\b|\bvGPU\b|-\d+(-\d+)?[ABCQ](ME)?\b")
"""In the name of a GPU that a hypervisor divides: NVIDIA A100-10C, GRID V100-8Q."""
NO_GRAPHS = Option("xla_gpu_enable_command_buffer", "", "runs kernels one by one, without CUDA graphs")
_MARIN = "https://github.com/marin-community/marin"
_XLA, _JAX = "https://github.com/openxla/xla", "https://github.com/jax-ml/jax"
RUN_FAULTS: tuple[RunFault, ...] = (
    RunFault(
        name="graphs_with_vmm",
        answer="set",
        effect="CUDA graphs of programs over several GPUs have a memset node that the driver refuses",
        # 535.274 and 550.127 refuse it. Nobody has said which driver is enough: 580 is that of CUDA 13.
        versions=(VersionRange(("jaxlib",), (0, 10, 2)), VersionRange(("driver",), (), (580,))),
        applies=lambda run: run.devices > 1,
        options=(NO_GRAPHS,),
        cure="set --xla=xla_gpu_enable_command_buffer= (0.2 to 2 % slower), or install a driver from 580 on",
        report="https://github.com/netket/netket/issues/2248",
        symptom=r"memset node",
    ),
    RunFault(
        name="graphs_of_one_process",
        answer="set",
        effect="CUDA graphs with cuDNN's attention are not captured in a process with several GPUs",
        applies=lambda run: run.gpus > 1,
        options=(NO_GRAPHS,),
        cure="start one process for each GPU (python -m megajax.launch), or set --xla=xla_gpu_enable_command_buffer=",
        report=f"{_JAX}/issues/27599",
        symptom=r"failed to (capture|instantiate) gpu graph",
    ),
    RunFault(
        name="ragged_without_nccl",
        answer="set",
        effect="ragged exchanges are refused without NVLink among all devices, between machines, and above 8 devices",
        versions=(VersionRange(("jaxlib",), (0, 11)),),
        applies=lambda run: run.ragged > 1,
        options=(
            Option(
                "xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback", True, "ragged exchanges may go through NCCL"
            ),
        ),
        cure="set --xla=xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback=true, and NCCL_CUMEM_ENABLE=0 if the "
        "exchange then hangs; or dispatch.way=gather",
        report=f"{_MARIN}/pull/7891",
        symptom=r"RaggedAllToAll fallback to NCCL is not allowed",
    ),
    RunFault(
        name="ragged_one_shot",
        answer="set",
        effect=RAGGED_FAULT,
        # Seen in 0.11.0 and 0.11.1; that later versions have a fix is not known.
        versions=(VersionRange(("jaxlib",), (0, 11)),),
        applies=lambda run: run.ragged > 1,
        options=(
            Option(
                "xla_gpu_unsupported_enable_ragged_all_to_all_decomposer",
                True,
                "replaces ragged exchanges by even ones of whole buffers: kept every gradient finite",
            ),
        ),
        cure="set --xla=xla_gpu_unsupported_enable_ragged_all_to_all_decomposer=true, or dispatch.way=gather",
        report=f"{_MARIN}/issues/8077",
        symptom=r"(?s)(?=.*ragged.?all.?to.?all).*(peer access|ILLEGAL_ADDRESS)",
    ),
    RunFault(
        name="ragged_beyond_barrier",
        answer="refuse",
        effect=f"ragged exchanges of more than {MOST_RAGGED} devices access illegal addresses; here are {{ragged}}",
        versions=(VersionRange(("jaxlib",), (0, 11)),),
        applies=lambda run: run.ragged > MOST_RAGGED,
        cure="set dispatch.way=gather or capacity, or a smaller parallel.expert",
        report=f"{_XLA}/issues/47283",
    ),
    RunFault(
        name="pinned_host_pool",
        answer="elsewhere",
        effect="host memory for offloaded tensors ends at 64 GiB a process, whatever the machine has",
        cure="start the process with XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=N, which python -m megajax.train computes "
        "(megajax.planning.host_pool), or offload less (model.offload, optimizer.offload)",
        report=f"{_XLA}/pull/20633",
        symptom=r"xla_gpu_host_bfc|pinned host (memory|staging)|HOST_MEMORY_LIMIT_GB",
    ),
    RunFault(
        name="communicator_splitting",
        answer="set",
        effect="NCCL waits forever when programs use different sets of devices",
        # One form was fixed in XLA of 2026-02. Whether there are others is not known.
        versions=(VersionRange(("jaxlib",), (), (0, 10)),),
        applies=lambda run: run.devices > 1,
        options=(Option("xla_gpu_enable_nccl_comm_splitting", False, "creates each communicator anew"),),
        cure="set --xla=xla_gpu_enable_nccl_comm_splitting=false",
        report=f"{_XLA}/pull/38105",
    ),
    RunFault(
        name="nccl_mixture",
        answer="warn",
        effect="the NCCL that is loaded is not the installed one: first collectives hang",
        applies=lambda run: any(
            run.versions.get("NCCL", ()) not in ((), run.versions[name]) for name in NCCL if run.versions.get(name)
        ),
        cure="unset LD_LIBRARY_PATH and LD_PRELOAD, and import no other package with an NCCL of its own before jax",
        report=f"{_MARIN}/pull/9062",
    ),
    RunFault(
        name="nccl_launch_order",
        answer="warn",
        effect="ignores NCCL_LAUNCH_ORDER_IMPLICIT: collectives of processes with one GPU each may wait for each other",
        versions=(VersionRange((*NCCL, "NCCL"), (), (2, 26)),),
        applies=lambda run: run.devices > 1,
        cure="install NCCL 2.26 or newer",
        report="NCCL's release notes, 2.26",
    ),
    RunFault(
        name="nccl_2_30_7",
        answer="warn",
        effect="the first collective hangs",
        # 2.30.7 hangs and 2.31.2 does not; releases between them were not tried.
        versions=(VersionRange((*NCCL, "NCCL"), (2, 30, 7), (2, 31, 2)),),
        applies=lambda run: run.devices > 1,
        cure="install NCCL 2.31.2 or newer",
        report=f"{_MARIN}/pull/9062",
    ),
    RunFault(
        name="nccl_host_memory",
        answer="warn",
        effect="NCCL crashes in ncclCuMemHostEnable on machines without NVLink",
        versions=(VersionRange(("driver",), (560,), (580,)),),
        applies=lambda run: run.devices > 1 and "NCCL_CUMEM_HOST_ENABLE" not in run.environment,
        cure="if a start crashes, set NCCL_CUMEM_HOST_ENABLE=0",
        report="https://github.com/NVIDIA/nccl/issues/1838",
        symptom=r"ncclCuMemHost",
    ),
    RunFault(
        name="nvcc_12_6_77",
        answer="refuse",
        effect="gathers give wrong numbers",
        versions=(VersionRange(("nvidia-cuda-nvcc-cu12",), (12, 6, 77), (12, 6, 85)),),
        cure="install nvidia-cuda-nvcc-cu12 12.6.85 or newer",
        report=f"{_JAX}/pull/25091",
    ),
    RunFault(
        name="cublas_on_b200",
        answer="warn",
        effect="matmuls were wrong on B200s",
        # The first affected version is not known.
        versions=(VersionRange(("nvidia-cublas",), (), (13, 2, 0, 9)),),
        capability=((10, 0), (11,)),
        cure="install nvidia-cublas 13.2.0.9 or newer",
        report=f"{_MARIN}/pull/5428",
    ),
    RunFault(
        name="pgle_of_several_processes",
        answer="refuse",
        effect="JAX_ENABLE_PGLE with several processes: profiles are empty, or the run hangs for hours",
        applies=lambda run: run.is_set("JAX_ENABLE_PGLE") and run.processes > 1,
        cure="unset JAX_ENABLE_PGLE; xla.schedule=costs needs no profile",
        report=f"{_MARIN}/pull/8209",
        symptom=r"profiling session",
    ),
    RunFault(
        name="pgle_beside_dcgm",
        answer="refuse",
        effect="JAX_ENABLE_PGLE while DCGM measures the GPUs: only one of them can have a profiling session",
        applies=lambda run: run.is_set("JAX_ENABLE_PGLE") and not DCGM.isdisjoint(run.programs()),
        cure="unset JAX_ENABLE_PGLE, or pause DCGM (dcgmi profile --pause); profile.steps needs the pause too",
        report=f"{_MARIN}/pull/8222",
        symptom=r"profiling session|CUPTI_ERROR_(MULTIPLE_SUBSCRIBERS|HARDWARE_BUSY)",
    ),
    RunFault(
        name="eager_operations",
        answer="warn",
        effect="operations outside of jit were wrong, such as sqrt(512) = 0",
        # Seen with jaxlib 0.11.0 and 0.11.1 and driver 610; whether others are affected is not known.
        versions=(VersionRange(("jax-cuda13-plugin",), (0, 11)), VersionRange(("driver",), (610,))),
        capability=((8, 6), (8, 7)),
        cure="see the check `eager` of python -m megajax.doctor; if it fails, use the extra cuda12 or another driver",
        report=f"{_JAX}/issues/40633",
    ),
    RunFault(
        name="virtual_gpu",
        answer="warn",
        effect="a part of a GPU from a hypervisor may lack the virtual memory that XLA allocates with",
        versions=(VersionRange(("jaxlib",), (0, 10, 1)),),
        applies=lambda run: any(VIRTUAL_GPU.search(name) for name in run.names),
        cure=f"set {IN_ENVIRONMENT}xla_gpu_experimental_vmm_disabled=true, or use a whole GPU or MIG without vGPU",
        report=f"{_XLA}/issues/49252",
        symptom=r"does not support CUDA Virtual Memory Management",
    ),
    RunFault(
        name="fusion_autotuner",
        answer="explain",
        effect="XLA times fusions by default, and compiles for minutes",
        # Seen in 2026-09; since when it is the default is not known. `CompileLog` prints the cure.
        cure="if every start compiles this long, try --xla=xla_gpu_experimental_enable_fusion_autotuner=false",
        report="https://github.com/tue-bmd/zea/issues/599",
    ),
    RunFault(
        name="autotuning_results",
        answer="explain",
        effect="stored results of autotuning are incomplete, so a restart may compute other bits; timing may fail",
        cure="set --xla.deterministic=true: no autotuning, the same bits at each start",
        report=f"{_XLA}/issues/37902",
        symptom=r"autotuning failed for HLO|delay.?kernel",
    ),
    RunFault(
        name="cache_at_a_url",
        answer="warn",
        effect="a compile cache at a URL stores no results of autotuning: each host times kernels at each start",
        applies=lambda run: "://" in run.environment.get("JAX_COMPILATION_CACHE_DIR", ""),
        cure="unset JAX_COMPILATION_CACHE_DIR, or set it to a folder",
        report=f"{_MARIN}/pull/8039",
    ),
    RunFault(
        name="heartbeats_while_pinning",
        answer="elsewhere",
        effect="pinning host memory takes minutes, in which a process sends no heartbeats",
        cure="megajax.processes.start waits --init-timeout for heartbeats: set a longer one",
        report=f"{_JAX}/issues/23599",
        symptom=r"heartbeat timeout|stopped sending heartbeats",
    ),
    RunFault(
        name="few_cpus",
        answer="warn",
        effect=f"{{share}} CPUs for each GPU, which needs {CPUS_PER_GPU}: collectives have a fraction of their speed",
        applies=lambda run: 0 < run.cpus < CPUS_PER_GPU * run.gpus,
        cure="give the process more CPUs (Slurm: --cpus-per-task, and --cpu-bind; Kubernetes: resources.requests.cpu)",
        report=f"{_JAX}/issues/34896",
    ),
    RunFault(
        name="restores_together",
        answer="elsewhere",
        effect="the processes of a machine restore together, and take the memory of several checkpoints",
        cure="megajax.checkpoint restores in groups of 512 MiB, so a process adds no more than that",
        report=f"{_MARIN}/pull/8480",
    ),
    RunFault(
        name="nccl_buffers",
        answer="explain",
        effect="NCCL allocates outside of jax's share of the memory, and finds none",
        cure="set a smaller --xla.memory_fraction, or NCCL_BUFFSIZE=2097152 and NCCL_MAX_NCHANNELS=16",
        report=f"{_MARIN}/issues/8508",
        symptom=r"nccl.*(out of memory|failed to cuda (m|c)alloc)|ncclUnhandledCudaError",
    ),
    RunFault(
        name="symmetric_buffers",
        answer="warn",
        effect="windows of symmetric memory differ between processes: deadlocks and illegal addresses",
        applies=lambda run: run.has_flag("xla_gpu_experimental_enable_nccl_symmetric_buffers"),
        cure="remove xla_gpu_experimental_enable_nccl_symmetric_buffers",
        report=f"{_XLA}/issues/45406",
    ),
    RunFault(
        name="collectives_in_graphs",
        answer="warn",
        effect="CUDA graphs with collectives hung, leaked memory or were 30 % slower",
        applies=lambda run: run.has_flag("xla_gpu_enable_command_buffer", "COLLECTIVES"),
        cure="remove COLLECTIVES from xla_gpu_enable_command_buffer",
        report=f"{_MARIN}/pull/8277",
    ),
    RunFault(
        name="inert_pipelining",
        answer="warn",
        effect="xla_gpu_enable_pipelined_* is accepted and has no effect",
        applies=lambda run: any(
            re.fullmatch(r"xla_gpu_enable_pipelined_(all_gather|all_reduce|reduce_scatter)", flag) for flag in run.flags
        ),
        cure="set xla_gpu_pipeline_all_gather=COLLECTIVE_PIPELINING_MODE_ON and so on",
        report=f"{_XLA}/issues/44228",
    ),
    RunFault(
        name="shared_programs",
        answer="warn",
        effect="JAX_SHARE_BINARY_BETWEEN_HOSTS: processes wait for each other forever while they compile",
        applies=lambda run: run.is_set("JAX_SHARE_BINARY_BETWEEN_HOSTS"),
        cure="unset it",
        report="https://github.com/NVIDIA/JAX-Toolbox/pull/612",
    ),
    RunFault(
        name="crossing_groups",
        answer="elsewhere",
        effect="a loop with collectives over crossing groups of devices hangs on several machines",
        cure="megajax.processes.gpus sets NCCL_LAUNCH_ORDER_IMPLICIT or NCCL_LAUNCH_MODE, unless the user has",
        report="https://github.com/NVIDIA/nccl/issues/1772",
    ),
    RunFault(
        name="cudnn_execution",
        answer="explain",
        effect="a kernel of cuDNN did not run",
        # Reported without versions.
        cure="check the driver's Xid (dmesg); then try the mixer's kernel=pallas, or another cuDNN",
        report="https://github.com/Physical-Intelligence/openpi/issues/725",
        symptom=r"CUDNN_STATUS_EXECUTION_FAILED",
    ),
    RunFault(
        name="scheduler_memory",
        answer="explain",
        effect="XLA's latency-hiding scheduler may hold several times the memory that the program needs",
        cure="compare with --xla=xla_gpu_enable_latency_hiding_scheduler=false, or bound it by "
        "--xla=xla_gpu_experimental_scheduler_memory_fencing_threshold_bytes=N",
        report=f"{_JAX}/issues/20763",
        symptom=r"^(?!.*(host_bfc|pinned host|nccl)).*(RESOURCE_EXHAUSTED|out of memory while trying to allocate)",
    ),
)
"""Rows whose versions are not known have none, or a comment that says so."""

KNOWN_FAULTS: tuple[KnownFault, ...] = (*RUN_FAULTS, *KERNEL_FAULTS)
"""All rows. Those of kernels are answered by `auto`, which leaves such a kernel out."""


def met(conditions: Conditions, *answers: Answer) -> list[RunFault]:
    """The rows with one of these answers that a run meets."""
    return [fault for fault in RUN_FAULTS if fault.answer in answers and fault.met(conditions)]


def options(conditions: Conditions) -> list[Option]:
    """Compiler options that avoid the faults which a run would meet."""
    return list(dict.fromkeys(option for fault in met(conditions, "set") for option in fault.options))


def refusals(conditions: Conditions) -> list[Problem]:
    """Faults because of which a run can't begin."""
    return [Problem(fault.name, fault.text(conditions), fault.cure) for fault in met(conditions, "refuse")]


def notes(conditions: Conditions) -> list[str]:
    """Lines for the banner: what was set because of a fault, and warnings."""
    lines = []
    for fault in met(conditions, "set", "warn"):
        names = ", ".join(f"{option.name}={option.value}" for option in fault.options)
        answer = f"therefore {names}" if names else fault.cure
        lines.append(f"{fault.text(conditions)}; {answer}")
    return lines


def explanation(text: str) -> list[str]:
    """Lines under an error that ends a run: the known faults with its text, and their cures."""
    return [
        f"known fault ({fault.name}): {fault.effect.strip(',')}\n  cure: {fault.cure}\n  see {fault.report}"
        for fault in KNOWN_FAULTS
        if fault.shows(text)
    ]


def installed_version(package: str) -> str:
    """The version of an installed package; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def versions() -> dict[str, Version]:
    """Versions of what the rows name, as far as it is installed."""
    names = {name for fault in RUN_FAULTS for versions in fault.versions for name in versions.packages}
    numbers_of = {name: version_of(installed_version(name)) for name in sorted(names)}
    numbers_of |= {"driver": find_installation().driver or ()}
    return {name: numbers for name, numbers in numbers_of.items() if numbers}


def of_machine(machine: Machine) -> Conditions:
    """The conditions of a run on all GPUs of a machine, with one process for each."""
    gpus, count = driver(machine).get("gpus", ()), len(machine.visible_gpus)
    return Conditions(
        versions=versions(),
        gpus=1,
        devices=count,
        processes=count,
        capability=max((version_of(str(gpu["capability"])) for gpu in gpus), default=None),
        names=tuple(str(gpu["name"]) for gpu in gpus),
        cpus=processors() // max(count, 1),
        environment=machine.environment,
        flags=flag_values(machine.environment),
    )


def known_faults(machine: Machine) -> Finding | None:
    """Runs on this machine would meet no known fault, other than those that they avoid."""
    if not machine.gpu_files:
        return None
    conditions = of_machine(machine)
    avoided = [f"avoided by runs: {fault.text(conditions)}" for fault in met(conditions, "set")]
    problems = met(conditions, "refuse", "warn")
    text = "; ".join([*(fault.text(conditions) for fault in problems), *avoided])
    if not problems:
        return ok(text or "none is met here")
    verdict = fail if met(conditions, "refuse") else warn
    return verdict(text, "; ".join(fault.cure for fault in problems))


CHECKS: tuple[Check, ...] = (("known faults", known_faults),)
