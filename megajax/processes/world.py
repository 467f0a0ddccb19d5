"""The number of processes and the index of this one, from flags, launcher or scheduler, read from the environment.

By default a run has a single process: on a laptop, in a notebook, or in a shell inside an allocation.
"""

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megajax.config.errors import UserError

COORDINATOR = "MEGAJAX_COORDINATOR"
COUNT = "MEGAJAX_NUM_PROCESSES"
INDEX = "MEGAJAX_PROCESS_ID"
LOCAL_INDEX = "MEGAJAX_LOCAL_RANK"
LOCAL_COUNT = "MEGAJAX_LOCAL_PROCESSES"
TOKEN = "MEGAJAX_RUN_TOKEN"
"""The same text for all processes of one start of a run, and for no others; see World.token."""

RANKS = (INDEX, "JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")  # the nearest launcher first

# Above the ports that Linux uses for outgoing connections.
_FIRST_PORT, _PORTS = 61440, 4096


class StartError(UserError):
    """The processes of a run did not connect. Code 1: a retry may succeed; 2: the user must change something."""

    def __init__(self, message: str, *, code: int, reported: bool = False):
        """reported: another process prints the same message."""
        super().__init__(f"megajax: {message}")
        self.code = code
        self.reported = reported


@dataclass(frozen=True, slots=True)
class World:
    """The processes of the run, and the index of this one."""

    count: int
    """Number of processes, at least 2."""
    index: int
    """Index of this process, from 0."""
    coordinator: str
    """HOST:PORT at which process 0 listens."""
    local_index: int | None = None
    """Index of this process on its machine, if the launcher sets it."""
    local_count: int | None = None
    """Number of processes on this machine, if the launcher sets it."""
    token: str = field(default="", compare=False)
    """Identifies this start of the run, so that process 0 knows connections of others; "" if the launcher sets none."""


class _Launcher(NamedTuple):
    """The values that a launcher sets; None: not set."""

    count: int | None = None
    index: int | None = None
    coordinator: str | None = None
    local_index: int | None = None
    local_count: int | None = None
    token: str | None = None


def find_world(environment: Mapping[str, str] = os.environ) -> World | None:
    """The processes of this run, or None for a single process.

    MEGAJAX_COORDINATOR, MEGAJAX_NUM_PROCESSES and MEGAJAX_PROCESS_ID (also set by flags of the command line) come
    first. The rest is taken from JAX_*, Open MPI, Slurm or Kubernetes: the first that sets several processes. Raises
    StartError if values are missing or inconsistent, or if torchrun started the process.
    """
    explicit_names = [name for name in (COORDINATOR, COUNT, INDEX) if environment.get(name)]
    problems: list[str] = []
    explicit = _Launcher(
        _number(environment, COUNT, problems),
        _number(environment, INDEX, problems),
        environment.get(COORDINATOR) or None,
        _number(environment, LOCAL_INDEX, problems),
        _number(environment, LOCAL_COUNT, problems),
        environment.get(TOKEN) or None,
    )
    if not problems and explicit.count == 1 and not explicit.index:
        return None
    launched = next(
        (values for launcher in _LAUNCHERS if (values := launcher(environment)).count not in (None, 1)), _Launcher()
    )
    if not explicit_names:
        _refuse_torchrun(environment, launched)
        if launched.count is None:
            return None
    if explicit.index is not None or explicit.count is not None:
        # The processes may be of several steps of a job.
        launched = launched._replace(token=None)
    if launched.count is None and explicit.index is None:
        # An indexed job also has an index when its pods are independent, so it is used only here.
        launched = launched._replace(index=_number(environment, "JOB_COMPLETION_INDEX", problems))
    merged = launched._replace(**{name: value for name, value in explicit._asdict().items() if value is not None})
    count, index, coordinator = merged.count, merged.index, merged.coordinator
    problems += _missing(count, index, coordinator)
    if problems or count is None or index is None or coordinator is None:
        raise StartError("; ".join(problems), code=2)
    return World(count, index, coordinator, merged.local_index, merged.local_count, merged.token or "")


def _refuse_torchrun(environment: Mapping[str, str], launched: _Launcher) -> None:
    """Raises StartError for one of several processes of torchrun or MPICH, whose variables MegaJAX does not read."""
    size, rank, host = _int(environment, "WORLD_SIZE"), _int(environment, "RANK"), environment.get("MASTER_ADDR")
    what = "torchrun or a similar launcher (RANK, WORLD_SIZE and MASTER_ADDR are set)"
    if size in (None, 1) or rank is None or not host:
        size, rank, host = _int(environment, "PMI_SIZE"), _int(environment, "PMI_RANK"), "HOST"
        what = "the mpirun of MPICH or Intel MPI (PMI_RANK and PMI_SIZE are set)"
    if size in (None, 1) or rank is None:
        return
    if launched.count is not None and not environment.get("TORCHELASTIC_RUN_ID"):
        return  # set from the values of that launcher, for other programs
    raise StartError(
        f"process {rank} of {size} of {what}, whose "
        f"{size} processes would train separate runs in one folder. On one machine, start them with: python -m "
        "megajax.launch --processes=N -- python -m megajax.train ...; on several, with srun or Open MPI's mpirun, or "
        f"give each process --coordinator={host}:{_FIRST_PORT} --num-processes={size} --process-id={rank}. "
        f"{COUNT}=1 starts a run of this process alone",
        code=2,
        reported=environment.get("LOCAL_RANK", environment.get("MPI_LOCALRANKID", "0")) != "0",
    )


def split_address(address: str) -> tuple[str, int] | None:
    """HOST:PORT or [ADDRESS]:PORT -> host and port; None if it is neither."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]]+)):(\d{1,5})", address)
    if match is None or not 0 < int(match[3]) < 65536:
        return None
    return match[1] or match[2], int(match[3])


def is_loopback(host: str) -> bool:
    """Whether a host name or address is one that only its own machine reaches."""
    return host in ("localhost", "::1") or host.startswith("127.")


def process_index(environment: Mapping[str, str] = os.environ) -> int:
    """The index of this process as set by its launcher; 0 without one."""
    names = (*RANKS, "JOB_COMPLETION_INDEX") if environment.get(COUNT) else RANKS
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), 0)


def _number(environment: Mapping[str, str], name: str, problems: list[str]) -> int | None:
    text = environment.get(name) or None
    if text is None or text.isdigit():
        return None if text is None else int(text)
    problems.append(f"{name} must be a whole number, it is {text!r}")
    return None


def _missing(count: int | None, index: int | None, coordinator: str | None) -> list[str]:
    """Messages about missing and invalid values."""
    problems = [
        f"{description} is not known: give {flag} or set {name} for every process"
        for value, flag, name, description in (
            (coordinator, "--coordinator=HOST:PORT", COORDINATOR, "where process 0 is"),
            (count, "--num-processes", COUNT, "how many processes there are"),
            (index, "--process-id", INDEX, "which process this is"),
        )
        if value is None
    ]
    if problems and coordinator is None:
        problems.append("or python -m megajax.launch --processes=N -- COMMAND starts all processes of a machine")
    if coordinator is not None and split_address(coordinator) is None:
        problems.append(f"--coordinator must be HOST:PORT, it is {coordinator!r}")
    if count is not None and count < 1:
        problems.append(f"--num-processes must be at least 1, it is {count}")
    elif count is not None and index is not None and index >= count:
        problems.append(f"--process-id={index} is not one of {count} processes: they are 0 to {count - 1}")
    return problems


def _int(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdigit() else None


def _jax(environment: Mapping[str, str]) -> _Launcher:
    """jax's own variables, if all are set."""
    count, index = _int(environment, "JAX_NUM_PROCESSES"), _int(environment, "JAX_PROCESS_ID")
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    return _Launcher(count, index, address) if address and count is not None and index is not None else _Launcher()


def _open_mpi(environment: Mapping[str, str]) -> _Launcher:
    """mpirun. Open MPI 5 does not set the host of process 0 unless all processes are on one machine."""
    count, local_count = _int(environment, "OMPI_COMM_WORLD_SIZE"), _int(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or ""
    uri = re.search(r"tcp://([^,:]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    host = "127.0.0.1" if count == local_count else uri[1] if uri else None
    return _Launcher(
        count,
        _int(environment, "OMPI_COMM_WORLD_RANK"),
        host and f"{host}:{_port(job.rpartition('@')[0] or job)}",
        _int(environment, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_count,
        job.rpartition("@")[0] or job,
    )


def _slurm(environment: Mapping[str, str]) -> _Launcher:
    """srun. Reads the job step, not the allocation, whose shell or batch script is a single process."""
    count, nodes = _int(environment, "SLURM_STEP_NUM_TASKS"), environment.get("SLURM_STEP_NODELIST", "")
    if count is None or not nodes:
        return _Launcher()
    job = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    node, tasks = _int(environment, "SLURM_NODEID") or 0, _tasks(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return _Launcher(
        count,
        _int(environment, "SLURM_PROCID"),
        f"{_first_host(nodes)}:{_port(job)}",
        _int(environment, "SLURM_LOCALID"),
        tasks[node] if node < len(tasks) else None,
        job,
    )


_LAUNCHERS: tuple[Callable[[Mapping[str, str]], _Launcher], ...] = (_jax, _open_mpi, _slurm)


def _first_host(nodes: str) -> str:
    """node[001-003,007],other -> node001."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else nodes


def _tasks(text: str) -> list[int]:
    """8(x2),4 -> [8, 8, 4]."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in groups for _ in range(int(times or 1))]


def _port(job: str) -> int:
    """A port derived from the job: the same for all its processes, probably different for other jobs."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
