"""Faults made on purpose, so that what a run does about real ones can be watched: see docs/faults.md."""

import re
from typing import NamedTuple

KINDS = ("nan", "inf", "spike", "nan_gradients")
"""nan, inf: loss and gradients are multiplied by it; spike: by 1000; nan_gradients: the gradients alone."""

_FORM = re.compile(r"(?P<kind>\w+):step=(?P<step>[0-9]+)(?P<always>:always)?")


class Drill(NamedTuple):
    """One fault: KIND:step=N for the first time step N is run, KIND:step=N:always for every time."""

    kind: str
    step: int
    always: bool

    @classmethod
    def parse(cls, text: str) -> "Drill":
        """Raises ValueError that says what is expected."""
        match = _FORM.fullmatch(text)
        if match is None or match["kind"] not in KINDS:
            raise ValueError(f"expected KIND:step=N or KIND:step=N:always with KIND one of {', '.join(KINDS)}")
        return cls(match["kind"], int(match["step"]), match["always"] is not None)

    def factors(self) -> tuple[float, float]:
        """What the loss and the gradients of the step are multiplied by."""
        match self.kind:
            case "nan_gradients":
                return 1.0, float("nan")
            case "spike":
                return 1000.0, 1000.0
        return float(self.kind), float(self.kind)


def factors(drills: tuple[Drill, ...], step: int, *, again: bool) -> tuple[float, float]:
    """What the loss and the gradients of a step are multiplied by; again: the step is run a second time."""
    for drill in drills:
        if drill.step == step and (drill.always or not again):
            return drill.factors()
    return 1.0, 1.0
