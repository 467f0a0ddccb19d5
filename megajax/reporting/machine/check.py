"""A check: something to look at, and what to make of it."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megajax.reporting.machine.machine import Machine

type Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, and what to do about it where something is not as it should be."""

    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    probe: Callable[[Machine], Any]
    """Looks. What it raises becomes a warning: nothing is known then."""
    judge: Callable[[Any], Finding | None]
    """Makes something of what the probe saw, and looks at nothing itself; None: does not apply to this machine."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finding under the name of its check."""

    name: str
    status: Status
    found: str
    advice: str
    seconds: float
    """How long it took."""


def ok(found: str) -> Finding:
    """As it should be."""
    return Finding("ok", found)


def warn(found: str, advice: str) -> Finding:
    """Not as it should be, and no reason not to train."""
    return Finding("warn", found, advice)


def fail(found: str, advice: str) -> Finding:
    """No run will do what it should on this machine."""
    return Finding("fail", found, advice)


def run_checks(checks: Iterable[Check], machine: Machine) -> Iterator[Result]:
    """The results as they come; checks that don't apply give none."""
    for check in checks:
        begun = time.monotonic()
        try:
            finding = check.judge(check.probe(machine))
        except Exception as error:
            finding = warn(f"could not be looked at: {type(error).__name__}: {error}", "look by hand")
        if finding is not None:
            seconds = round(time.monotonic() - begun, 3)
            found, advice = (" ".join(text.split()) for text in (finding.found, finding.advice))  # a line is a line
            yield Result(check.name, finding.status, found, advice, seconds)


def exit_code(results: Iterable[Result]) -> int:
    """1 if anything failed, else 0."""
    return int(any(result.status == "fail" for result in results))
