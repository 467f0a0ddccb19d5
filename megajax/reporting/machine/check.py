"""A check of this machine, and its finding."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal, NamedTuple

from megajax.reporting.machine.machine import Machine


class Finding(NamedTuple):
    """The state of something, and what to do about it if it is not fine."""

    status: Literal["ok", "warn", "fail"]
    """warn: not as it should be, but training may work. fail: no run will work correctly on this machine."""
    found: str
    advice: str = ""


ok = partial(Finding, "ok")
warn = partial(Finding, "warn")
fail = partial(Finding, "fail")

type Check = tuple[str, Callable[[Machine], Finding | None]]
"""A name, and a function that looks at the machine; None: the check does not apply to it."""


def run_checks(checks: Iterable[Check], machine: Machine) -> Iterator[tuple[str, Finding, float]]:
    """Name, finding and seconds of each check that applies, as they come. An exception becomes a warning."""
    for name, look in checks:
        start = time.monotonic()
        try:
            finding = look(machine)
        except Exception as error:
            finding = Finding("warn", f"could not be checked: {type(error).__name__}: {error}", "check by hand")
        if finding is not None:
            one_line = Finding(finding.status, " ".join(finding.found.split()), " ".join(finding.advice.split()))
            yield name, one_line, round(time.monotonic() - start, 3)
