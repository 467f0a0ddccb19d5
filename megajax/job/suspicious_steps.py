"""Reports suspicious steps, and decides whether the run ends."""

from collections.abc import Callable
from math import inf, isclose, isfinite

from megajax.metrics.writer import Writer
from megajax.training.guarded.guard import Guard, NumericFault, UnrepeatedFault
from megajax.training.step_report import GuardLimits, StepInfo

KERNEL_TOLERANCE = 1e-3
"""Relative difference allowed between two runs of a step: sums on GPUs have no fixed order. As in Megatron-LM."""


class Watch:
    """Called with the numbers of every step, in order."""

    def __init__(self, guard: Guard, floor: float | None, log: Writer, say: Callable[[str], None]):
        """floor: see PrecisionConfig.floor; say: prints a line."""
        self._guard, self._floor, self._log, self._say = guard, floor, log, say
        self._skipped, self._warned = 0, set[str]()

    def __call__(self, info: StepInfo) -> None:
        """Report a suspicious step. Raises NumericFault if the run has to end."""
        self._skipped += info.skipped
        self.warn(info)
        cfg, first = self._guard.cfg, info.guarded.first_try
        limits = (first or info).guarded.limits
        why = self._guard.suspicion(limits, info.loss, info.grad_norm)
        if first is not None and why is None:
            fields = self._fault_fields(first, limits)
            self._log.event("transient_fault", step=info.step, **fields, again=_numbers(info))
            self._say(
                f"step {info.step}: {fields['why']}, but not when run again: a transient fault, training continues"
            )
            return
        if not isfinite(info.loss) or not isfinite(info.grad_norm):
            if self._floor is not None and info.loss_scale > self._floor:
                return  # the loss scale is coming down
            stop = cfg.stop_on_nonfinite and limits.loss != -inf
        elif why is not None:
            stop = cfg.spike_action == "stop"
        else:
            if info.skipped:
                reason = "skip_steps" if limits.loss == -inf else f"gradient norm above {cfg.largest_norm:g}"
                self._log.event("update_skipped", step=info.step, reason=reason, **_numbers(info))
            return
        fields: dict[str, bool | str] = {"made": not info.skipped}
        if first is not None:
            fields["same_again"] = _bit_equal(first, info)
        if info.guarded.nonfinite is not None:
            fields["blame"] = info.guarded.nonfinite
        self._log.event("persistent_fault", step=info.step, **self._fault_fields(info, limits), **fields)
        if stop:
            kind = NumericFault if first is None or _alike(first, info) else UnrepeatedFault
            raise kind(self._message(info, str(why)))
        self._say(f"{self._message(info, str(why))}; training goes on with{'out' * info.skipped} its update")

    def warn(self, info: StepInfo) -> None:
        """Print the warnings of layers, each once."""
        for name, measurement in info.measured.items():
            if measurement.measure.warning and measurement.is_shown and name not in self._warned:
                self._warned.add(name)
                why = measurement.measure.warning.format(value=measurement.overall)
                self._log.event("layer_warning", step=info.step, measure=name, value=measurement.overall, why=why)
                self._say(f"step {info.step}: {why}; {name} in metrics.jsonl counts later ones")

    def _fault_fields(self, info: StepInfo, limits: GuardLimits) -> dict[str, object]:
        return {"why": self._guard.suspicion(limits, info.loss, info.grad_norm), **_numbers(info)}

    def _message(self, info: StepInfo, why: str) -> str:
        text = f"step {info.step}: {why}; loss {info.loss}, gradient norm {info.grad_norm}"
        if self._floor and not isfinite(info.grad_norm):
            text += f" at the lowest loss scale, {self._floor:g}; {self._skipped} steps were skipped"
        if info.guarded.nonfinite is not None:
            text += f"; {info.guarded.nonfinite}"
        if (first := info.guarded.first_try) is None:
            return text
        if _bit_equal(first, info):
            return f"{text}; identical when the step was run again, so not a transient fault"
        return (
            f"{text}; the first run from the same state and rows gave other numbers (loss {first.loss}, "
            f"gradient norm {first.grad_norm}): suspect the hardware"
        )


def advice(fault: NumericFault) -> str:
    """Advice on a fault that has ended a run."""
    if isinstance(fault, UnrepeatedFault):
        return (
            "The same command resumes from the last checkpoint; a launcher restarts it automatically. If the fault "
            "returns, leave this machine out (python -m megajax.doctor tests it)"
        )
    return (
        "Lower the learning rate, check the data, or skip the step with resilience.skip_steps; "
        "resilience.stop_on_nonfinite=false continues without updates that are not finite"
    )


def _numbers(info: StepInfo) -> dict[str, float]:
    return {"loss": info.loss, "grad_norm": info.grad_norm}


def _bit_equal(a: StepInfo, b: StepInfo) -> bool:
    """Whether two runs of a step gave the same numbers bit for bit; all nans are equal."""
    return repr((a.loss, a.grad_norm)) == repr((b.loss, b.grad_norm))


def _alike(a: StepInfo, b: StepInfo) -> bool:
    """Whether two runs of a step failed in the same way: finite numbers agree within KERNEL_TOLERANCE."""
    pairs = ((a.loss, b.loss), (a.grad_norm, b.grad_norm))
    return all(repr(x) == repr(y) or isclose(x, y, rel_tol=KERNEL_TOLERANCE) for x, y in pairs)
