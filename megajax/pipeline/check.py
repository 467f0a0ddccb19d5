"""Checks of pipeline schedules, and their costs, measured and by formula. Needs no devices."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from megajax.pipeline.closed_form import closed_form
from megajax.pipeline.schedule import Schedule, StageWork, entering

KINDS = ("forward", "backward")


class Violation(NamedTuple):
    """A violated rule of a schedule, and the place of the violation."""

    rule: str
    """form, phases, once, order, arrival, slots, outputs, borders or figures: see `violations`."""
    where: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}"


class InvalidSchedule(ValueError):
    """An invalid schedule: an error in the code that built it, not a user error."""

    def __init__(self, name: str, violations: list[Violation]):
        self.violations = tuple(violations)
        more = f"\n  and {len(violations) - 10} more" if len(violations) > 10 else ""
        super().__init__(f"schedule {name}:\n  " + "\n  ".join(map(str, violations[:10])) + more)


@dataclass(frozen=True, slots=True)
class Figures:
    """The cost of a schedule."""

    ticks: int
    pipeline_bubble: Fraction
    """Extra time relative to the ideal, in which all stages are always busy: (P-1)/(V·M)."""
    in_flight: tuple[int, ...]
    """By stage, the maximum number of activations in memory, each of one microbatch and chunk."""
    slots: int
    """Ring slots per stage, without the spare one."""

    @property
    def bubble_of_total(self) -> Fraction:
        """Share of the total time in which a stage is idle: (P-1)/(V·M + P-1)."""
        return self.pipeline_bubble / (1 + self.pipeline_bubble)


def formulas(schedule: Schedule) -> Figures | None:
    """The cost by closed form for the schedule's name and sizes; None if there is none."""
    if schedule.name not in ("gpipe", "1f1b", "interleaved"):
        return None
    sizes = {"stages": schedule.stages, "chunks": schedule.chunks, "microbatches": schedule.microbatches}
    form = closed_form(schedule.name, **sizes, loss_wait=schedule.loss_wait)
    return Figures(form.ticks, form.bubble, form.in_flight, form.in_flight[0])


def measure(schedule: Schedule) -> Figures:
    """The cost measured on the table. A tick costs the kinds of work in its phase, a backward twice a forward."""
    time = sum(phase.ticks * (phase.forward + 2 * phase.backward) for phase in schedule.phases)
    ideal = 3 * schedule.microbatches * schedule.chunks
    started = np.cumsum(schedule.forward.microbatch >= 0, axis=0)
    finished = np.cumsum(schedule.backward.microbatch >= 0, axis=0)
    in_flight = started - np.concatenate([np.zeros_like(finished[:1]), finished[:-1]])
    return Figures(schedule.ticks, Fraction(time, ideal) - 1, tuple(in_flight.max(axis=0).tolist()), schedule.slots)


def check(schedule: Schedule) -> None:
    """Raises InvalidSchedule, which lists the violations."""
    if broken := violations(schedule):
        raise InvalidSchedule(schedule.name, broken)


def violations(schedule: Schedule) -> list[Violation]:
    """All violations of a schedule, by rule.

    - form: arrays have the right types, shapes and ranges; otherwise no other rule is checked.
    - phases: phases cover all ticks in order, and contain only their kinds of work.
    - once: each (microbatch, chunk, stage) has each kind of work once.
    - order: a forward comes after the previous chunk's forward; a backward after the next chunk's backward, and not
      before its own forward.
    - arrival: a value from a neighbour is used in the next tick, because the next value arrives after it.
    - slots: no forward, including idle ones, overwrites activations that are still needed; backwards read the slot of
      their own forward.
    - outputs: no output overwrites one that still waits for its loss, and each loss reads its own output.
    - borders: embed, head and embed_gradient are the microbatches that enter and leave the pipeline in a tick.
    - figures: ticks, bubble, activations in flight and slots agree with the formulas, if there are any.
    """
    form = list(_form(schedule))
    if form:
        return form
    violations, once = [*_phases(schedule), *_borders(schedule)], list(_once(schedule))
    violations += [*(once or _times(schedule)), *_slots(schedule), *_outputs(schedule)]
    expected, actual = formulas(schedule), measure(schedule)
    if expected is not None:
        violations += [
            Violation("figures", f"{name} is {getattr(actual, name)}, the formula says {getattr(expected, name)}")
            for name in ("ticks", "pipeline_bubble", "in_flight", "slots")
            if getattr(expected, name) != getattr(actual, name)
        ]
    return violations


def _works(schedule: Schedule) -> dict[str, StageWork]:
    return {kind: getattr(schedule, kind) for kind in KINDS}


def _form(schedule: Schedule) -> Iterator[Violation]:
    shape = (schedule.ticks, schedule.stages)
    bounds = (schedule.microbatches, schedule.chunks, schedule.ring_slots)
    arrays: list[tuple[str, np.ndarray, tuple[int, ...], int, int]] = [
        (f"{kind}.{name}", array, shape, -(name == "microbatch"), bound)
        for kind, work in _works(schedule).items()
        for (name, array), bound in zip(work._asdict().items(), bounds, strict=True)
    ]
    lines = dict.fromkeys(("embed", "head", "embed_gradient"), schedule.microbatches)
    lines |= dict.fromkeys(("output_written", "output_read"), schedule.output_slots)
    arrays += [(name, getattr(schedule, name), shape[:1], -1, bound) for name, bound in lines.items()]
    for name, array, expected, low, bound in arrays:
        if array.dtype != np.int32 or array.shape != expected:
            yield Violation("form", f"{name} is {array.dtype}{list(array.shape)}, must be int32{list(expected)}")
        elif ((array < low) | (array >= bound)).any():
            yield Violation("form", f"{name} holds {array.min()} to {array.max()}, may hold {low} to {bound - 1}")


def _phases(schedule: Schedule) -> Iterator[Violation]:
    phases = schedule.phases
    borders = [0, *(phase.stop for phase in phases)]
    if [phase.start for phase in phases] != borders[:-1] or borders[-1] != schedule.ticks:
        spans = ", ".join(f"{phase.start} to {phase.stop}" for phase in phases)
        yield Violation("phases", f"phases from tick {spans} are not the ticks 0 to {schedule.ticks} in turn")
    for kind, work in _works(schedule).items():
        has = np.zeros(schedule.ticks, bool)
        for phase in phases:
            has[phase.start : phase.stop] = getattr(phase, kind)
        for tick, stage in np.argwhere((work.microbatch >= 0) & ~has[:, None]):
            yield Violation("phases", f"{kind} at tick {tick} on stage {stage}, in a phase without that kind")


def _borders(schedule: Schedule) -> Iterator[Violation]:
    last = (schedule.stages - 1, schedule.chunks - 1)
    for name, actual, work, place in (
        ("embed", schedule.embed, schedule.forward, (0, 0)),
        ("head", schedule.head, schedule.backward, last),
        ("embed_gradient", schedule.embed_gradient, schedule.backward, (0, 0)),
    ):
        expected = entering(work, *place)
        for tick in np.flatnonzero(actual != expected):
            yield Violation("borders", f"{name} at tick {tick} is microbatch {actual[tick]}, must be {expected[tick]}")


def _once(schedule: Schedule) -> Iterator[Violation]:
    shape = (schedule.microbatches, schedule.chunks, schedule.stages)
    for kind, work in _works(schedule).items():
        count = np.zeros(shape, np.int64)
        tick, stage = np.nonzero(work.microbatch >= 0)
        np.add.at(count, (work.microbatch[tick, stage], work.chunk[tick, stage], stage), 1)
        for i, c, s in np.argwhere(count != 1):
            times = "never" if count[i, c, s] == 0 else f"{count[i, c, s]} times"
            yield Violation("once", f"{kind} of {_item(i, c, s)} runs {times}")


def _item(microbatch: int, chunk: int, stage: int) -> str:
    return f"microbatch {microbatch}, chunk {chunk}, stage {stage}"


def _when(schedule: Schedule, kind: str) -> np.ndarray:
    """Tick of each piece of work, int [M, V, P]; for schedules with each piece of work once."""
    work = _works(schedule)[kind]
    when = np.zeros((schedule.microbatches, schedule.chunks, schedule.stages), np.int64)
    tick, stage = np.nonzero(work.microbatch >= 0)
    when[work.microbatch[tick, stage], work.chunk[tick, stage], stage] = tick
    return when


def _times(schedule: Schedule) -> Iterator[Violation]:
    """The rules order and arrival."""
    ticks_of = [_when(schedule, kind) for kind in KINDS]
    places = schedule.chunks * schedule.stages
    # [M, V, P] -> [M, V·P]: the chunks in the order of the model's layers.
    along = [when.reshape(schedule.microbatches, places) for when in ticks_of]
    # Ticks between producing an input and using it, and the first user.
    for kind, wait, user in ((KINDS[0], np.diff(along[0]), 1), (KINDS[1], -np.diff(along[1]), 0)):
        for i, place in np.argwhere(wait != 1):
            item, ticks = _item(i, *divmod(place + user, schedule.stages)), wait[i, place]
            if ticks < 1:
                yield Violation("order", f"{kind} of {item} starts before its input arrives")
            else:
                yield Violation("arrival", f"input of {kind} of {item} came {ticks} ticks before, must be 1")
    for item in np.argwhere(ticks_of[1] < ticks_of[0]):
        yield Violation("order", f"backward of {_item(*item)} comes before its forward")


def _slots(schedule: Schedule) -> Iterator[Violation]:
    """Simulates the rings of all stages; each slot has the number of its (microbatch, chunk), or -1."""
    empty, stages = -1, np.arange(schedule.stages)
    ring = np.full((schedule.stages, schedule.ring_slots), empty)
    for phase in schedule.phases:
        for tick in range(phase.start, min(phase.stop, schedule.ticks)):
            for kind, work in _works(schedule).items():
                busy, slot = work.microbatch[tick] >= 0, work.slot[tick]
                number = work.microbatch[tick] * schedule.chunks + work.chunk[tick]
                if kind == "forward":
                    for s in np.flatnonzero((busy | phase.forward) & (ring[stages, slot] != empty)):
                        work_name = f"{'forward' if busy[s] else 'idle forward'} at tick {tick} on stage {s}"
                        yield Violation("slots", f"{work_name} writes slot {slot[s]}, still needed")
                else:
                    for s in np.flatnonzero(busy & (ring[stages, slot] != number)):
                        work_name = (
                            f"{kind} of {_item(*divmod(int(number[s]), schedule.chunks), int(s))} at tick {tick}"
                        )
                        yield Violation("slots", f"{work_name} reads slot {slot[s]}, which is not its own")
                ring[stages[busy], slot[busy]] = number[busy] if kind == "forward" else empty


def _outputs(schedule: Schedule) -> Iterator[Violation]:
    output = entering(schedule.forward, schedule.stages - 1, schedule.chunks - 1)
    stored: dict[int, int] = {}
    for tick in range(schedule.ticks):
        into, out, microbatch = schedule.output_written[tick], schedule.output_read[tick], schedule.head[tick]
        if into >= 0 and into in stored:
            yield Violation("outputs", f"tick {tick} writes output slot {into}, still needed")
        if into >= 0:
            stored[into] = int(output[tick])
        if microbatch >= 0 and (output[tick] if out < 0 else stored.pop(out, -1)) != microbatch:
            source = "the output of that tick" if out < 0 else f"output slot {out}"
            yield Violation(
                "outputs",
                f"head of microbatch {microbatch} at tick {tick} reads {source}, which is of another microbatch",
            )
