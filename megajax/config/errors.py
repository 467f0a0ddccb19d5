"""Errors that the user can correct; they end a command with exit code 2."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class UserError(Exception):
    """Bad config, data, checkpoint or request: never worth a retry.

    The message is for the person at the terminal: what is wrong, the two values, what to change.
    Front doors print it without a traceback and exit with its code.
    """

    code: int = 2
    """1 for errors that may not occur at another time or on another machine."""

    def _render_traceback_(self) -> list[str]:
        """What IPython and Jupyter show in place of a traceback."""
        return f"{type(self).__name__}: {self}".splitlines()


@dataclass(frozen=True, slots=True)
class Problem:
    """One error: the dotted setting, a message with both values, and the remedy as `hint`.

    A hint may have several lines.
    """

    setting: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.setting}: {self.message}" + "".join(f"\n    {line}" for line in self.hint.splitlines())


@dataclass(frozen=True, slots=True)
class TooFewDevices(Problem):
    """The layout needs more devices than there are."""

    wanted: int = 0
    """Devices that the layout needs."""


class ConfigError(UserError):
    """All errors of a config; `place` names their sources ("configs/gpt2.py + command line")."""

    def __init__(self, problems: Iterable[Problem], place: str = ""):
        self.problems, self.place = tuple(problems), place
        text = "\n".join(str(problem) for problem in self.problems)
        if place:
            count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
            text = f"{count} in {place}:\n" + "\n".join("  " + line for line in text.splitlines())
        super().__init__(text)


def demand_members(thing: Any, names: Iterable[str], whose: str, hint: str = "") -> None:
    """Raises UserError for an object of a user's that lacks attributes or methods. whose: what it is in the message."""
    if lacking := [name for name in names if not hasattr(thing, name)]:
        raise UserError(f"{whose} lacks {', '.join(lacking)}" + f"\n{hint}" * bool(hint))
