"""The processes that keep local checkpoints for each other: where each is, and whose replicas each keeps."""

import secrets
from collections.abc import Callable

from megajax.checkpoint.local.exchange import RemoteSet, SetServer, own_address
from megajax.checkpoint.local.sets import LocalSet
from megajax.checkpoint.peers import Peers
from megajax.config.errors import UserError


class Members:
    """All processes of the run. Called by all, in the same order, except `read_from`."""

    def __init__(self, peers: Peers, machine: str, offered: Callable[[str], LocalSet | None]):
        """machine: a name that processes with the same local folder have in common. offered: sets to serve."""
        self.process = peers.process
        self._secret = bytes.fromhex(peers.share(secrets.token_hex(32) if peers.first else ""))
        self._server: SetServer | None = None
        address: tuple[str, int] = ("", 0)
        if peers.count > 1:
            self._server = SetServer(own_address(peers.coordinator), self._secret, offered)
            address = self._server.address
        everyone = peers.gather((self.process, machine, address))
        self._machines: dict[int, str] = {process: machine for process, machine, _ in everyone}
        self._addresses: dict[int, tuple[str, int]] = {process: (host, port) for process, _, (host, port) in everyone}

    @property
    def count(self) -> int:
        return len(self._machines)

    def together(self) -> list[int]:
        """The processes that have this one's local folder, itself included."""
        return [process for process, machine in self._machines.items() if machine == self._machines[self.process]]

    def elsewhere(self) -> Callable[[int], bool]:
        """Whether sets of a process's number in this folder are looked after by another process than this one.

        A number from before a restart may have moved to another machine; the first process here takes its sets.
        """
        here = self.together()
        return lambda process: process != self.process and (process in here or self.process != min(here))

    def jump(self, asked: int | None) -> int:
        """Distance to the process whose shards are kept as well."""
        if asked is not None:
            return asked
        machines = list(self._machines.values())
        largest = max(machines.count(machine) for machine in set(machines))
        return largest if largest < self.count else 1

    def sources(self, replicas: int, asked: int | None) -> list[int]:
        """The processes whose shards this one keeps as well."""
        if self.count == 1:
            return []
        step = self.jump(asked)
        return [(self.process + number * step) % self.count for number in range(1, replicas + 1)]

    def demand_replicas(self, replicas: int, asked: int | None) -> None:
        """Raises UserError if replicas would be on the process that they are to survive, or twice on another."""
        sources = self.sources(replicas, asked)
        if self.process in sources or len(set(sources)) < len(sources):
            raise UserError(
                f"checkpoint.local.replicas={replicas} with a jump of {self.jump(asked)} puts a replica on its own "
                f"process, or two on one, of {self.count} processes: keep fewer, or set another checkpoint.local.jump."
            )

    def read_from(self, process: int, set_id: str) -> RemoteSet:
        """A set that another process has. Raises ConnectionError or Damaged."""
        return RemoteSet(self._addresses[process], self._secret, set_id)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
