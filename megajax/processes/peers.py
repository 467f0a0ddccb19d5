"""Decisions that all processes take together, through JAX's coordination service.

The service needs no devices, so it also works before the first computation and where devices fail. Background threads
must use it: the order of their collectives on devices relative to those of the training step would differ between
processes.
"""

import json
import re
import secrets
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from jax._src import distributed  # the key-value store of the coordination service has no public name
from jax.experimental import multihost_utils

from megajax.config.errors import UserError

TIMEOUT_SECONDS = 1800
"""How long a process waits for the others: longer than writing its part of the largest checkpoint takes."""


class PartFailed(Exception):
    """A part of common work failed in a process; the message is the reason, on one line."""


class Peers:
    """All processes of the run. All of them call the methods in the same order, except for `failure` and `fail`."""

    def __init__(self, token: str | None = None, *, single: bool = False):
        """token: a name that this process uses once, because a second object would read the answers of the first; None:
        process 0 draws one (a collective). single: as with a single process, for work of one process."""
        state = distributed.global_state
        self.count = 1 if single else jax.process_count()
        # Not jax.process_index(): Orbax names files by the process's index in the coordination service.
        self.index = state.process_id if self.count > 1 else 0
        self.process = jax.process_index()
        """jax.process_index(), the number in `device.process_index`."""
        self.coordinator: str | None = state.coordinator_address
        """HOST:PORT of the coordination service; None with a single process."""
        self._client: Any = state.client  # None, and unused, with a single process
        self._rounds = 0
        if token is None:
            random_bytes = np.frombuffer(secrets.token_bytes(4), np.uint8)
            token = bytes(multihost_utils.broadcast_one_to_all(random_bytes) if self.count > 1 else random_bytes).hex()
        self.token = token

    @property
    def first(self) -> bool:
        return self.index == 0

    def namespace(self, name: str) -> "Peers":
        """These processes with a separate namespace, for another thread."""
        return Peers(f"{self.token}/{name}")

    def _key(self, name: str) -> str:
        return f"megajax/peers/{self.token}/{name}"

    def _get(self, key: str) -> str | None:
        try:
            return self._client.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def _signed(self, reason: str) -> str:
        """The reason with the index of its process, unless it has one already."""
        return reason if re.match(r"process \d+: ", reason) else f"process {self.index}: {reason}"

    def fail(self, reason: str) -> None:
        """Reports a failure of this process to the others, without waiting for them."""
        if self.count > 1 and self.failure() is None:
            self._client.key_value_set(self._key("failure"), self._signed(reason), allow_overwrite=True)

    def failure(self) -> str | None:
        """The failure that a process reported in this namespace, or None."""
        return None if self.count == 1 else self._get(self._key("failure"))

    def agree(self, reason: str | None = None) -> str | None:
        """Waits for all processes. Returns the reason that any of them gave, or None."""
        if self.count == 1:
            return reason
        key = self._next_key()
        if reason is not None:
            self._client.key_value_set(f"{key}/reason", self._signed(reason), allow_overwrite=True)
        self._client.wait_at_barrier(f"{key}/said", TIMEOUT_SECONDS * 1000)
        return self._get(f"{key}/reason")

    def equal(self, value: str) -> bool:
        """Whether all processes have the value of process 0; the same answer on all of them."""
        return self.agree(None if self.broadcast(value) == value else "differs") is None

    def on_all[T](self, work: Callable[[], T], explain: Callable[[Exception], str]) -> T:
        """Calls `work` on all processes and waits for all. Raises PartFailed on all of them if it failed on any.

        explain: error -> its reason on one line, which `failure` returns to processes that are still in `work`.
        """
        try:
            result = work()
        except Exception as error:  # of any kind: the other processes wait
            reason = str(error) if isinstance(error, PartFailed) else explain(error)
            self.fail(reason)
            raise PartFailed(self.agree(reason)) from error
        if (failure := self.agree()) is not None:
            raise PartFailed(failure)
        return result

    def check(self, work: Callable[[], object]) -> None:
        """Raises UserError on all processes if `work` raises it, or OSError, on any."""
        reason = None
        try:
            work()
        except (UserError, OSError) as error:
            reason = str(error)
        if (reason := self.agree(reason)) is not None:
            raise UserError(reason)

    def broadcast[T](self, value: T) -> T:
        """Returns the value of process 0, JSON-serialisable, on all processes."""
        if self.count == 1:
            return value
        key = f"{self._next_key()}/value"
        if self.first:
            self._client.key_value_set(key, json.dumps(value))
            return value
        return json.loads(self._client.blocking_key_value_get(key, TIMEOUT_SECONDS * 1000))

    def of_first[T](self, find: Callable[[], T]) -> T:
        """What process 0 finds, JSON-serialisable, on all processes. Raises UserError on all as `check`."""
        values = list[T]()
        self.check(lambda: values.append(find()) if self.first else None)
        return self.broadcast(values[0] if values else cast("T", None))

    def gather[T](self, value: T) -> list[T]:
        """Returns the values of all processes, JSON-serialisable, by index."""
        if self.count == 1:
            return [value]
        before, key = self._key(f"round{self._rounds}"), self._next_key()
        self._client.key_value_set(f"{key}/values/{self.index}", json.dumps(value))
        self._client.wait_at_barrier(f"{key}/gathered", TIMEOUT_SECONDS * 1000)
        if self.first:  # the last round has been read by all
            self._client.key_value_delete(f"{before}/values/")
        values = {int(name.rpartition("/")[2]): text for name, text in self._client.key_value_dir_get(f"{key}/values/")}
        return [json.loads(values[index]) for index in range(self.count)]

    def _next_key(self) -> str:
        self._rounds += 1
        return self._key(f"round{self._rounds}")
