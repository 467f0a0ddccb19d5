"""Which local checkpoints belong to a run: a small file in its shared checkpoints folder."""

import json
import secrets
from pathlib import Path
from typing import NamedTuple

from megajax.checkpoint.disk import write_durably

FILE = "local.json"
MAX_ATTEMPTS = 1000
"""Attempts in the file: far more than the ones that still have local checkpoints."""


class RunHistory(NamedTuple):
    """The name of a run's local folders, and its attempts with the steps they began from."""

    run: str
    attempts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def read(cls, shared: Path) -> "RunHistory":
        """The history in a checkpoints folder; a new one if there is none, or if it can't be read."""
        try:
            document = json.loads((shared / FILE).read_text(encoding="utf-8"))
            return cls(str(document["run"]), tuple((str(name), int(first)) for name, first in document["attempts"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls(secrets.token_hex(8))

    def write(self, shared: Path) -> None:
        """Replaces the file."""
        write_durably(shared / FILE, json.dumps({"run": self.run, "attempts": self.attempts[-MAX_ATTEMPTS:]}))

    def begin(self, attempt: str, first: int) -> "RunHistory":
        """Returns the history with another attempt, which begins from step `first`."""
        return self._replace(attempts=(*self.attempts, (attempt, first)))

    @classmethod
    def note_without_local(cls, shared: Path, first: int) -> None:
        """Records an attempt without local checkpoints that begins from step `first`.

        Later local checkpoints of earlier attempts are no longer part of the run.
        """
        if (shared / FILE).exists():
            cls.read(shared).begin(secrets.token_hex(8), first).write(shared)

    def includes(self, attempt: str, step: int) -> bool:
        """Whether the step that an attempt saved is part of the run: no later attempt began before that step."""
        names = [name for name, _ in self.attempts]
        if attempt not in names:
            return False
        return all(first >= step for _, first in self.attempts[names.index(attempt) + 1 :])
