"""The checker of pipeline tables refuses each kind of invalid table and names the broken rule."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megajax.pipeline.check import InvalidSchedule, check, violations
from megajax.pipeline.schedule import Phase, Schedule, Work, assemble, build, gpipe, one_f_one_b


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
    for kind in ("forward", "input_gradient", "weight_gradient"):
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


def forward_left_out() -> Schedule:
    return changed(FOUR, "forward", "microbatch", {(5, 1): -1})


def forward_done_twice() -> Schedule:
    return changed(FOUR, "forward", "microbatch", {(10, 0): 0})


def weight_gradient_left_out() -> Schedule:
    return changed(FOUR, "weight_gradient", "microbatch", {(8, 2): -1})


def wrong_chunk() -> Schedule:
    return changed(TWO_CHUNKS, "forward", "chunk", {(0, 0): 1})


def chunks_in_the_wrong_order() -> Schedule:
    return changed(TWO_CHUNKS, "forward", "chunk", {(0, 0): 1, (2, 0): 0})


def forward_before_its_input() -> Schedule:
    first = changed(FOUR, "forward", "microbatch", {(5, 1): 5, (6, 1): 4})
    return changed(first, "forward", "slot", {(5, 1): FOUR.forward.slot[6, 1], (6, 1): FOUR.forward.slot[5, 1]})


def backward_before_its_forward() -> Schedule:
    """All gradients two ticks earlier, with unchanged slots (assemble refuses such ticks)."""
    early_gradient = Work(*(np.roll(array, -2, axis=0) for array in FOUR.input_gradient))
    lines = {name: np.roll(getattr(FOUR, name), -2) for name in ("head", "embed_gradient")}
    return replace(FOUR, input_gradient=early_gradient, weight_gradient=early_gradient, **lines)


def weight_gradient_before_its_input_gradient() -> Schedule:
    """The input gradients of a whole schedule one tick after the weight gradients."""
    return moved(FOUR, input_gradient=np.array(1))


def input_that_waits_two_ticks() -> Schedule:
    """Stages 2 and 3 a tick late with every forward pass, and everything after with them."""
    delays = np.array([0, 0, 1, 1])
    return moved(FOUR, forward=delays, input_gradient=np.array(1), weight_gradient=np.array(1))


def slot_of_another_forward() -> Schedule:
    return changed(FOUR, "forward", "slot", {(2, 0): FOUR.forward.slot[1, 0]})


def idle_forward_on_a_taken_slot() -> Schedule:
    """Stage 0 is idle at tick 9, with the backward passes of microbatches 3 to 7 still to come."""
    return changed(FOUR, "forward", "slot", {(9, 0): FOUR.forward.slot[7, 0]})


def backward_that_reads_another_slot() -> Schedule:
    return changed(FOUR, "input_gradient", "slot", {(6, 0): FOUR.forward.slot[1, 0]})


def weight_gradient_that_frees_another_slot() -> Schedule:
    return changed(FOUR, "weight_gradient", "slot", {(6, 0): FOUR.forward.slot[1, 0]})


def slot_outside_the_ring() -> Schedule:
    return changed(FOUR, "forward", "slot", {(0, 0): FOUR.ring_slots})


def microbatch_that_does_not_exist() -> Schedule:
    return changed(FOUR, "forward", "microbatch", {(7, 0): 8})


def wrong_dtype() -> Schedule:
    return replace(FOUR, forward=FOUR.forward._replace(chunk=FOUR.forward.chunk.astype(np.int64)))


def a_stage_too_few() -> Schedule:
    return replace(FOUR, input_gradient=Work(*(array[:, :3] for array in FOUR.input_gradient)))


def phase_that_ends_early() -> Schedule:
    return replace(FOUR, phases=(Phase(0, 4, True, False, False), Phase(4, 11, True, True, True), FOUR.phases[2]))


def phases_with_a_gap() -> Schedule:
    return replace(FOUR, phases=(FOUR.phases[0], FOUR.phases[1], FOUR.phases[2]._replace(start=12)))


def embedding_of_another_microbatch() -> Schedule:
    return line(FOUR, "embed", 3, 4)


def loss_left_out() -> Schedule:
    return line(FOUR, "head", 3, -1)


def embedding_gradient_too_early() -> Schedule:
    return line(FOUR, "embed_gradient", 5, 0)


def output_overwritten() -> Schedule:
    return line(ALL_FIRST, "output_written", 2, int(ALL_FIRST.output_written[1]))


def loss_of_another_output() -> Schedule:
    return line(ALL_FIRST, "output_read", 4, int(ALL_FIRST.output_written[2]))


def loss_of_an_output_not_made_now() -> Schedule:
    return line(ALL_FIRST, "output_read", 4, -1)


def backwards_a_tick_later_than_need_be() -> Schedule:
    """Valid otherwise, with a longer bubble."""
    return moved(FOUR, input_gradient=np.array(1), weight_gradient=np.array(1))


def more_slots_than_the_formula() -> Schedule:
    return replace(FOUR, slots=FOUR.slots + 1)


MUTATIONS: list[tuple[str, Callable[[], Schedule]]] = [
    ("once", forward_left_out),
    ("once", forward_done_twice),
    ("once", weight_gradient_left_out),
    ("once", wrong_chunk),
    ("order", chunks_in_the_wrong_order),
    ("order", forward_before_its_input),
    ("order", backward_before_its_forward),
    ("order", weight_gradient_before_its_input_gradient),
    ("arrival", input_that_waits_two_ticks),
    ("slots", slot_of_another_forward),
    ("slots", idle_forward_on_a_taken_slot),
    ("slots", backward_that_reads_another_slot),
    ("slots", weight_gradient_that_frees_another_slot),
    ("form", slot_outside_the_ring),
    ("form", microbatch_that_does_not_exist),
    ("form", wrong_dtype),
    ("form", a_stage_too_few),
    ("phases", phase_that_ends_early),
    ("phases", phases_with_a_gap),
    ("borders", embedding_of_another_microbatch),
    ("borders", loss_left_out),
    ("borders", embedding_gradient_too_early),
    ("outputs", output_overwritten),
    ("outputs", loss_of_another_output),
    ("outputs", loss_of_an_output_not_made_now),
    ("figures", backwards_a_tick_later_than_need_be),
    ("figures", more_slots_than_the_formula),
]


@pytest.mark.parametrize(("rule", "mutation"), MUTATIONS, ids=[make.__name__ for _, make in MUTATIONS])
def test_an_invalid_table_is_refused_by_its_rule(rule: str, mutation: Callable[[], Schedule]) -> None:
    broken = mutation()
    assert rule in {actual.rule for actual in violations(broken)}
    with pytest.raises(InvalidSchedule, match=f"{rule}: "):
        check(broken)


@pytest.mark.parametrize("rule", ["idle_forward_on_a_taken_slot", "backwards_a_tick_later_than_need_be"])
def test_a_subtle_fault_violates_only_its_rule(rule: str) -> None:
    expected, make = next(entry for entry in MUTATIONS if entry[1].__name__ == rule)
    assert {actual.rule for actual in violations(make())} == {expected}


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
    for kind in ("forward", "input_gradient", "weight_gradient"):
        for tick, stage in np.argwhere(getattr(schedule, kind).microbatch >= 0):
            for column, bound in bounds.items():
                value = int(getattr(getattr(schedule, kind), column)[tick, stage])
                next_value = (value + 1) % bound
                if next_value != value and not violations(changed(schedule, kind, column, {(tick, stage): next_value})):
                    missed.append((kind, column, int(tick), int(stage)))
    assert not missed


def test_the_message_names_schedule_and_rule_and_place() -> None:
    with pytest.raises(InvalidSchedule) as caught:
        check(forward_left_out())
    assert "schedule 1f1b:" in str(caught.value)
    assert "once: forward of microbatch 4, chunk 0, stage 1 runs never" in str(caught.value)
