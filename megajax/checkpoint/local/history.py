"""Which local checkpoints belong to a run: a small file in its shared checkpoints folder."""

import json
import secrets
from pathlib import Path
from typing import NamedTuple

from megajax.checkpoint.disk import write_durably

FILE = "local.json"
KEPT = 1000
"""Attempts that are remembered: far more than have local checkpoints left."""


class RunHistory(NamedTuple):
    """The name of a run's local folders, and the attempts at it with the steps they began from."""

    run: str
    attempts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def read(cls, shared: Path) -> "RunHistory":
        """That of a checkpoints folder; a new one if it has none, or none that can be read."""
        try:
            document = json.loads((shared / FILE).read_text(encoding="utf-8"))
            return cls(str(document["run"]), tuple((str(name), int(first)) for name, first in document["attempts"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls(secrets.token_hex(8))

    def write(self, shared: Path) -> None:
        """Replaces the file."""
        write_durably(shared / FILE, json.dumps({"run": self.run, "attempts": self.attempts[-KEPT:]}))

    def begin(self, attempt: str, first: int) -> "RunHistory":
        """With another attempt, which begins from step `first`."""
        return self._replace(attempts=(*self.attempts, (attempt, first)))

    @classmethod
    def note_without_local(cls, shared: Path, first: int) -> None:
        """An attempt without local checkpoints begins from step `first`: those of earlier attempts end there too."""
        if (shared / FILE).exists():
            cls.read(shared).begin(secrets.token_hex(8), first).write(shared)

    def includes(self, attempt: str, step: int) -> bool:
        """Whether what an attempt saved at `step` is part of the run: no later attempt began from before it."""
        names = [name for name, _ in self.attempts]
        if attempt not in names:
            return False
        return all(first >= step for _, first in self.attempts[names.index(attempt) + 1 :])
