"""The choice between XLA's own schedule and that by the cost model, with a compiler that gives known programs."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from test_timeline import COPY, GATHER, H100, HEAD, MATMUL, MESH, entry, gathers, looped

from megajax.planning.compiled.hlo import CompiledProgram
from megajax.planning.compiled.instruction_times import InstructionTimes
from megajax.planning.compiled.scheduled_step import Scheduled, compile_scheduled, profile_lines
from megajax.processes.xla_options import PROFILE

START, DOT, DONE = gathers(1, 1).splitlines()
EXPOSED, HIDDEN = entry(DOT, START, DONE), entry(START, DOT, DONE)
OTHERS = entry(
    *(line.replace("dot.1.0", "custom-call.7").replace("gather.1", "gather.9") for line in (START, DOT, DONE))
)


def costs(text: str) -> InstructionTimes:
    return InstructionTimes(CompiledProgram.read(HEAD + text), MESH, H100, 8)


class Lowered:
    """A lowered program, with the texts of its compilations."""

    def __init__(self, *texts: str):
        self.texts, self.options = [*texts], []

    def compile(self, compiler_options: dict[str, Any]) -> Any:
        self.options.append(compiler_options)
        text = self.texts[len(self.options) - 1]
        return SimpleNamespace(as_text=lambda: text)


def chosen(*texts: str) -> tuple[Scheduled, Lowered]:
    lowered = Lowered(*texts)
    return compile_scheduled(lowered, {"some_option": 1}, costs), lowered


def test_the_second_compilation_has_the_times_of_the_first_program() -> None:
    scheduled, lowered = chosen(EXPOSED, HIDDEN)
    assert lowered.options[0] == {"some_option": 1}
    assert lowered.options[1] == {"some_option": 1, PROFILE: scheduled.profile.encode()}
    times = dict(re.findall(r'costs { name: "([\w.]+)" cost_us: ([\d.]+) }', scheduled.profile))
    assert {name: float(us) for name, us in times.items()} == {
        "gather.1": pytest.approx(1e6 * GATHER, abs=1e-3),
        "dot.1.0": pytest.approx(1e6 * MATMUL, abs=1e-3),
    }
    ((source, target, us),) = re.findall(
        r'latencies { source: "([\w.]+)" target: "([\w.]+)" latency_us: ([\d.]+) }', scheduled.profile
    )
    assert (source, target, float(us)) == ("gather.1", "gathered.1", pytest.approx(1e6 * GATHER, abs=1e-3))


def test_the_schedule_by_costs_is_taken() -> None:
    scheduled, _ = chosen(EXPOSED, HIDDEN)
    assert scheduled.takes_costs and scheduled.matched == 1
    assert scheduled.compiled.as_text() == HIDDEN
    assert scheduled.default.exposed_seconds == pytest.approx(GATHER)
    assert scheduled.by_costs.exposed_seconds == pytest.approx(GATHER - MATMUL)
    assert scheduled.summary().startswith("by costs of h100: 0.00")


def test_a_slower_schedule_is_not_taken() -> None:
    scheduled, _ = chosen(HIDDEN, EXPOSED)
    assert not scheduled.takes_costs and scheduled.compiled.as_text() == HIDDEN
    assert scheduled.summary().startswith("XLA's own: ")


def test_another_program_with_other_names_is_not_taken() -> None:
    scheduled, _ = chosen(EXPOSED, OTHERS)
    assert scheduled.matched == 0 and scheduled.compiled.as_text() == EXPOSED
    assert scheduled.summary() == "XLA's own: only 0% of the instructions have the names of the first compilation"
    assert scheduled.to_dict()["by"] == "default"


def test_loops_and_branches_take_as_long_as_what_runs_in_them() -> None:
    trips = costs(looped(gathers(1, 2), ', backend_config={"known_trip_count":{"n":"5"}}'))
    lines = [*profile_lines(trips)]
    assert f'name: "loop" cost_us: {1e6 * 5 * 2 * MATMUL:.3f}' in "".join(lines)
    branches = f"""\
%busy (x: bf16[4096,4096]) -> bf16[4096,4096] {{
  %x = bf16[4096,4096]{{1,0}} parameter(0)
{gathers(1, 1)}
}}

%idle (x: bf16[4096,4096]) -> bf16[4096,4096] {{
  %x = bf16[4096,4096]{{1,0}} parameter(0)
  ROOT %same = bf16[4096,4096]{{1,0}} copy(%x)
}}

"""
    either = "  %either = bf16[4096,4096]{1,0} conditional(%x, %x, %x), branch_computations={%busy, %idle}"
    text = "".join(profile_lines(costs(branches + entry(either))))
    assert f'name: "either" cost_us: {1e6 * MATMUL:.3f}' in text, "idle branches of unknown frequency are not taken"
    assert f'name: "same" cost_us: {1e6 * COPY:.3f}' in text and 'name: "gather.1"' in text
