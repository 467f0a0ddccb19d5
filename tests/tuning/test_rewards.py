"""Reward functions run in processes of their own, and whatever they do is a reward."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from megajax.config.errors import UserError
from megajax.tuning.rewards import DISTURBED, RewardTask, RewardWorkers

FUNCTIONS = """
import os, time

def judge(prompt, answer, row):
    print("this is no result")
    if answer == "wait":
        time.sleep(60)
    if answer == "end":
        os._exit(3)
    return {"right": 1.0, "nan": float("nan"), "text": "much", "cut": None}.get(answer, len(prompt) / row["length"])

def other(prompt, answer, row):
    return -1
"""


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardWorkers]:
    file = tmp_path_factory.mktemp("rewards") / "functions.py"
    file.write_text(FUNCTIONS)
    workers = RewardWorkers([f"{file}:judge", f"{file}:other"], workers=2, seconds=8.0)
    yield workers
    workers.close()


def test_a_function_that_fails_costs_its_reward_alone(workers: RewardWorkers) -> None:
    row, answers = {"prompt": "abc", "length": 6}, ("right", "wait", "half", "nan", "end", "text", "cut", "right")
    tasks = [*(RewardTask(0, answer, row) for answer in answers), RewardTask(1, "right", row)]
    values, failures = workers(tasks)
    assert values == [1, 0, 0.5, 0, 0, 0, 0, 1, -1]
    reasons = {1: "took too long", 3: "returned no finite number", 4: "ended its process"}
    assert {failure.task: failure.reason for failure in failures} == reasons | dict.fromkeys((5, 6), "raised an error")
    assert "exit code 3" in failures[2].detail and "could not convert string" in failures[3].detail
    assert workers(tasks[:1]) == ([1.0], [])


def test_functions_that_cannot_be_loaded_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    for reference, what in (("broken.py:judge", "No module named 'nothing_of_this_name'"), ("none.py:f", "none.py")):
        with pytest.raises(UserError, match=rf"data.rewards: .*{reference}: cannot be loaded: .*{what}"):
            RewardWorkers([f"{tmp_path}/{reference}"], workers=1, seconds=1.0)


FORKING = """
import multiprocessing, os, subprocess, threading, time

def held(*command):
    if os.fork() == 0:  # the copy holds all pipes
        os.setsid()
        if os.fork() == 0:
            os.execvp(command[0], command)
        os._exit(0)

def in_a_process(number):  # a Pool has threads of its own, which hang now and then where a process with threads forks
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(False)
    context.Process(target=lambda: writer.send(abs(number))).start()
    return reader.recv()

def judge(prompt, answer, row):
    match answer:
        case "fork returns":
            os.fork()
        case "fork raises":
            if os.fork() == 0:
                raise ValueError
        case "fork returns later":
            if os.fork() == 0:
                time.sleep(0.3)
        case "processes":
            return sum(map(in_a_process, range(-3, 0)))
        case "thread":
            threading.Thread(target=time.sleep, args=(1000,)).start()
        case "shell":
            subprocess.Popen(["sh", "-c", f"sleep 100.{row['mark']} & sleep 100.{row['mark']}"])
        case "double fork":
            held("sleep", f"100.{row['mark']}")
        case "shell waits":
            subprocess.run(f"trap '' TERM; sleep 100.{row['mark']}; sleep 100.{row['mark']}", shell=True)
        case "parent ends":
            if os.fork():
                os._exit(0)
            time.sleep(1000)
        case "closes all":
            os.closerange(0, 100)
            time.sleep(1000)
        case "writes":
            for number in range(3, 20):
                try:
                    os.write(number, b'{"number": 0, "value": 5.0}\\n')
                except OSError:
                    pass
    return float(row["value"])
"""
KINDS = ("fork returns", "fork raises", "fork returns later", "processes", "thread", "shell", "double fork", "plain")


def left(mark: str) -> list[int]:
    """Processes of functions that still exist."""
    found = list[int]()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"100.{mark}" in path.read_bytes().decode(errors="replace"):
                found.append(int(path.parent.name))
    return found


def until_none_is_left(mark: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while found := left(mark):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")
def test_functions_that_fork_get_their_own_rewards_and_leave_no_process(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FORKING)
    mark = str(os.getpid())
    workers = RewardWorkers([f"{tmp_path}/functions.py:judge"], workers=2, seconds=100.0)  # nothing here waits for it
    tasks = [
        RewardTask(0, KINDS[number % len(KINDS)], {"prompt": "x" * 3000 * number, "value": number, "mark": mark})
        for number in range(6 * len(KINDS))
    ]
    expected = [6.0 if task.answer == "processes" else float(task.row["value"]) for task in tasks]
    assert workers(tasks) == (expected, [])
    assert left(mark)
    workers.close()
    until_none_is_left(mark, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")
def test_a_worker_that_a_function_spoilt_is_replaced_with_all_it_started(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FORKING)
    mark = f"{os.getpid()}0"
    workers = RewardWorkers([f"{tmp_path}/functions.py:judge"], workers=2, seconds=4.0)
    row = {"prompt": "", "value": 7, "mark": mark}
    began = time.monotonic()
    values, failures = workers(
        [RewardTask(0, kind, row) for kind in ("shell waits", "parent ends", "plain", "closes all")]
    )
    assert values == [0, 0, 7, 0] and time.monotonic() < began + 60  # and not the 100 s of the shell's sleep
    assert [failure.reason for failure in failures] == ["took too long", *["ended its process"] * 2]
    until_none_is_left(mark, 0)  # both processes have been replaced
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # of a scheduler, to all processes
        subprocess.run(["pkill", f"-{int(number)}", "-f", f"reward_worker {tmp_path}"], check=True)
    assert workers([RewardTask(0, "processes", row), RewardTask(0, "plain", row)]) == ([6.0, 7.0], [])
    values, failures = workers([RewardTask(0, "writes", row), RewardTask(0, "plain", row)])
    assert values[1] == 7 and [(failure.task, failure.reason) for failure in failures] == [(0, DISTURBED)]
    workers([RewardTask(0, "shell", row), RewardTask(0, "double fork", row)])
    assert wait_until(lambda: bool(left(mark)), 60)  # a fork has its command line from its exec on
    workers.close()
    until_none_is_left(mark, 0)


ASKING = """
import os, sys, time
from megajax.tuning.rewards import RewardWorkers, RewardTask
workers = RewardWorkers(["functions.py:judge"], workers=2, seconds=1000.0)
row = {"prompt": "", "value": 7, "mark": sys.argv[1]}
workers([RewardTask(0, "shell", row), RewardTask(0, "double fork", row)])
print("begun", flush=True)
workers([RewardTask(0, "shell waits", row), RewardTask(0, "shell waits", row)])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_functions_start_ends_with_the_run(tmp_path: Path, number: int) -> None:
    (tmp_path / "functions.py").write_text(FORKING)
    mark = f"{os.getpid()}{int(number)}"
    command = [sys.executable, "-c", ASKING, mark]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        assert run.stdout and run.stdout.readline() == b"begun\n"
        deadline = time.monotonic() + 60
        while len(left(mark)) < 4:
            assert time.monotonic() < deadline, left(mark)
            time.sleep(0.05)
        run.send_signal(number)
        run.wait(100)
    until_none_is_left(mark, 60)
