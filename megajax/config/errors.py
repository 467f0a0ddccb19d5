"""Errors that the user can correct; they end a command with exit code 2."""

from collections.abc import Iterable
from dataclasses import dataclass

NO_SETTING = "no such setting"
"""The message of a problem with an unknown name."""


class UserError(Exception):
    """Bad config, data, checkpoint or request: a retry does not help.

    The message is for the user: the error, the two values, and what to change. Front doors print it without a traceback
    and exit with its code.

    Example: `mj.UserError("data/corpus.bin is empty")`
    """

    code: int = 2
    """Exit code; 1 for errors that may not occur at another time or on another machine."""

    def _render_traceback_(self) -> list[str]:
        """The text that IPython and Jupyter show instead of a traceback."""
        return f"{type(self).__name__}: {self}".splitlines()


@dataclass(frozen=True, slots=True)
class Problem:
    """One error: the dotted setting, a message with both values, and the remedy as `hint`, possibly several lines.

    Example: `mj.Problem("heads", "must be above 0, got 0", "use 8")`
    """

    setting: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.setting}: {self.message}" + "".join(f"\n    {line}" for line in self.hint.splitlines())


@dataclass(frozen=True, slots=True)
class TooFewDevices(Problem):
    """The layout needs more devices than are present."""

    wanted: int = 0
    """Devices that the layout needs."""


class ConfigError(UserError):
    """All errors of a config; `place` names their sources ("configs/gpt2.py + command line").

    Example: `mj.ConfigError([mj.Problem("steps", "must be above 0, got 0")])`
    """

    def __init__(self, problems: Iterable[Problem], place: str = ""):
        self.problems, self.place = tuple(problems), place
        text = "\n".join(str(problem) for problem in self.problems)
        if place:
            count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
            text = f"{count} in {place}:\n" + "\n".join("  " + line for line in text.splitlines())
        super().__init__(text)

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Problem, ...], str]]:
        return type(self), (self.problems, self.place)  # raised in one process, caught in another


def first_line(error: BaseException) -> str:
    """An error in one line, with its class unless it is a message for the user. Of several problems, the first."""
    if isinstance(error, ConfigError) and error.problems:
        more = len(error.problems) - 1
        return str(error.problems[0]).splitlines()[0] + f" (and {more} more)" * bool(more)
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return text if isinstance(error, UserError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")


def demand_members(value: object, names: Iterable[str], owner: str, hint: str = "") -> None:
    """Raises UserError if a user's object lacks attributes or methods. owner: its name in the message."""
    if missing := [name for name in names if not hasattr(value, name)]:
        raise UserError(f"{owner} lacks {', '.join(missing)}" + f"\n{hint}" * bool(hint))
