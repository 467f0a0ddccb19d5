"""A Ray cluster, for those who outgrow one machine and have no Slurm or Kubernetes, and a pool of processes on it.

Its machines share the file system.
"""

import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import megajax
from megajax.config.errors import UserError, first_line
from megajax.config.optional_packages import require
from megajax.processes.world import split_address

CONNECT_SECONDS = 10.0
"""Limit of the first connection to an address."""
WAIT_SECONDS = 10.0
"""Interval of messages while machines or GPUs are missing."""
PASSED = ("MEGAJAX_", "JAX_", "XLA_", "NCCL_", "HF_", "AWS_", "GOOGLE_", "PYTHON")
"""Beginnings of the names of variables that processes get from the environment of the command."""


def connect_ray(address: str) -> Any:
    """Connect to the cluster at an address, or with `auto` to that of this machine -> the module ray.

    Its workers import MegaJAX from the folder that this process has it in, or else from their own environment.
    Raises UserError.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = require("ray", "--ray", otherwise="remove --ray")
    path = os.pathsep.join(filter(None, [str(Path(megajax.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    try:
        if (place := split_address(address)) is not None:
            socket.create_connection(place, timeout=CONNECT_SECONDS).close()  # Ray tries for minutes
        ray.init(
            address=address,
            logging_level=logging.ERROR,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": path}},
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--ray={address}: no connection ({reason}). Start a cluster (ray start --head, and ray start "
            "--address=HOST:PORT on other machines), or give the address of its head"
        ) from error
    return ray


def passed_variables() -> dict[str, str]:
    """Environment variables for processes of the cluster. Ray shows those of a runtime environment, so they go with
    calls: some are credentials."""
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED)}


def waiting_text(ray: Any, resources: Mapping[str, int], count: int) -> str:
    """What processes wait for that the cluster has no room for. resources: of each."""
    have = {name: ray.available_resources().get(name, 0) for name in resources}
    need, free = (", ".join(f"{number:g} {name}" for name, number in part.items()) for part in (resources, have))
    return f"waiting for the cluster: {count} processes need {need} each; {free} are free"


RETRIES = 3
"""How often a call is repeated whose machine or process was lost."""
LAST_SECONDS = 10.0
"""How long the threads of a pool have to end."""


class LostTooOften(UserError):
    """The machine or process of one call was lost again and again."""

    code = 1


class RayWorker:
    """A process of the cluster; an actor."""

    def ready(self) -> None:
        """Returns once the process runs."""

    def call(
        self, variables: Mapping[str, str], folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        """Call a function of a module, with these environment variables, where relative paths begin in this folder."""
        os.environ.update(variables)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            os.chdir(folder)
        except OSError as error:
            raise UserError(f"{folder}: {error.strerror} on a machine of the cluster: they must share files") from error
        return function(*arguments)


class _RemoteCall(NamedTuple):
    future: Future[Any]
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    losses: int = 0


class RayPool:
    """Processes of a Ray cluster; each keeps what its calls have cached, such as a model.

    A call whose process was lost is the next one of another process; a new process takes the place of the lost one as
    soon as the cluster has room for it.
    """

    def __init__(self, address: str, workers: int | None, gpus: int = 0):
        """workers: processes; None: as many as the cluster has GPUs for, and without GPUs one for each machine.

        gpus: of each process, on a cluster with GPUs.
        """
        self._address, self._limit, self._gpus = address, workers, gpus
        self._calls = queue.PriorityQueue[tuple[int, _RemoteCall | None]]()
        self._count, self._running, self._closed = 0, 0, False
        self._processes: list[Any] = []

    def __enter__(self) -> Self:
        """Raises UserError without a cluster, and for a cluster with GPUs that are too few for one process."""
        self._ray = connect_ray(self._address)
        gpus = int(self._ray.cluster_resources().get("GPU", 0))
        self._resources = {"CPU": 1, "GPU": self._gpus} if gpus and self._gpus else {"CPU": 1}
        machines = sum(node["Alive"] for node in self._ray.nodes())
        self.workers = self._limit or (gpus // self._gpus if "GPU" in self._resources else machines)
        if not self.workers:
            self._ray.shutdown()
            raise UserError(f"--replica-gpus: must be at most {gpus}, the GPUs of the cluster, got {self._gpus}")
        self._class = self._ray.remote(num_cpus=1, num_gpus=self._resources.get("GPU", 0))(RayWorker)
        self._threads = [threading.Thread(target=self._serve, args=(n,), daemon=True) for n in range(self.workers)]
        for thread in self._threads:
            thread.start()
        return self

    def submit(self, function: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Call a function of a module. Its future has the error that it raises, or LostTooOften."""
        future = Future[Any]()
        self._calls.put((self._count, _RemoteCall(future, function, arguments)))
        self._count += 1
        return future

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End all processes, with the calls that are no longer needed."""
        self._closed = True
        for number in range(self.workers):
            self._calls.put((-1 - number, None))
        for worker in tuple(self._processes):
            self._ray.kill(worker)
        for thread in self._threads:
            thread.join(LAST_SECONDS)
        self._ray.shutdown()

    def _serve(self, number: int) -> None:
        """Let one process after another answer calls, each until it is lost."""
        while not self._closed:
            worker = self._class.remote()
            self._processes.append(worker)
            with suppress(self._ray.exceptions.RayError):
                self._await(worker, number)
                while not self._closed:
                    self._answer(worker, *self._calls.get())
            if not self._closed:
                self._processes.remove(worker)
                self._ray.kill(worker)  # one that is only out of reach would keep the room of the next one

    def _await(self, worker: Any, number: int) -> None:
        """Wait until a process runs, with a message at times if none does."""
        ready = worker.ready.remote()
        while not self._closed and not self._ray.wait([ready], timeout=WAIT_SECONDS)[0]:
            if number == 0 and not self._running:
                _say(waiting_text(self._ray, self._resources, self.workers))
        if not self._closed:
            try:
                self._ray.get(ready)
            except self._ray.exceptions.RayError as error:
                _say(f"a process could not be started, another one will be ({first_line(error)})")
                raise
            self._running += 1

    def _answer(self, worker: Any, number: int, call: _RemoteCall | None) -> None:
        """Raises RayError if the process was lost. call: None at the end of the pool."""
        if call is None:
            return
        try:
            answer = worker.call.remote(passed_variables(), os.getcwd(), call.function, call.arguments)
            call.future.set_result(self._ray.get(answer))
        except self._ray.exceptions.RayTaskError as error:
            call.future.set_exception(error.cause)
        except self._ray.exceptions.RayError as error:  # its machine or process is gone, or killed for its memory
            self._running -= 1
            if self._closed:
                pass
            elif call.losses == RETRIES:
                text = f"--ray={self._address}: part {number} of the work lost its process {RETRIES + 1} times"
                call.future.set_exception(LostTooOften(f"{text}: see the logs of Ray; is the memory sufficient?"))
            else:
                _say(f"a process was lost with part {number} of the work, which runs again ({first_line(error)})")
                self._calls.put((number, call._replace(losses=call.losses + 1)))
            raise
        except Exception as error:  # of sending the call or its result
            call.future.set_exception(error)


def _say(text: str) -> None:
    print(f"--ray: {text}", file=sys.stderr, flush=True)
