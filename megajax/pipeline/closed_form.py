"""The cost of a step under a pipeline schedule, by formula, without numpy; tests compare schedules with it."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """The cost of one step; P stages, V chunks per stage, M microbatches."""

    bubble: Fraction
    """Idle time of stages relative to their working time: (P-1)/(V*M)."""
    ticks: int
    """Ticks of the schedule."""
    warmup_ticks: int
    """Number of ticks with forwards only, and of ticks with backwards only."""
    in_flight: tuple[int, ...]
    """By stage, the maximum number of activations in memory, each of one microbatch and chunk."""
    spare: bool = False
    """Whether idle forwards need a spare slot, because all forwards end before the first slot is free again."""

    @property
    def slots(self) -> int:
        """Slots of the ring of activations on each stage."""
        return self.in_flight[0] + self.spare

    @property
    def fraction(self) -> float:
        """The bubble as a number."""
        return float(self.bubble)


def closed_form(name: str, *, stages: int, chunks: int, microbatches: int, loss_wait: int) -> ClosedForm:
    """The cost of a schedule in lockstep (Narayanan et al., 2104.04473).

    Forward k (of M*V) runs on stage s at tick k+s, backward k at tick b+k+P-1-s, where b is P*V-1+w if losses wait w
    ticks. When the first backward of stage s starts, the activations of b+P-2s forwards are in memory, or of all M*V if
    there are fewer.
    """
    work = microbatches * chunks
    last, bubble = work + stages - 1, Fraction(stages - 1, work)
    if name == "gpipe":
        return ClosedForm(bubble, 2 * last, last, (work,) * stages, work < last + stages)
    first = min(stages * chunks - 1 + loss_wait, last)
    in_flight = tuple(min(work, first + stages - 2 * stage) for stage in range(stages))
    return ClosedForm(bubble, last + first, first, in_flight, work < first + stages)


def free_running(*, stages: int, chunks: int, microbatches: int) -> ClosedForm:
    """The cost for the first stage of a pipeline whose stages run as soon as their input arrives (section 2.2)."""
    work = microbatches * chunks
    activations = stages * chunks + stages - 1 if chunks > 1 else stages
    return ClosedForm(Fraction(stages - 1, work), work + stages - 1, stages - 1, (min(work, activations),))
