"""Threads that stand for processes, joined by a coordination service in memory."""

import threading
from collections.abc import Callable
from typing import Any

import jax

from megajax.processes.peers import Peers

PATIENCE = 100.0


class Service:
    """The calls of jax's coordination service that `Peers` makes."""

    def __init__(self, count: int):
        self.count = count
        self._values: dict[str, str] = {}
        self._barriers: dict[str, set[int]] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self._changed:
            assert allow_overwrite or key not in self._values, f"{key} is set twice"
            self._values[key] = value
            self._changed.notify_all()

    def key_value_try_get(self, key: str) -> str:
        with self._changed:
            if key not in self._values:
                raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
            return self._values[key]

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, PATIENCE), f"nobody sets {key}"
            return self._values[key]

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        with self._changed:
            return [(key, value) for key, value in self._values.items() if key.startswith(folder)]

    def key_value_delete(self, folder: str) -> None:
        with self._changed:
            self._values = {key: value for key, value in self._values.items() if not key.startswith(folder)}

    def wait_at_barrier(self, name: str, milliseconds: int) -> None:
        with self._changed:
            arrived = self._barriers.setdefault(name, set())
            arrived.add(threading.get_ident())
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(arrived) == self.count, PATIENCE), f"not all come to {name}"


class ThreadPeers(Peers):
    """What one thread sees of the others."""

    def __init__(self, service: Service, index: int, token: str = "test"):
        self.count, self.index, self.process, self.token = service.count, index, index, token
        self.coordinator, self._client, self._rounds = None, service, 0

    def namespace(self, name: str) -> "ThreadPeers":
        return ThreadPeers(self._client, self.index, f"{self.token}/{name}")


def together(count: int, work: Callable[[ThreadPeers], Any]) -> list[Any]:
    """The results of `work` in each of `count` processes, or its errors. Fails if one waits for another for ever."""
    service, results = Service(count), [None] * count

    def process(index: int) -> None:
        try:
            results[index] = work(ThreadPeers(service, index))
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=process, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive(), "a process waits for another one for ever"
    for result in results:
        if isinstance(result, AssertionError):
            raise result
    return results
