"""What a job makes of suspicious steps: what is told, and when the run ends."""

from collections.abc import Callable
from math import inf, isclose, isfinite

from megajax.metrics.writers import Writer
from megajax.training.guard import Guard
from megajax.training.guarded import GuardLimits
from megajax.training.loop import NumericFault, StepInfo, UnrepeatedFault

KERNEL_TOLERANCE = 1e-3
"""Two runs of the same step may differ by so much: sums on GPUs are not in a fixed order. Megatron-LM's figure."""


class Watch:
    """Takes every step's numbers in turn."""

    def __init__(self, guard: Guard, floor: float | None, log: Writer, say: Callable[[str], None]):
        """floor: see PrecisionConfig.floor; say: shows a line to people."""
        self._guard, self._floor, self._log, self._say = guard, floor, log, say
        self._skipped, self._warned = 0, set[str]()

    def __call__(self, info: StepInfo) -> None:
        """Note what is out of the ordinary. Raises NumericFault where the run has to end."""
        self._skipped += info.skipped
        self.warn_of(info)
        cfg, first = self._guard.cfg, info.first_try
        limits = (info if first is None else first).limits or GuardLimits()
        why = self._guard.suspicion(limits, info.loss, info.grad_norm)
        if first is not None and why is None:
            told = self._told(first, limits)
            self._log.event("transient_fault", step=info.step, **told, again=_numbers(info))
            self._say(f"step {info.step}: {told['why']}; run again it is not: a passing fault, training goes on")
            return
        if not isfinite(info.loss) or not isfinite(info.grad_norm):
            if self._floor is not None and info.loss_scale > self._floor:
                return  # the loss scale is coming down
            ends = cfg.stop_on_nonfinite and limits.loss != -inf
        elif why is not None:
            ends = cfg.spike_action == "stop"
        else:
            if info.skipped:
                reason = "skip_steps" if limits.loss == -inf else f"gradient norm above {cfg.largest_norm:g}"
                self._log.event("update_skipped", step=info.step, reason=reason, **_numbers(info))
            return
        fields: dict[str, bool | str] = {"made": not info.skipped}
        if first is not None:
            fields["same_again"] = _same(first, info)
        if info.nonfinite is not None:
            fields["blame"] = info.nonfinite
        self._log.event("persistent_fault", step=info.step, **self._told(info, limits), **fields)
        if ends:
            kind = NumericFault if first is None or _alike(first, info) else UnrepeatedFault
            raise kind(self._message(info, str(why)))
        self._say(f"{self._message(info, str(why))}; training goes on with{'out' * info.skipped} its update")

    def warn_of(self, info: StepInfo) -> None:
        """What layers report and should not, once each."""
        for name, one in info.measured.items():
            if one.measure.warning and one.told and name not in self._warned:
                self._warned.add(name)
                why = one.measure.warning.format(value=one.whole)
                self._log.event("layer_warning", step=info.step, measure=name, value=one.whole, why=why)
                self._say(f"step {info.step}: {why}; {name} in metrics.jsonl counts further ones")

    def _told(self, info: StepInfo, limits: GuardLimits) -> dict[str, object]:
        return {"why": self._guard.suspicion(limits, info.loss, info.grad_norm), **_numbers(info)}

    def _message(self, info: StepInfo, why: str) -> str:
        where = f"step {info.step}: {why}; loss {info.loss}, gradient norm {info.grad_norm}"
        if self._floor and not isfinite(info.grad_norm):
            where += f" at the lowest loss scale, {self._floor:g}; {self._skipped} steps were skipped"
        if info.nonfinite is not None:
            where += f"; {info.nonfinite}"
        if info.first_try is None:
            return where
        if _same(info.first_try, info):
            return f"{where}; the same to the last bit when the step was run again, so no passing fault"
        return (
            f"{where}; with other numbers when it was first run (loss {info.first_try.loss}, gradient norm "
            f"{info.first_try.grad_norm}), from the same state and rows: suspect the hardware"
        )


def advice(fault: NumericFault) -> str:
    """What to do about a fault that has ended a run."""
    if isinstance(fault, UnrepeatedFault):
        return (
            "The same command goes on from the last checkpoint; a launcher restarts it by itself. If it comes again, "
            "leave this machine out (python -m megajax.doctor examines it)"
        )
    return (
        "Lower the learning rate, look at the data, or leave the step out with resilience.skip_steps; "
        "resilience.stop_on_nonfinite=false goes on without updates that are not finite"
    )


def _numbers(info: StepInfo) -> dict[str, float]:
    return {"loss": info.loss, "grad_norm": info.grad_norm}


def _same(a: StepInfo, b: StepInfo) -> bool:
    """Whether two runs of a step gave the same numbers, bit for bit; one nan is like another."""
    return repr((a.loss, a.grad_norm)) == repr((b.loss, b.grad_norm))


def _alike(a: StepInfo, b: StepInfo) -> bool:
    """Whether two runs of a step failed in the same way: what is finite differs by what kernels may differ by."""
    pairs = ((a.loss, b.loss), (a.grad_norm, b.grad_norm))
    return all(repr(x) == repr(y) or isclose(x, y, rel_tol=KERNEL_TOLERANCE) for x, y in pairs)
