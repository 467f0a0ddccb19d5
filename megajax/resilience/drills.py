"""Fault injection, to test how a run handles faults: see docs/faults.md."""

import re
from typing import NamedTuple

KINDS = ("nan", "inf", "spike", "nan_gradients")
"""nan, inf: loss and gradients are multiplied by it; spike: by 1000; nan_gradients: only the gradients, by NaN."""

_FORM = re.compile(r"(?P<kind>\w+):step=(?P<step>[0-9]+)(?P<always>:always)?")


class Drill(NamedTuple):
    """A fault: KIND:step=N for the first run of step N, KIND:step=N:always for every run."""

    kind: str
    step: int
    always: bool

    @classmethod
    def parse(cls, text: str) -> "Drill":
        """Raises ValueError with the expected form."""
        match = _FORM.fullmatch(text)
        if match is None or match["kind"] not in KINDS:
            raise ValueError(f"expected KIND:step=N or KIND:step=N:always with KIND one of {', '.join(KINDS)}")
        return cls(match["kind"], int(match["step"]), match["always"] is not None)

    def factors(self) -> tuple[float, float]:
        """Factors of the loss and of the gradients."""
        match self.kind:
            case "nan_gradients":
                return 1.0, float("nan")
            case "spike":
                return 1000.0, 1000.0
        return float(self.kind), float(self.kind)


def factors(drills: tuple[Drill, ...], step: int, *, again: bool) -> tuple[float, float]:
    """Factors of the loss and of the gradients of a step; again: the step is repeated."""
    for drill in drills:
        if drill.step == step and (drill.always or not again):
            return drill.factors()
    return 1.0, 1.0
