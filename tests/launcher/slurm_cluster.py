"""A Slurm of two nodes on one machine, in a container of its own made of namespaces.

munged, slurmctld and a slurmd for each node see their own processes, hosts file and network, which has nothing but the
loopback interface. They end with the process that started them, and so does everything that a job has started.
"""

import contextlib
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gangs import REPOSITORY, children
from waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare", "nsenter", "ip")
"""Programs of Debian's packages slurm-wlm, munge, util-linux and iproute2."""
SBIN = "/usr/sbin:/sbin"
SBATCH = REPOSITORY / "launch" / "slurm.sbatch"
CORES, GPUS = 64, 8
"""What Slurm believes a node to have."""

_NAMESPACES = ("--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--uts")

_START = """
set -eu
cd "$1"
mount --bind hosts /etc/hosts
hostname control
ip link set lo up
for last in 1 2 3; do ip address add 192.0.2.$last/32 dev lo; done
munged --foreground --force --socket="$1/munge/socket" --key-file="$1/munge/key" --pid-file="$1/munge/pid" \\
    --log-file="$1/log/munged" --seed-file="$1/munge/seed" &
while [ ! -S munge/socket ]; do sleep 0.1; done
slurmctld -c -D &
for node in n1 n2; do
    unshare --uts sh -c 'hostname "$1"; exec slurmd -D -N "$1"' sh $node &
done
echo $$ started
read -r _ || true
"""
"""Ends, and with it the container, when the test's process closes its standard input."""

_CONFIG = """
ClusterName=test
SlurmctldHost=control
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/log/%n
SlurmctldLogFile={folder}/log/slurmctld
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
MessageTimeout=60
GresTypes=gpu
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
NodeName=n[1-2] Port=[17001-17002] CPUs={cores} RealMemory=8000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A running Slurm. Its jobs run in `folder`, which all nodes share."""

    def __init__(self, folder: Path, pid: int, environment: dict[str, str]):
        self.folder, self._pid, self._environment = folder, pid, environment

    def call(self, *command: object) -> str:
        """What a command prints on the machine of slurmctld."""
        enter = ("nsenter", f"--target={self._pid}", "--mount", "--pid", "--net", "--ipc", "--uts")
        options = {"env": self._environment, "cwd": self.folder, "capture_output": True, "text": True, "timeout": 100}
        ended = subprocess.run((*enter, f"--wd={self.folder}", *map(str, command)), check=False, **options)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout.strip()

    def submit(self, *options: object) -> "Job":
        """sbatch; options: those of sbatch, the script and its arguments."""
        return Job(self, int(self.call("sbatch", "--parsable", *options)))

    def log(self) -> str:
        """The last lines of all daemons."""
        return "".join(f"== {path.name}\n{path.read_text()[-6000:]}" for path in (self.folder / "log").iterdir())


class Job:
    """A job, and what is in its output."""

    def __init__(self, cluster: Cluster, number: int):
        self.cluster, self.number = cluster, number

    @property
    def fields(self) -> dict[str, str]:
        """The fields that `scontrol show job` prints."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.cluster.call("scontrol", "show", "job", self.number)))

    @property
    def state(self) -> str:
        return self.fields["JobState"]

    @property
    def text(self) -> str:
        (output,) = self.cluster.folder.glob(f"*-{self.number}.out")
        return output.read_text(errors="replace")

    def update(self, **fields: object) -> None:
        """Change fields of `scontrol update job`."""
        self.cluster.call("scontrol", "update", f"JobId={self.number}", *(f"{k}={v}" for k, v in fields.items()))

    def until(self, condition: Callable[[], object], seconds: float = 300) -> None:
        """Wait for something that the job brings about."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{self.fields}\n{self.output_or_log()}"
            time.sleep(0.3)

    def ended(self, seconds: float = 300) -> dict[str, str]:
        """Its fields once it is over."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.until(lambda: self.state in over, seconds)
        return self.fields

    def output_or_log(self) -> str:
        return self.text if any(self.cluster.folder.glob(f"*-{self.number}.out")) else self.cluster.log()

    def processes(self) -> dict[int, int]:
        """Rank -> the process of training, for those there are."""
        found = dict[int, int]()
        for pid, words, variables in _processes():
            if words[1:3] == [b"-m", b"megajax.train"] and f"SLURM_JOB_ID={self.number}".encode() in variables:
                (rank,) = (value[13:] for value in variables if value.startswith(b"SLURM_PROCID="))
                found.setdefault(int(rank), pid)
        return found


def missing() -> str | None:
    """Why there is no Slurm here; None if there is one."""
    path = f"{os.environ['PATH']}:{SBIN}"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge iproute2"
    ended = subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return None if ended.returncode == 0 else f"no namespaces, which need root: {ended.stderr.strip()}"


@contextmanager
def cluster(folder: Path, **environment: str) -> Iterator[Cluster]:
    """A Slurm whose files are in the folder. environment: of all its jobs. Nothing of it outlives the block."""
    for name in ("state", "spool-n1", "spool-n2", "log", "munge", "gpus"):
        (folder / name).mkdir()
    (folder / "munge/key").write_bytes(os.urandom(128))
    (folder / "munge/key").chmod(0o600)
    (folder / "hosts").write_text("127.0.0.1 localhost\n192.0.2.1 n1\n192.0.2.2 n2\n192.0.2.3 control\n")
    for number in range(GPUS):
        os.mknod(folder / f"gpus/gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # as /dev/null
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpus/gpu[0-{GPUS - 1}]\n")
    (folder / "slurm.conf").write_text(_CONFIG.format(folder=folder, cores=CORES, gpus=GPUS))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "JAX_"))}
    clean |= {"SLURM_CONF": str(folder / "slurm.conf")} | environment
    clean["PATH"] += f":{SBIN}"
    with (folder / "log/start").open("w") as log:
        container = subprocess.Popen(
            ("unshare", *_NAMESPACES, "--mount-proc", "bash", "-c", _START, "bash", str(folder)),
            env=clean, stdin=subprocess.PIPE, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        assert wait_until(lambda: children(container.pid), 30)
        made = Cluster(folder, children(container.pid)[0], clean)
        nodes = ("sinfo", "--noheader", "--Node", "--format=%N %t")
        assert wait_until(lambda: _answers(made) and made.call(*nodes) == "n1 idle\nn2 idle"), made.log()
        yield made
    finally:
        container.kill()
        container.wait()
        assert wait_until(lambda: not _left(folder)), "processes of the container are left"


def _answers(made: Cluster) -> bool:
    """Whether the namespaces are complete, and slurmctld listens in them."""
    try:
        made.call("scontrol", "ping")
    except AssertionError:
        return False
    return "started" in (made.folder / "log/start").read_text()


def _left(folder: Path) -> list[int]:
    """Processes that belong to the Slurm of a folder."""
    return [pid for pid, _, variables in _processes() if f"SLURM_CONF={folder}/slurm.conf".encode() in variables]


def _processes() -> Iterator[tuple[int, list[bytes], list[bytes]]]:
    """(number, words of its command, variables) of the processes of this machine, in order."""
    for number in sorted(int(path.name) for path in Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):
            texts = (Path(f"/proc/{number}/{name}").read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            yield (number, *texts)
