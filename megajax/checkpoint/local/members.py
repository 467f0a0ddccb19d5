"""The processes that keep local checkpoints: their machines and addresses, and whose replicas each process keeps."""

import secrets
from collections.abc import Callable

from megajax.checkpoint.local.exchange import RemoteSet, SetServer, own_address
from megajax.checkpoint.local.sets import LocalSet
from megajax.config.errors import UserError
from megajax.mesh.processes.peers import Peers


class Members:
    """All processes of the run. Called by all, in the same order, except `read_from`."""

    def __init__(self, peers: Peers, machine: str, offered: Callable[[str], LocalSet | None]):
        """machine: the same name on all processes with the same local folder. offered: id of a set -> set to serve."""
        self.process = peers.process
        self._secret = bytes.fromhex(peers.broadcast(secrets.token_hex(32) if peers.first else ""))
        self._server: SetServer | None = None
        address: tuple[str, int] = ("", 0)
        if peers.count > 1:
            bind, host = own_address(peers.coordinator)
            self._server = SetServer(bind, self._secret, offered)
            address = host, self._server.address[1]
        everyone = peers.gather((self.process, machine, address))
        self._machines: dict[int, str] = {process: machine for process, machine, _ in everyone}
        self._addresses: dict[int, tuple[str, int]] = {process: (host, port) for process, _, (host, port) in everyone}

    @property
    def count(self) -> int:
        return len(self._machines)

    def on_this_machine(self) -> list[int]:
        """The processes that share this one's local folder, itself included."""
        return [process for process, machine in self._machines.items() if machine == self._machines[self.process]]

    def has_other_owner(self) -> Callable[[int], bool]:
        """Process number in a folder's name -> whether another process than this one owns the sets in it.

        After a restart, a process number may be on another machine; the first process on this one owns its sets.
        """
        neighbors = self.on_this_machine()
        return lambda process: process != self.process and (process in neighbors or self.process != min(neighbors))

    def distance(self, jump: int | None) -> int:
        """Distance to the process whose shards this one keeps; None: the processes of the largest machine."""
        if jump is not None:
            return jump
        machines = list(self._machines.values())
        largest = max(machines.count(machine) for machine in set(machines))
        return largest if largest < self.count else 1

    def sources(self, replicas: int, jump: int | None) -> list[int]:
        """The other processes whose shards this one keeps."""
        if self.count == 1:
            return []
        distance = self.distance(jump)
        return [(self.process + number * distance) % self.count for number in range(1, replicas + 1)]

    def demand_replicas(self, replicas: int, jump: int | None) -> None:
        """Raises UserError if a process would keep its own replica, or a replica twice."""
        sources = self.sources(replicas, jump)
        if self.process in sources or len(set(sources)) < len(sources):
            raise UserError(
                f"checkpoint.local.replicas={replicas} with a jump of {self.distance(jump)} puts a replica on its own "
                f"process, or two on one, of {self.count} processes: keep fewer, or set another checkpoint.local.jump."
            )

    def read_from(self, process: int, set_id: str) -> RemoteSet:
        """A set that another process has. Raises ConnectionError or Damaged."""
        return RemoteSet(self._addresses[process], self._secret, set_id)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
