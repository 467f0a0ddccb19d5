"""The adapters of an engine: which one is in which slot of the model's matrices. Plain Python."""

import os
from collections.abc import Callable, Collection
from typing import Any

from megajax.config.errors import UserError
from megajax.inference.request import LoadedAdapter, Refused

IDENTITY = 16
"""Bytes of `LoadedAdapter.identity`."""


class AdapterTable:
    """The adapters of an engine by name. `find` may be called from any thread, the others on the engine's."""

    def __init__(self, slots: int = 0, write: Callable[[int, Any], None] = lambda slot, values: None):
        """write: writes the values of an adapter into a slot, before the next step."""
        self.slots, self._write = slots, write
        self._adapters: dict[str, LoadedAdapter] = {}

    def names(self) -> list[str]:
        """Names of the loaded adapters."""
        return list(self._adapters)

    def find(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of a request; None if it names none. Raises Refused for an unknown name."""
        if name is None:
            return None
        adapter = self._adapters.get(name)
        if adapter is None:
            raise Refused("invalid", f"adapter {name!r} is not loaded: there are {self.names()}", "adapter")
        return adapter

    def load(self, name: str, values: Any, used: Collection[int]) -> None:
        """Write an adapter into a free slot. used: slots of unfinished rows. Raises UserError if there is none."""
        if name in self._adapters:
            raise UserError(f"an adapter {name!r} is loaded: drop it first, or choose another name")
        occupied = {adapter.slot for adapter in self._adapters.values()} | set(used)
        free = [slot for slot in range(self.slots) if slot not in occupied]
        if not free:
            loaded = len(self._adapters)
            waiting = len(occupied) - loaded
            state = f"{loaded} are loaded, {waiting} dropped ones are still in use by requests"
            raise UserError(f"no slot is free for adapter {name!r}: of {self.slots} (inference.adapters), {state}")
        self._write(free[0], values)
        self._adapters[name] = LoadedAdapter(name, free[0], os.urandom(IDENTITY))

    def drop(self, name: str) -> None:
        """Refuse further requests for an adapter. Its slot is free when no row uses it. Raises UserError."""
        if name not in self._adapters:
            raise UserError(f"adapter {name!r} is not loaded: there are {self.names()}")
        del self._adapters[name]
