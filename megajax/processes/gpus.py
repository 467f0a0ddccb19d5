"""The GPUs that a process sees, its share of them among the processes of its machine, and NCCL's variables for them.

Visible are the GPUs with a device file, restricted by CUDA_VISIBLE_DEVICES as CUDA restricts them. The processes of a
machine either divide what all of them see, or each was given GPUs of its own. No process can tell alone which of the
two it is: two processes that see two GPUs each may see the same two. So process 0 compares what all of them see when
they connect (`megajax.processes.start`), and assigns the GPUs.
"""

import os
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from megajax.processes.world import World

VISIBLE, CHOSEN = "CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS"

_BOUND = {
    "SLURM_GPUS_PER_TASK": r"(?:[^:]+:)*(\d+)",
    "SLURM_TRES_PER_TASK": r".*gres[/:]gpu(?:[:/][^:=,]+)?[:=](\d+).*",
    "SLURM_GPU_BIND": r".*(?:single|per_task):(\d+)",
}
"""Variables of a Slurm task that tell how many GPUs were bound to it: --gpus-per-task, --tres-per-task, --gpu-bind."""


class GpuClaim(NamedTuple):
    """What a process tells process 0 about its GPUs."""

    machine: str
    """A name that other machines and containers do not have."""
    visible: tuple[str, ...] = ()
    """Names of the GPUs that it sees, see `visible_gpus`; none if it uses the CPU."""
    chosen: tuple[int, ...] | None = None
    """Indices among them that JAX_LOCAL_DEVICE_IDS sets."""
    bound: bool = False
    """Whether Slurm gave it these GPUs. With cgroups, other processes see other GPUs under the same names."""
    local_index: int | None = None
    local_count: int | None = None
    """As in `World`."""

    @classmethod
    def of(cls, world: World, visible: tuple[str, ...], environment: Mapping[str, str] = os.environ) -> Self:
        """The claim of this process. visible: the GPUs that it sees; none if it uses the CPU."""
        text = environment.get(CHOSEN, "")
        chosen = tuple(int(number) for number in text.split(",")) if re.fullmatch(r"\d+(,\d+)*", text) else None
        bound = 0 < len(visible) == bound_gpus(environment)
        return cls(machine_name(), visible, chosen, bound, world.local_index, world.local_count)

    @classmethod
    def read(cls, value: object) -> Self | None:
        """The claim in the message of a process; None if it is not one."""
        if not isinstance(value, list) or len(value) != len(cls._fields):
            return None
        machine, visible, chosen, bound, *place = value
        names = [machine, *visible] if isinstance(visible, list) else [None]
        counts = [*place, *(chosen if isinstance(chosen, list) else [chosen])]
        valid = (
            isinstance(bound, bool)
            and chosen != []
            and all(isinstance(name, str) and name.isprintable() for name in names)
            and all(count is None or (type(count) is int and count >= 0) for count in counts)
        )
        return cls(machine, tuple(visible), None if chosen is None else tuple(chosen), bound, *place) if valid else None

    @property
    def gpus(self) -> tuple[str, ...]:
        """Names of the GPUs that it would use if it were alone."""
        if self.chosen is None:
            return self.visible
        return tuple(self.visible[index] for index in self.chosen if index < len(self.visible))

    @property
    def divides(self) -> bool:
        """Whether it divides the GPUs that it sees with other processes that see the same ones."""
        return bool(self.visible) and self.chosen is None and not self.bound and self.local_count != 1


def installed_gpus(devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Numbers of the GPUs with a device file; in a container, those that NVIDIA_VISIBLE_DEVICES gave to it."""
    numbers = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nvidia*"))
    return tuple(sorted((match[1] for match in numbers if match), key=int))


def visible_gpus(environment: Mapping[str, str], present: Sequence[str]) -> tuple[str, ...]:
    """Names of the GPUs that CUDA shows to a process, in its order: numbers, UUIDs, or a MIG device.

    present: `installed_gpus`. CUDA_VISIBLE_DEVICES lists indices, UUIDs (GPU-…, perhaps shortened) or MIG devices. CUDA
    reads it up to the first entry that names no GPU, such as -1, and shows one MIG device at most. Empty: none.
    """
    text = environment.get(VISIBLE)
    if text is None:
        return tuple(present)
    names: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry.startswith("MIG-") and present:
            return (*names, entry)
        is_index = entry.isdecimal() and int(entry) < len(present)
        name = present[int(entry)] if is_index else entry
        if name in names or len(names) == len(present) or not (is_index or entry.startswith("GPU-")):
            break
        names.append(name)
    return tuple(names)


def bound_gpus(environment: Mapping[str, str]) -> int | None:
    """Number of GPUs that Slurm bound to this task; None: to none, or the task sees all GPUs of its job there."""
    if environment.get("SLURM_GPU_BIND", "").endswith("none"):
        return None
    matches = (re.fullmatch(pattern, environment.get(name, "")) for name, pattern in _BOUND.items())
    return next((int(match[1]) for match in matches if match), None)


def machine_name() -> str:
    """The host name with the number of its start: containers of a machine differ in the first, machines in both."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.is_file() else ''}".strip()


def assign(claims: Mapping[int, GpuClaim]) -> dict[int, list[int] | None] | str:
    """Process -> indices of its GPUs among those it sees, None: all of them. Or why they cannot be assigned.

    Processes of a machine that see the same GPUs divide them equally, in order.
    """
    shares: dict[int, list[int] | None] = dict.fromkeys(claims)
    for machine in dict.fromkeys(claim.machine for claim in claims.values()):
        local = {process: claim for process, claim in claims.items() if claim.machine == machine and claim.visible}
        host = machine.partition(" ")[0]
        if (problem := _outside(local, host)) is not None:
            return problem
        group = {process: claim for process, claim in local.items() if claim.divides}
        if len(group) == len(local) > 0 and len({claim.visible for claim in group.values()}) == 1:
            divided = _divide(group, host)
            if isinstance(divided, str):
                return divided
            shares |= divided
        elif (problem := _taken_twice(local, host)) is not None:
            return problem
    return shares


def _divide(group: Mapping[int, GpuClaim], host: str) -> dict[int, list[int] | None] | str:
    """The shares of processes that all see the same GPUs."""
    claims = list(group.values())
    gpus, count = len(claims[0].visible), claims[0].local_count or len(claims)
    known = {claim.local_index for claim in claims}
    # A launcher that left out a process keeps its place free. Without a launcher, the order of the processes counts.
    places = [claim.local_index for claim in claims] if None not in known and len(known) == len(claims) else None
    indices = range(len(claims)) if places is None else places
    if (problem := share_problem(max(count, len(claims)), gpus, host)) is not None:
        return problem
    share = gpus // max(count, len(claims))
    if share == gpus:
        return dict.fromkeys(group)
    pairs = zip(group, indices, strict=True)
    return {process: list(range(index * share, (index + 1) * share)) for process, index in pairs if index is not None}


def share_problem(processes: int, gpus: int, host: str) -> str | None:
    """Why processes cannot divide the GPUs of a machine equally; None if they can."""
    if gpus >= processes and gpus % processes == 0:
        return None
    fitting = [str(number) for number in range(1, gpus + 1) if gpus % number == 0]
    why = "but each process needs one" if gpus < processes else f"of which {gpus % processes} would be idle"
    what = f"{host} has {processes} processes and {gpus} visible GPU{'s' * (gpus != 1)}, {why}"
    return f"{what}: start {' or '.join(fitting)} there, or change the visible GPUs ({VISIBLE})"


def _outside(local: Mapping[int, GpuClaim], host: str) -> str | None:
    """A GPU that a process was told to use and does not see."""
    for process, claim in local.items():
        if claim.chosen is not None and max(claim.chosen) >= len(claim.visible):
            return (
                f"process {process} on {host} is to use GPU {max(claim.chosen)} ({CHOSEN}), but it sees "
                f"{len(claim.visible)}, counted from 0: start fewer processes or "
                "devices per process there, or show it more GPUs"
            )
    return None


def _taken_twice(local: Mapping[int, GpuClaim], host: str) -> str | None:
    """A GPU that two processes would use. Slurm's own GPUs, and those of a process alone, are not compared."""
    owners: dict[str, int] = {}
    for process, claim in local.items():
        if claim.bound or claim.local_count == 1:
            continue
        for gpu in claim.gpus:
            if gpu in owners:
                return (
                    f"processes {owners[gpu]} and {process} on {host} would both use GPU {gpu}: show the same GPUs to "
                    f"all processes there, or different ones to each ({VISIBLE}, {CHOSEN})"
                )
        owners |= dict.fromkeys(claim.gpus, process)
    return None


if __name__ == "__main__":
    # For launch/local.sh: the number of processes to start on this machine.
    print(len(visible_gpus(os.environ, installed_gpus())) or 1)


SET_BY_MEGAJAX = "MEGAJAX_NCCL"
"""Variable that names the variables of NCCL which MegaJAX has set, separated by commas."""


class NcclVariable(NamedTuple):
    """A variable of NCCL."""

    name: str
    value: str
    why: str


SEVERAL_GPUS = NcclVariable(
    "NCCL_LAUNCH_MODE",
    "GROUP",
    "launches the kernels of all GPUs of a process together; otherwise a call that waits for a GPU may block the rest",
)
ONE_GPU = NcclVariable(
    "NCCL_LAUNCH_ORDER_IMPLICIT",
    "1",
    "runs the collectives of different communicators in the order in which the process launches them",
)


def set_nccl_variables(gpus: int, *, processes: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variable for a process that drives so many GPUs, unless the user has set it. Before jax starts."""
    variable = SEVERAL_GPUS if gpus > 1 else ONE_GPU if gpus == 1 and processes > 1 else None
    if variable is not None and variable.name not in environment:
        environment[variable.name] = variable.value
        environment[SET_BY_MEGAJAX] = ",".join(
            [*filter(None, environment.get(SET_BY_MEGAJAX, "").split(",")), variable.name]
        )


def nccl_variables(environment: Mapping[str, str] = os.environ) -> str:
    """The variables of NCCL in force, with those that MegaJAX set marked; "" without any."""
    set_by_megajax = environment.get(SET_BY_MEGAJAX, "").split(",")
    return ", ".join(
        f"{name}={value} ({'MegaJAX' if name in set_by_megajax else 'environment'})"
        for name, value in sorted(environment.items())
        if name.startswith("NCCL_")
    )
