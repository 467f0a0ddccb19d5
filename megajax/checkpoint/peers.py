"""How the processes of a run agree on a checkpoint: words through JAX's coordination service, never array collectives.

A background thread must not start collectives on devices: their order against those of the training step would
differ between processes. The coordination service has no such order.
"""

import json
import re
import secrets
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # the key-value store of the coordination service has no public name
from jax.experimental import multihost_utils

PATIENCE_SECONDS = 1800
"""How long a process waits for the others: longer than writing a share of the largest checkpoint takes."""


class Peers:
    """All processes of the run; every method but `failure` and `fail` is called by all of them, in the same order."""

    def __init__(self, token: str | None = None):
        """token: a name that no other object in this run has; without one, process 0 draws it (a collective)."""
        state = distributed.global_state
        self.count = jax.process_count()
        # Not jax.process_index(): Orbax names the files of a process by its number in the coordination service.
        self.index = state.process_id if self.count > 1 else 0
        self._client: Any = state.client  # None with a single process; nothing uses it then
        self._turns = 0
        if token is None:
            drawn = np.frombuffer(secrets.token_bytes(4), np.uint8)
            token = bytes(multihost_utils.broadcast_one_to_all(drawn) if self.count > 1 else drawn).hex()
        self.token = token

    @property
    def first(self) -> bool:
        return self.index == 0

    def among(self, name: str) -> "Peers":
        """The same processes with a name space of their own, for a thread of its own."""
        return Peers(f"{self.token}/{name}")

    def _key(self, name: str) -> str:
        return f"megajax/checkpoint/{self.token}/{name}"

    def _get(self, key: str) -> str | None:
        try:
            return self._client.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def _signed(self, reason: str) -> str:
        """Says whose reason it is, unless it was passed on from another process."""
        return reason if re.match(r"process \d+: ", reason) else f"process {self.index}: {reason}"

    def fail(self, reason: str) -> None:
        """Lets the others know that this process failed, without waiting for them."""
        if self.count > 1 and self.failure() is None:
            self._client.key_value_set(self._key("failure"), self._signed(reason), allow_overwrite=True)

    def failure(self) -> str | None:
        """What a process said to `fail` in this name space, or None."""
        if self.count == 1:
            return None
        return self._get(self._key("failure"))

    def agree(self, reason: str | None = None) -> str | None:
        """Waits for all; the reason given by the process that has one (any of them, if several), else None."""
        if self.count == 1:
            return reason
        self._turns += 1
        turn = self._key(f"turn{self._turns}")
        if reason is not None:
            self._client.key_value_set(f"{turn}/reason", self._signed(reason), allow_overwrite=True)
        self._client.wait_at_barrier(f"{turn}/said", PATIENCE_SECONDS * 1000)
        return self._get(f"{turn}/reason")

    def share[T](self, value: T) -> T:
        """Process 0's value (anything JSON can say) on all processes."""
        if self.count == 1:
            return value
        self._turns += 1
        key = self._key(f"turn{self._turns}/value")
        if self.first:
            self._client.key_value_set(key, json.dumps(value))
            return value
        return json.loads(self._client.blocking_key_value_get(key, PATIENCE_SECONDS * 1000))
