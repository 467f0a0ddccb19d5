"""The checker of pipeline tables refuses each kind of invalid table and names the broken rule."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megajax.pipeline.check import InvalidSchedule, check, violations
from megajax.pipeline.schedule import Phase, Schedule, StageWork, assemble, build, gpipe, one_f_one_b


def changed(schedule: Schedule, kind: str, column: str, entries: dict[tuple[int, int], int]) -> Schedule:
    """With other numbers at (tick, stage) of one array of one kind of work."""
    work = getattr(schedule, kind)
    array = getattr(work, column).copy()
    for at, value in entries.items():
        array[at] = value
    return replace(schedule, **{kind: work._replace(**{column: array})})


def line(schedule: Schedule, name: str, tick: int, value: int) -> Schedule:
    array = getattr(schedule, name).copy()
    array[tick] = value
    return replace(schedule, **{name: array})


def ticks_of(schedule: Schedule) -> dict[str, np.ndarray]:
    actual = {}
    for kind in ("forward", "backward"):
        work = getattr(schedule, kind)
        when = np.zeros((schedule.microbatches, schedule.chunks, schedule.stages), int)
        for tick, stage in np.argwhere(work.microbatch >= 0):
            when[work.microbatch[tick, stage], work.chunk[tick, stage], stage] = tick
        actual[kind] = when
    return actual


def moved(schedule: Schedule, **by: np.ndarray) -> Schedule:
    """Assembled again with ticks of some kinds moved, by int broadcast to [M, V, P]."""
    ticks = ticks_of(schedule)
    return assemble(schedule.name, **{kind: ticks[kind] + by.get(kind, 0) for kind in ticks})


FOUR = one_f_one_b(4, 8)
"""Tick 5: F 5 4 3 2, B . 0 1 2; phases 3 F, 8 F+B, 3 B."""
TWO_CHUNKS = one_f_one_b(2, 4, 2)
ALL_FIRST = gpipe(2, 3)

EARLY = StageWork(*(np.roll(array, -2, axis=0) for array in FOUR.backward))
"""All gradients two ticks earlier, with unchanged slots (assemble refuses such ticks)."""
EARLY_LINES = {name: np.roll(getattr(FOUR, name), -2) for name in ("head", "embed_gradient")}
LATER = np.array(1)
SLOTS = FOUR.forward.slot
SWAPPED = changed(FOUR, "forward", "microbatch", {(5, 1): 5, (6, 1): 4})
"""A forward pass before its input."""

MUTATIONS: dict[str, tuple[str, Schedule]] = {
    "forward left out": ("once", changed(FOUR, "forward", "microbatch", {(5, 1): -1})),
    "forward done twice": ("once", changed(FOUR, "forward", "microbatch", {(10, 0): 0})),
    "backward left out": ("once", changed(FOUR, "backward", "microbatch", {(8, 2): -1})),
    "wrong chunk": ("once", changed(TWO_CHUNKS, "forward", "chunk", {(0, 0): 1})),
    "chunks in the wrong order": ("order", changed(TWO_CHUNKS, "forward", "chunk", {(0, 0): 1, (2, 0): 0})),
    "forward before its input": (
        "order",
        changed(SWAPPED, "forward", "slot", {(5, 1): SLOTS[6, 1], (6, 1): SLOTS[5, 1]}),
    ),
    "backward before its forward": ("order", replace(FOUR, backward=EARLY, **EARLY_LINES)),
    # Stages 2 and 3 a tick late with every forward pass, and everything after with them.
    "input that waits two ticks": ("arrival", moved(FOUR, forward=np.array([0, 0, 1, 1]), backward=LATER)),
    "slot of another forward": ("slots", changed(FOUR, "forward", "slot", {(2, 0): SLOTS[1, 0]})),
    # Stage 0 is idle at tick 9, with the backward passes of microbatches 3 to 7 still to come.
    "idle forward on a taken slot": ("slots", changed(FOUR, "forward", "slot", {(9, 0): SLOTS[7, 0]})),
    "backward that reads another slot": ("slots", changed(FOUR, "backward", "slot", {(6, 0): SLOTS[1, 0]})),
    "slot outside the ring": ("form", changed(FOUR, "forward", "slot", {(0, 0): FOUR.ring_slots})),
    "microbatch that does not exist": ("form", changed(FOUR, "forward", "microbatch", {(7, 0): 8})),
    "wrong dtype": ("form", replace(FOUR, forward=FOUR.forward._replace(chunk=FOUR.forward.chunk.astype(np.int64)))),
    "a stage too few": ("form", replace(FOUR, backward=StageWork(*(array[:, :3] for array in FOUR.backward)))),
    "phase that ends early": (
        "phases",
        replace(FOUR, phases=(Phase(0, 4, True, False), Phase(4, 11, True, True), FOUR.phases[2])),
    ),
    "phases with a gap": ("phases", replace(FOUR, phases=(*FOUR.phases[:2], FOUR.phases[2]._replace(start=12)))),
    "embedding of another microbatch": ("borders", line(FOUR, "embed", 3, 4)),
    "loss left out": ("borders", line(FOUR, "head", 3, -1)),
    "embedding gradient too early": ("borders", line(FOUR, "embed_gradient", 5, 0)),
    "output overwritten": ("outputs", line(ALL_FIRST, "output_written", 2, int(ALL_FIRST.output_written[1]))),
    "loss of another output": ("outputs", line(ALL_FIRST, "output_read", 4, int(ALL_FIRST.output_written[2]))),
    "loss of an output not made now": ("outputs", line(ALL_FIRST, "output_read", 4, -1)),
    # Valid otherwise, with a longer bubble.
    "backwards a tick later than need be": ("figures", moved(FOUR, backward=LATER)),
    "more slots than the formula": ("figures", replace(FOUR, slots=FOUR.slots + 1)),
}
"""Fault -> the rule that it breaks, and a table with it."""
SUBTLE = ("idle forward on a taken slot", "backwards a tick later than need be")
"""Faults that violate only their rule."""


@pytest.mark.parametrize("fault", MUTATIONS)
def test_an_invalid_table_is_refused_by_its_rule(fault: str) -> None:
    rule, broken = MUTATIONS[fault]
    rules = {actual.rule for actual in violations(broken)}
    assert rules == {rule} if fault in SUBTLE else rule in rules
    with pytest.raises(InvalidSchedule, match=f"{rule}: "):
        check(broken)


@pytest.mark.parametrize(
    "schedule", [FOUR, TWO_CHUNKS, ALL_FIRST, gpipe(2, 4, 2), build("1f1b", stages=4, microbatches=3)]
)
def test_every_changed_number_is_found(schedule: Schedule) -> None:
    """Every microbatch, chunk and slot of a busy entry, one after the other, set to another legal number."""
    bounds: dict[str, Any] = {
        "microbatch": schedule.microbatches,
        "chunk": schedule.chunks,
        "slot": schedule.ring_slots,
    }
    missed = []
    for kind in ("forward", "backward"):
        for tick, stage in np.argwhere(getattr(schedule, kind).microbatch >= 0):
            for column, bound in bounds.items():
                value = int(getattr(getattr(schedule, kind), column)[tick, stage])
                next_value = (value + 1) % bound
                if next_value != value and not violations(changed(schedule, kind, column, {(tick, stage): next_value})):
                    missed.append((kind, column, int(tick), int(stage)))
    assert not missed


def test_the_message_names_schedule_and_rule_and_place() -> None:
    with pytest.raises(InvalidSchedule) as caught:
        check(MUTATIONS["forward left out"][1])
    assert "schedule 1f1b:" in str(caught.value)
    assert "once: forward of microbatch 4, chunk 0, stage 1 runs never" in str(caught.value)
