"""Starts the processes of a run on a Ray cluster and waits for them, as srun does on a Slurm cluster.

`python -m megajax.launch --ray=ADDRESS --processes=N -- COMMAND` runs this module as its scheduler's command, so that
restarts follow the launcher's rules.
"""

import contextlib
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from megajax.command_line.parser import front_door
from megajax.launcher.gang import LINE_BYTES, Prepare, write_or_drop
from megajax.processes.ray_cluster import WAIT_SECONDS, connect_ray, passed_variables, waiting_text
from megajax.processes.world import COORDINATOR, COUNT, INDEX, LOCAL_COUNT, LOCAL_INDEX, TOKEN

READ_SECONDS = 1.0
"""How long a read of a process waits for output."""
LINES = 1000
"""Lines that one read returns at most."""
GRACE_SECONDS = 10.0
"""From SIGTERM to SIGKILL after a failure."""
LOST = 1
"""Exit code where a machine was lost with its process."""


class ProcessHost(NamedTuple):
    """Where a process runs."""

    node: str
    address: str
    """IP address of the machine."""
    gpus: tuple[str, ...]


class RemoteProcess:
    """A process on a machine of the cluster; an actor. It ends with its actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines = queue.SimpleQueue[bytes | None]()

    def place(self) -> ProcessHost:
        """Where this is."""
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        return ProcessHost(context.get_node_id(), ray.util.get_node_ip_address(), gpus)

    def free_port(self) -> int:
        """A free port of the machine."""
        with socket.create_server(("", 0)) as server:
            return server.getsockname()[1]

    def start(self, command: Sequence[str], environment: Mapping[str, str], folder: str) -> str:
        """Start the command in a folder -> why it can't be started; "" if it was."""
        # Ray's own settings are for its actors: one thread, for example.
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "OMP_NUM_THREADS"))
        }
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**inherited, **environment},
                cwd=folder if os.path.isdir(folder) else None,
                process_group=0,
                preexec_fn=Prepare(os.getpid()),
            )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        threading.Thread(target=self._read, daemon=True).start()
        return ""

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while line := self._process.stdout.readline(LINE_BYTES):
            self._lines.put(line)
        self._process.wait()
        self._lines.put(None)

    def read(self) -> tuple[list[bytes], int | None]:
        """New lines of output, after a while also none, and the exit code once all are read."""
        lines, timeout = [], READ_SECONDS
        with contextlib.suppress(queue.Empty):
            while len(lines) < LINES:
                line = self._lines.get(timeout=timeout)
                if line is None:
                    assert self._process is not None
                    return lines, self._process.returncode
                lines.append(line)
                timeout = 0.0
        return lines, None

    def signal(self, number: int) -> None:
        """Signal the process and its children."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


class RayProcesses:
    """The processes of one start. Raises UserError if the cluster can't run so many at once."""

    def __init__(self, ray: Any, count: int, devices: int | None):
        """devices: GPUs of each process, or CPU devices on a cluster without GPUs; None: one."""
        self._ray, self._devices = ray, devices or 1
        gpus = self._devices if ray.cluster_resources().get("GPU", 0) else 0
        resources = {"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}
        self._group = ray.util.placement_group([resources] * count, strategy="PACK")
        self._wait(resources, count)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        remote = ray.remote(num_cpus=1, num_gpus=gpus, max_concurrency=2)(RemoteProcess)
        actors = [remote.options(scheduling_strategy=strategy(self._group, number)).remote() for number in range(count)]
        places = ray.get([actor.place.remote() for actor in actors])
        # Neighbours in the order of processes are on one machine, in the order of its GPUs.
        order = sorted(range(count), key=lambda number: (places[number].node, places[number].gpus))
        self._actors, self.places = [actors[number] for number in order], [places[number] for number in order]

    def _wait(self, resources: Mapping[str, int], count: int) -> None:
        """Wait until the machines are there, with a message at times."""
        while not self._group.wait(WAIT_SECONDS):
            _say(waiting_text(self._ray, resources, count))

    def run(self, command: Sequence[str], signals: "queue.SimpleQueue[int]") -> int:
        """Run the command as every process, print its output, and forward signals -> exit code of the first failure."""
        ray, count = self._ray, len(self._actors)
        coordinator = f"{self.places[0].address}:{ray.get(self._actors[0].free_port.remote())}"
        _say(f"{count} processes on {len({place.node for place in self.places})} machines, coordinator {coordinator}")
        common = {COORDINATOR: coordinator, COUNT: str(count), TOKEN: secrets.token_hex(8), "PYTHONUNBUFFERED": "1"}
        common |= passed_variables()
        starts = [
            actor.start.remote(command, common | self._numbers(index), os.getcwd())
            for index, actor in enumerate(self._actors)
        ]
        for index, problem in enumerate(ray.get(starts)):
            if problem:
                _say(f"process {index} cannot be started: {problem}")
                return LOST
        return self._until_ended(signals)

    def _numbers(self, index: int) -> dict[str, str]:
        """The numbers of a process in its run and on its machine."""
        local = [other for other, place in enumerate(self.places) if place.node == self.places[index].node]
        numbers = {INDEX: str(index), LOCAL_INDEX: str(local.index(index)), LOCAL_COUNT: str(len(local))}
        # Each actor sees its own GPUs only.
        return numbers if self.places[index].gpus else {**numbers, "JAX_NUM_CPU_DEVICES": str(self._devices)}

    def _until_ended(self, signals: "queue.SimpleQueue[int]") -> int:
        code, kill = 0, float("inf")
        reads = {actor.read.remote(): index for index, actor in enumerate(self._actors)}
        while reads:
            answered, _ = self._ray.wait(list(reads), timeout=READ_SECONDS)
            for read in answered:
                index = reads.pop(read)
                ended = self._show(index, read)
                if ended is None:
                    reads[self._actors[index].read.remote()] = index
                elif ended and not code:
                    code = ended
                    _say(f"process {index} ended with {ended}; the others are stopped")
                    self._signal(reads.values(), signal.SIGTERM)
                    kill = time.monotonic() + GRACE_SECONDS
            while not signals.empty():
                self._signal(reads.values(), signals.get())
            if time.monotonic() > kill:
                self._signal(reads.values(), signal.SIGKILL)
                kill = float("inf")
        return code

    def _show(self, index: int, read: Any) -> int | None:
        """Print the output of a read -> exit code of the process; None while it runs."""
        try:
            lines, code = self._ray.get(read)
        except self._ray.exceptions.RayError:
            place = self.places[index]
            _say(f"process {index} was lost with its actor on {place.address} (node {place.node[:8]})")
            return LOST
        for line in lines:
            write_or_drop(sys.stdout.fileno(), b"[%d] %s\n" % (index, line.removesuffix(b"\n")))
        return code

    def _signal(self, indices: Iterable[int], number: int) -> None:
        for index in indices:
            self._actors[index].signal.remote(number)


def main(argv: list[str]) -> int:
    """argv: address, number of processes, devices of each or "auto", and the command -> exit code.

    Raises UserError without a cluster.
    """
    (address, count, devices), command = argv[:3], argv[3:]
    ray, signals = connect_ray(address), queue.SimpleQueue[int]()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: signals.put(number))
    try:
        return RayProcesses(ray, int(count), None if devices == "auto" else int(devices)).run(command, signals)
    finally:
        ray.shutdown()  # ends the actors, and each its process


def _say(text: str) -> None:
    write_or_drop(sys.stderr.fileno(), f"megajax.launch: {text}\n".encode())


if __name__ == "__main__":
    front_door(main)
