"""The first cause of a hang or a lost connection, from the published states of processes."""

import json

import jax
import pytest

from megajax.faults import peer_status
from megajax.faults.activity import Stage
from megajax.faults.peer_status import PeerStatus, Status, find_cause, runtime_error_of


def moved(states: dict[int, Status]) -> dict[int, Status]:
    """The same, some periods later."""
    return {process: state._replace(beat=state.beat + 2) for process, state in states.items()}


STEP = Status(5, "step", 7, 21.0, -1.0)

LATE = Status(9, "data_wait", 7, 21.0, -1.0)
WAITS_FOR_ROWS = "process 1 has not entered step 7: it has been waiting for the rows of step 7 for 21 s"
NOBODY = "all processes are equally far: a collective or a device does not answer"
SAVES = STEP._replace(background=Status(5, "background_save", 6))
STOPPED = Status(9, "step", 8)
CAUSES = {
    "behind the others": (0, [STEP, LATE, STEP], {}, 1, WAITS_FOR_ROWS),
    "the one that asks": (1, [STEP, LATE, STEP], {}, 1, "the other processes wait for this one"),
    "no longer publishes": (
        *(0, [STEP, STOPPED, Status(5, "data_wait", 7, 3.0, -1.0)]),
        *({1: STOPPED}, 1, "process 1 no longer runs; it was in step 8"),
    ),
    "never published": (0, [STEP], {}, 1, "process 1 no longer runs"),
    "no background save for a step": (0, [STEP, SAVES], {}, None, NOBODY),
    "nobody": (0, [STEP, STEP], {}, None, NOBODY),
}
"""Who asks, the states before, those that do not move, and the cause with its explanation."""


@pytest.mark.parametrize("case", CAUSES)
def test_the_cause_of_a_hang(case):
    local, states, unmoved, process, explanation = CAUSES[case]
    before = dict(enumerate(states))
    cause = find_cause(local, before, moved(before) | unmoved, max(2, len(states)))
    assert cause == (process, explanation, 0.0, False)


def test_a_process_within_its_own_limit_is_waited_for():
    before = {0: STEP, 1: Status(9, "compile", 6, 21.0, 900.0)}
    assert find_cause(0, before, moved(before), 2).patience == 900.0


def test_the_first_failure_is_the_cause_and_later_ones_are_not():
    after = {
        0: STEP,
        1: Status(5, "step", 7, failure="lost the connection to process 2: it failed"),
        2: Status(9, "data_wait", 7, failure="ValueError: odd"),
    }
    verdict = find_cause(0, {}, after, 3)
    assert (verdict.process, verdict.explanation, verdict.reported) == (2, "process 2 failed: ValueError: odd", True)


def test_a_process_that_waited_for_another_one_is_not_the_cause():
    """Process 0 has waited for process 1 and ended first: it is silent, and neither of the others blames it."""
    ended = STEP._replace(failure="process 0 hangs; process 1 has not entered step 7", cause=1)
    before = {0: ended, 1: Status(9, "data_wait", 7, 21.0, -1.0), 2: STEP}
    after = moved(before) | {0: ended}
    assert find_cause(1, before, after, 3) == (1, "the other processes wait for this one", 0.0, False)
    assert find_cause(2, before, after, 3).process == 1


@pytest.mark.parametrize(
    ("late", "waiting"),
    [
        (Status(5, "start", stage=Stage.DEVICES), Status(5, "start", stage=Stage.FIRST_COLLECTIVE)),
        (Status(5, "start", stage=Stage.COMPILE_CACHE), Status(5, "setup", stage=Stage.RUN_FOLDER)),
        (Status(5, "setup", stage=Stage.CHECKPOINTS), Status(5, "setup", stage=Stage.CHECKPOINTS, waits=True)),
        (Status(5, "setup", stage=Stage.CHECKPOINTS, waits=True), Status(5, "setup", stage=Stage.DATA)),
    ],
)
def test_stages_of_the_start_and_the_setup_name_the_late_process(late, waiting):
    for behind in (0, 1):
        before = {behind: late, 1 - behind: waiting}
        assert find_cause(1 - behind, before, moved(before), 2).process == behind
        assert find_cause(behind, before, moved(before), 2).process == behind
        assert late.stage and late.stage in find_cause(1 - behind, before, moved(before), 2).explanation


@pytest.mark.parametrize("phase", ["save", "finish"])
def test_a_background_save_that_others_wait_for(phase):
    """The main threads wait for the previous save, and a late step is unrelated to it."""
    saving = Status(5, "background_save", 6, 20.0, -1.0)
    before = {0: Status(5, phase, 9, background=saving._replace(waits=True)), 1: Status(5, phase, 9, background=saving)}
    for local in (0, 1):
        assert find_cause(local, before, moved(before), 2).process == 1
    late = before | {0: Status(5, "data_wait", 7, background=before[0].background)}
    assert find_cause(0, late, moved(late), 2, background=True).process == 1
    text = find_cause(0, late, moved(late), 2, background=True).explanation
    assert text == "process 1 has been writing the checkpoint of step 6 for 20 s"


def test_a_status_is_read_as_published():
    status = Status(5, "save", 9, stage=Stage.DATA, cause=1, background=Status(5, "background_save", 6, waits=True))
    assert Status.parse(json.dumps(status)) == status


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Status(1, "setup"), Status(1, "data_wait", 1)),
        (Status(1, "data_wait", 7), Status(1, "step", 7)),
        (Status(1, "step", 7), Status(1, "save", 7)),
        (Status(1, "save", 7), Status(1, "step", 8)),
        (Status(1, "step", 8), Status(1, "finish")),
    ],
)
def test_positions_of_a_run_in_order(first, second):
    assert first.position() < second.position()


class Service:
    """The key-value store of the coordination service."""

    def __init__(self):
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        self.values[key] = value

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.values.items() if key.startswith(f"{folder}/")]


def peers(index: int, service: Service, dumps: list[str]) -> PeerStatus:
    status = PeerStatus(lambda beat: Status(beat, "step", 7), dumps.append)
    status._client, status.index, status.count = service, index, 2
    return status


def test_processes_read_the_states_of_others(monkeypatch):
    monkeypatch.setattr(peer_status, "PERIOD_SECONDS", 0.05)
    service, dumps = Service(), []
    first, second = (peers(index, service, dumps) for index in (0, 1))
    first.period = second.period = 0.05
    assert first.failed() is None
    first.start()
    second.start()
    second.ask_for_stacks()
    assert dumps == ["process 1 hangs"] * 2
    assert first.verdict().process is None
    second.stop()
    verdict = first.verdict()
    assert verdict.process == 1 and not verdict.reported
    second.publish_failure("ValueError: odd")
    assert first.failed() == first.verdict() and first.verdict().reported
    first.stop()


def test_a_single_process_publishes_nothing():
    single = PeerStatus(Status, lambda why: None)
    single.start()
    single.publish_failure("odd")
    assert single.single_process and single.failed() is None and single.verdict().process is None


def test_an_error_of_a_collective_may_be_a_value_error():
    """jax raises it where it dispatches a compiled program."""
    lost = ValueError("UNKNOWN: Gloo AllGather failed: Read error [127.0.0.1]:12692: Connection reset by peer")
    outer = RuntimeError("outer")
    outer.__cause__ = lost
    assert runtime_error_of(lost) is runtime_error_of(outer) is lost
    assert runtime_error_of(ValueError("expected 2 values")) is None
    runtime_error = jax.errors.JaxRuntimeError("INTERNAL: a kernel failed")
    assert runtime_error_of(runtime_error) is runtime_error
