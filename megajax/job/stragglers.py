"""Says which processes keep the others waiting, when that changes."""

from collections import deque
from collections.abc import Callable
from statistics import median

from megajax.resilience.integrity_config import StragglersConfig
from megajax.resilience.stragglers import Change, StragglerRule
from megajax.training.loop import StepInfo
from megajax.training.timing import EXCHANGED, HOST, STALLED

REMEMBERED = 64
"""Steps whose median is the time of a step."""

WORDS = {
    HOST: "its own work on the host between steps",
    STALLED: "not running at all (stopped, starved of processors, or swapping)",
}
"""Phase -> what it is, for people; others are called by their names."""


class WatchStragglers:
    """Takes every step's numbers in turn, some with the times of all processes."""

    def __init__(self, cfg: StragglersConfig, event: Callable[..., None], say: Callable[[str], None]):
        self._event, self._say = event, say
        self._rule = StragglerRule(cfg, EXCHANGED)
        self._seconds, self._first = deque[float](maxlen=REMEMBERED), 1

    def __call__(self, info: StepInfo) -> None:
        if info.by_process is not None:
            typical = median(self._seconds or [info.seconds])
            for change in self._rule(self._first, typical, info.by_process.tolist()):
                self._tell(info.step, change)
            self._first = info.step
        self._seconds.append(info.seconds)

    def _tell(self, step: int, change: Change) -> None:
        slow = change.straggler
        if change.over:
            self._event("straggler_over", step=step, process=slow.process, phase=slow.phase)
            self._say(f"step {step}: process {slow.process} is no longer slow ({slow.phase})")
            return
        self._event("straggler", step=step, **slow._asdict())
        what = WORDS.get(slow.phase, slow.phase.replace("_", " "))
        self._say(
            f"step {step}: process {slow.process} is slow since step {slow.since_step}: {slow.factor:g} times as long "
            f"as the others, {slow.seconds:.3f} s and not {slow.others:.3f} s, for {what}"
        )
