"""The record of an attempt's end: who is blamed, with which authority, and in which words."""

import pytest

from megajax.faults.attempt_end import (
    BY_BYSTANDER,
    BY_PROCESS,
    PEER_LOST,
    describe_failure,
    end_of,
    failed_saves_end,
    stopped_end,
)

pytestmark = pytest.mark.smoke

GLOO = "JaxRuntimeError: Gloo all-reduce failed: Connection closed by peer"
LATE = {"cause": "process 1 is late", "cause_process": 1}
HANG = {"step": 12, "seconds": 20.9, "exit_code": 124}

ENDS = {
    "a crash": (
        ("crash", {"process": 1, "error": "OSError: x", "phase": "data_wait", "step": 4, "exit_code": 1}),
        (1, BY_PROCESS, "process 1 crashed in data wait of step 4: OSError: x"),
    ),
    "a crash because of a lost process": (
        ("crash", {"process": 0, "error": GLOO, "phase": "step", "step": 8, "exit_code": 1}),
        (1, BY_BYSTANDER, f"process 0 crashed in step 8: {GLOO}"),
    ),
    "a refused start": (
        ("crash", {"process": 0, "error": "no data", "phase": "setup", "step": None, "exit_code": 2}),
        (2, BY_PROCESS, "process 0 stopped in setup: no data"),
    ),
    "a hang in a collective": (
        ("hang", {"process": 0, "phase": "step", **HANG}),
        (124, BY_BYSTANDER, "hang: process 0 in step 12 for 21 s"),
    ),
    "a hang that waits for another process": (
        ("hang", {"process": 0, "phase": "evaluation", **HANG, **LATE}),
        (124, BY_BYSTANDER, "hang: process 0 in evaluation of step 12 for 21 s; process 1 is late"),
    ),
    "the process that the others wait for": (
        ("hang", {"process": 1, "phase": "data_wait", **HANG, **LATE}),
        (124, BY_PROCESS, "hang: process 1 in data wait of step 12 for 21 s"),
    ),
    "a lost process": (
        ("lost", {"process": 1, "cause": "killed by SIGKILL", "step": 8}),
        (1, BY_PROCESS, "process 1 killed by SIGKILL at step 8"),
    ),
    "a second signal": (
        ("signal", {"process": 0, "signal": "SIGINT", "phase": "step", "step": 5, "exit_code": 130}),
        (130, BY_PROCESS, "SIGINT in step 5: ended at once, unsaved"),
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_the_end_that_a_process_records(case: str) -> None:
    (name, fields), (code, by, text) = ENDS[case]
    end = end_of(name, fields, several=True)
    assert (end["code"], end["by"], end["text"]) == (code, by, text)
    assert (end["cause"], end["process"], end["step"]) == (name, fields["process"], fields["step"])


def test_a_single_process_is_not_named_and_blames_nobody() -> None:
    end = end_of("hang", {"process": 0, "phase": "step", **HANG}, several=False)
    assert (end["text"], end["by"]) == ("hang in step 12 for 21 s", BY_PROCESS)
    assert describe_failure("crash", {"process": 0, "error": None}, several=False) == "crashed: no message"


def test_ends_of_the_run_as_a_whole() -> None:
    assert failed_saves_end(60, 3, "disk full")["text"] == "3 saves failed in a row: disk full"
    assert failed_saves_end(60, 1, "disk full")["text"] == "a save failed: disk full"
    assert stopped_end(7, 7, "SIGTERM", 75)["text"] == "stopped (SIGTERM), step 7 saved"
    assert stopped_end(7, None, "SIGTERM", 143) | {"text": ""} == {
        **{"code": 143, "cause": "stopped", "process": None, "step": 7, "text": "", "by": BY_PROCESS}
    }


@pytest.mark.parametrize(
    "text",
    [
        "UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:29074",
        "DEADLINE_EXCEEDED: Gloo ReduceScatter timed out: Read error [127.0.0.1]:29837: Connection reset by peer",
        "INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited or there was a network error",
        "UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was preempted",
    ],
)
def test_errors_of_lost_processes(text: str) -> None:
    assert PEER_LOST.search(text)


def test_other_errors_are_not_errors_of_lost_processes() -> None:
    assert not PEER_LOST.search("RESOURCE_EXHAUSTED: Out of memory allocating 1024 bytes")
