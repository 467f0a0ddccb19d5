"""Which local checkpoints belong to a run: a small file in its shared checkpoints folder."""

import json
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from megajax.checkpoint.reader import say
from megajax.config.budget import read_json
from megajax.config.errors import UserError
from megajax.storage.disk import write_durably

FILE = "local.json"
NAME = re.compile(r"[0-9a-f]{16}")
"""The name of a run's local folders. The file may come from elsewhere: a name must not lead out of a folder."""
MAX_ATTEMPTS = 1000
"""Attempts in the file: far more than the ones that still have local checkpoints."""


class RunHistory(NamedTuple):
    """The name of a run's local folders, and its attempts with the steps they began from."""

    run: str
    attempts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def read(cls, shared: Path) -> "RunHistory":
        """The history in a checkpoints folder; a new one if there is none.

        Raises UserError if it can't be read or is not valid. A new one in its place would hide the newest checkpoints
        of the run and delete them.
        """
        try:
            document = read_json(shared / FILE)
            run, attempts = document["run"], tuple((str(name), int(first)) for name, first in document["attempts"])
            if not isinstance(run, str) or not NAME.fullmatch(run):
                raise ValueError(f"run is {run!r:.80}, not 16 hexadecimal digits")
        except FileNotFoundError:
            return cls(secrets.token_hex(8))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise UserError(
                f"{shared / FILE} can't be used ({reason}). It names the local checkpoints of this run, and none was "
                "touched.\nPut the file right; or move it away, and the run starts from its shared checkpoints and "
                "deletes the local ones."
            ) from error
        return cls(run, attempts)

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
        if not (shared / FILE).exists():
            return
        try:
            cls.read(shared).begin(secrets.token_hex(8), first).write(shared)
        except UserError as error:  # no start with local checkpoints uses the file before it is put right
            say(f"warning: {error}")

    def includes(self, attempt: str, step: int) -> bool:
        """Whether the step that an attempt saved is part of the run: no later attempt began before that step."""
        names = [name for name, _ in self.attempts]
        if attempt not in names:
            return False
        return all(first >= step for _, first in self.attempts[names.index(attempt) + 1 :])
