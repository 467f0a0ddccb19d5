"""Pipeline tables, re-derived tick by tick, against expected tables and formulas."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from user_errors import user_error

from megajax.config.errors import ConfigError
from megajax.pipeline.check import check, formulas, measure
from megajax.pipeline.schedule import Schedule, StageWork, assemble, build, one_f_one_b, problems

pytestmark = pytest.mark.smoke


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    stages, chunks = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    microbatches = draw(st.integers(1, 40)) if chunks == 1 else stages * draw(st.integers(1, 6))
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    return build(name, stages=stages, microbatches=microbatches, chunks=chunks)


def work_at(work: StageWork, tick: int, stage: int) -> tuple[int, int] | None:
    """(microbatch, chunk) of an entry, None if idle."""
    microbatch = int(work.microbatch[tick, stage])
    return None if microbatch < 0 else (microbatch, int(work.chunk[tick, stage]))


def run(schedule: Schedule) -> dict[str, list]:
    """Compute symbolically with the executor's storage: one-tick registers between stages, rings, an output buffer.

    Values are tuples of their sources; a wrong read makes a wrong tuple, which an assertion detects.
    """
    stages, chunks = schedule.stages, schedule.chunks
    arriving, returning = [None] * stages, [None] * stages
    rings = [["nothing"] * schedule.ring_slots for _ in range(stages)]
    waiting = ["nothing"] * schedule.output_slots
    log: dict[str, list] = {"forward": [], "backward": [], "embed": [], "head": [], "end": []}
    for phase in schedule.phases:
        for tick in range(phase.start, phase.stop):
            outputs, gradients = ["garbage"] * stages, ["garbage"] * stages
            for s in range(stages if phase.forward else 0):
                work = work_at(schedule.forward, tick, s)
                if s == 0 and schedule.embed[tick] >= 0:
                    arriving[0] = ("x", schedule.embed[tick], 0)
                    log["embed"].append(int(schedule.embed[tick]))
                rings[s][schedule.forward.slot[tick, s]] = "garbage"
                if work:
                    assert arriving[s] == ("x", work[0], work[1] * stages + s)
                    rings[s][schedule.forward.slot[tick, s]] = work
                    outputs[s] = ("x", work[0], work[1] * stages + s + 1)
                    log["forward"].append((*work, s))
            if schedule.output_written[tick] >= 0:
                waiting[schedule.output_written[tick]] = outputs[-1]
            if (i := schedule.head[tick]) >= 0:
                slot = schedule.output_read[tick]
                assert (outputs[-1] if slot < 0 else waiting[slot]) == ("x", i, stages * chunks)
                returning[-1] = ("g", i, stages * chunks)
                log["head"].append(int(i))
            for s in range(stages if phase.backward else 0):
                if work := work_at(schedule.backward, tick, s):
                    assert returning[s] == ("g", work[0], work[1] * stages + s + 1)
                    assert rings[s][schedule.backward.slot[tick, s]] == work
                    gradients[s] = ("g", work[0], work[1] * stages + s)
                    log["backward"].append((*work, s))
            if (i := schedule.embed_gradient[tick]) >= 0:
                assert gradients[0] == ("g", i, 0)
                log["end"].append(int(i))
            arriving = [outputs[-1], *outputs[:-1]]
            returning = [*gradients[1:], gradients[0]]
    return log


def assert_complete(schedule: Schedule) -> None:
    log = run(schedule)
    sizes = (schedule.microbatches, schedule.chunks, schedule.stages)
    for kind in ("forward", "backward"):
        assert sorted(log[kind]) == list(np.ndindex(sizes)), kind
    for kind in ("embed", "head", "end"):
        assert sorted(log[kind]) == list(range(schedule.microbatches)), kind


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_following_the_table_computes_everything_once(schedule: Schedule) -> None:
    assert_complete(schedule)
    check(schedule)


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_figures_match_the_formulas(schedule: Schedule) -> None:
    figures = measure(schedule)
    assert figures == formulas(schedule)
    stages, chunks, microbatches = schedule.stages, schedule.chunks, schedule.microbatches
    assert figures.pipeline_bubble == Fraction(stages - 1, chunks * microbatches)
    assert figures.bubble_of_total == Fraction(stages - 1, chunks * microbatches + stages - 1)
    most = chunks * microbatches
    if schedule.name == "gpipe":
        assert schedule.slots == most and figures.in_flight == (most,) * stages
        assert [phase.label for phase in schedule.phases] == ["F", "B"]
        assert schedule.output_slots == microbatches
        return
    assert figures.ticks == chunks * microbatches + stages * chunks + stages - 2
    assert figures.in_flight == tuple(min(most, stages * chunks + stages - 1 - 2 * s) for s in range(stages))
    assert schedule.slots == min(most, stages * chunks + stages - 1)
    assert schedule.spare_slot == (stages > 1 and most < stages * chunks + stages - 1)
    spans = {phase.label: phase.ticks for phase in schedule.phases}
    warm_up = {"F": stages * chunks - 1, "B": stages * chunks - 1} if stages * chunks > 1 else {}
    assert spans == {**warm_up, "F+B": most - stages * chunks + stages}
    assert schedule.output_slots == 0, "each loss follows its forward in the same tick"


def test_tables_cannot_be_changed() -> None:
    schedule = one_f_one_b(2, 2)
    for array in (*schedule.forward, *schedule.backward, schedule.embed, schedule.output_written):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize(
    ("name", "sizes", "setting", "hint"),
    [
        ("1fb1", (4, 8, 1), "schedule", "did you mean 1f1b?"),
        ("zero", (4, 8, 1), "schedule", "there are gpipe, 1f1b, interleaved"),
        ("1f1b", (0, 8, 1), "stages", "give 1 or more"),
        ("1f1b", (4, -1, 1), "microbatches", "give 1 or more"),
        ("1f1b", (4, 8, 0), "virtual_stages", "give 1 or more"),
        ("gpipe", (4, 6, 2), "microbatches", "set microbatches to 4 or 8, or virtual_stages to 1"),
        ("interleaved", (4, 2, 2), "microbatches", "set microbatches to 4, or virtual_stages to 1"),
    ],
)
def test_invalid_sizes_are_refused_with_the_remedy(
    name: str, sizes: tuple[int, int, int], setting: str, hint: str
) -> None:
    stages, microbatches, chunks = sizes
    actual = problems(name, stages=stages, microbatches=microbatches, chunks=chunks)
    assert [(problem.setting, problem.hint) for problem in actual] == [(setting, hint)]
    with user_error(kind=ConfigError):
        build(name, stages=stages, microbatches=microbatches, chunks=chunks)


def test_two_pieces_of_work_in_one_tick_are_refused() -> None:
    when = np.zeros((2, 1, 1), int)
    with pytest.raises(ValueError, match="two pieces of work of kind forward"):
        assemble("wrong", forward=when, backward=when)
    ticks = np.arange(1, 3).reshape(2, 1, 1)
    with pytest.raises(ValueError, match="before forward"):
        assemble("wrong", forward=ticks, backward=ticks - 1)
