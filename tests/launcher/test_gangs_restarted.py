"""Restarts of real gangs, of a program that behaves like training and starts at once: see fake_train.py."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gangs import REPOSITORY, Started, alive, children, launcher
from run_folder import events, saved

from megajax.launcher.gang import write_or_drop

FAKE = Path(__file__).with_name("fake_train.py")
SRUN = Path(__file__).with_name("fake_srun.py")
QUICK = ("--backoff=0.1", "--max-restarts=9")


def train(start, run_dir: Path, *options: str, processes: int = 2, **environment: str) -> Started:
    return start(*launcher(*options, processes=processes), sys.executable, FAKE, run_dir, **environment)


def losses(run_dir: Path) -> list[tuple[int, ...]]:
    """(attempt, step) in the order in which they were trained."""
    lines = (run_dir / "losses.txt").read_text().splitlines()
    return [tuple(map(int, line.split()[:2])) for line in lines]


def whole(attempts: dict[int, range]) -> list[tuple[int, int]]:
    return [(attempt, step) for attempt, steps in attempts.items() for step in steps]


def last_line(gang: Started) -> str:
    return gang.text.splitlines()[-1]


@pytest.mark.smoke
def test_a_killed_process_is_named_and_the_gang_resumes_from_its_checkpoint(start, tmp_path):
    """The launcher learns the step from the beats."""
    gang = train(start, tmp_path, *QUICK, FAULTS="kill:1@7#1")
    assert gang.wait() == 0, gang.text
    assert losses(tmp_path) == whole({1: range(1, 7), 2: range(6, 11)})
    lost, end, restart = events(tmp_path)
    assert {name: end[name] for name in ("event", "attempt", "code", "cause", "process", "step", "by")} == {
        **{"event": "attempt_end", "attempt": 1, "code": 1, "cause": "lost", "process": 1, "step": 7, "by": "launcher"}
    }
    assert end["text"] == "process 1 killed by SIGKILL at step 7"
    assert (lost["event"], lost["process"], lost["cause"], lost["step"]) == ("lost", 1, "killed by SIGKILL", 7)
    fields = {name: restart[name] for name in ("event", "attempt", "after_code", "process", "step", "processes")}
    assert fields == {"event": "restart", "attempt": 2, "after_code": 1, "process": 1, "step": 7, "processes": 2}
    assert restart["cause"].startswith("process 1 killed by SIGKILL after ") and 0 < restart["seconds_down"] < 200
    lines = [line for line in gang.text.splitlines() if line.startswith("megajax.launch")]
    assert len(lines) == 1 and lines[0].startswith("megajax.launch: attempt 1: process 1 killed by SIGKILL after ")
    assert "; restart 1 of 9 in 0.1 s, from step 5" in lines[0]


@pytest.mark.slow
def test_process_0_killed_and_its_peers_follow(start, tmp_path):
    """Errors of the other processes are reported as consequences, whichever came first."""
    gang = train(start, tmp_path, *QUICK, processes=3, FAULTS="kill:0@7#1,kill:0@8#2")
    assert gang.wait() == 0, gang.text
    assert [event["process"] for event in events(tmp_path) if event["event"] == "restart"] == [0, 0]
    assert [attempt for attempt, step in losses(tmp_path) if step == 6] == [1, 2, 3]


@pytest.mark.slow
def test_a_crash_loop_ends_with_93(start, tmp_path):
    """A gang that fails again and again at the same step is not started for ever."""
    gang = train(start, tmp_path, *QUICK, FAULTS="1:1@7#*")
    assert gang.wait() == 93, gang.text
    assert "no progress past step 5 in 3 attempts" in last_line(gang)
    assert "in 0.1 s" in gang.text and "in 0.2 s" in gang.text
    assert [event["event"] for event in events(tmp_path)] == [
        *3 * ["attempt_end", "restart"],
        *("attempt_end", "supervisor_stop"),
    ]
    assert [(event["attempt"], event["process"]) for event in events(tmp_path, "attempt_end")] == [
        *((1, 1), (2, 1), (3, 1), (4, 1))
    ]
    assert events(tmp_path)[-1]["code"] == 93
    assert gang.text.count("failed: fault 1") == 4  # The first attempt saved step 5.


@pytest.mark.slow
def test_exit_codes_that_are_retried_and_one_that_never_is(start, tmp_path):
    gang = train(start, tmp_path, *QUICK, FAULTS="16:1@3#1,124:1@7#2,abort:1@7#3,17:1@7#4")
    assert gang.wait() == 17, gang.text
    *restarts, stop = events(tmp_path, "restart", "supervisor_stop")
    assert [(event["process"], event["after_code"]) for event in restarts] == [(1, 16), (1, 124), (1, 1)]
    assert stop["event"] == "supervisor_stop"
    assert "process 1 exited with code 17 after " in last_line(gang)
    assert ": fault 17; the others were stopped; exit code 17 is never retried" in last_line(gang)


@pytest.mark.slow
def test_without_restarts_the_gang_ends_with_the_last_lines_of_the_lost_process(start, tmp_path):
    gang = train(start, tmp_path, f"--log-dir={tmp_path / 'logs'}", FAULTS="kill:0@7#1")
    assert gang.wait() == 1, gang.text
    assert "; restart " not in gang.text
    assert [event["event"] for event in events(tmp_path)] == ["lost", "attempt_end"]
    assert f"megajax.launch: the last lines of {tmp_path / 'logs/process_0.log'}:\n    step 1\n" in gang.text


@pytest.mark.slow
def test_a_stopped_process_is_blamed_and_those_that_wait_for_it_are_not(start, tmp_path):
    """No watchdog of a process fires here: the launcher notices, and collects the stacks of the others."""
    gang = train(start, tmp_path, *QUICK, "--beat-timeout=5", processes=3, FAULTS="stop:1@7#1")
    assert gang.wait() == 0, gang.text
    lost, restart = events(tmp_path, "lost", "restart")
    assert lost["process"] == 1 and lost["cause"].startswith("is stopped (state T), its last beat is ")
    assert restart["after_code"] == 124
    assert f"stacks of its processes: {tmp_path}/hangs/process_0.txt, {tmp_path}/hangs/process_2.txt" in gang.text


@pytest.mark.slow
def test_a_stuck_process_is_blamed_and_the_one_whose_watchdog_fired_is_not(start, tmp_path):
    """Process 0 waits in its collective of step 7 and ends with 124, process 1 waits for its rows."""
    gang = train(start, tmp_path, *QUICK, processes=3, FAULTS="stuck:1@7#1", FAKE_WATCHDOG="5")
    assert gang.wait() == 0, gang.text
    restart = events(tmp_path)[-1]
    assert (restart["process"], restart["step"], restart["after_code"]) == (1, 7, 124)
    assert "process 1 holds up the others: it has been waiting for the rows of step 7 for " in restart["cause"]
    assert str(tmp_path / "hangs/process_1.txt") in gang.text
    assert "in inject" in (tmp_path / "hangs/process_1.txt").read_text()


SLOW_TO_BEGIN = """
import os, signal, sys, time
from megajax.faults.beats import Beat, attempt_number, beats_folder as folder
index, kind = int(os.environ["MEGAJAX_PROCESS_ID"]), sys.argv[1]
if attempt_number() == 2:
    sys.exit()
if index == 1 and kind == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
while index == 1 and kind == "busy" and time.monotonic() < float(os.environ["UNTIL"]):
    pass
if index == 1 and kind == "hanging":
    time.sleep(1000)
for number in range(120 if index != 1 else 10):
    Beat(process=index, pid=os.getpid(), host=os.uname().nodename, time=time.time(), phase="start").write(folder())
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("stopped", r"process 1 is stopped \(state T\) for \d+ s, before its first heartbeat; the others were "),
        pytest.param(
            "hanging", r"process 1 does not begin: .* nothing done for \d+ s \(--beat-t", marks=pytest.mark.slow
        ),
        pytest.param("busy", "", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_does_not_begin_is_named(start, tmp_path, kind, text):
    """The others wait for it, and know only that it is missing."""
    (tmp_path / "slow.py").write_text(SLOW_TO_BEGIN)
    wrapped = ("sh", "-c", '"$0" "$@"; exit $?', sys.executable, tmp_path / "slow.py", kind)
    gang = start(*launcher(*QUICK, "--beat-timeout=5", processes=3), *wrapped, UNTIL=str(time.monotonic() + 10))
    assert gang.wait(100) == 0, gang.text
    assert bool(text) == bool(gang.text) and re.search(text, gang.text), gang.text
    assert "the beginning" not in gang.text  # the run folder is not known


ENDS_BEFORE_IT_BEGINS = """
import os, sys, time
from megajax.faults.beats import Beat, attempt_number, beats_folder
if attempt_number() == 1:
    Beat(process=0, pid=os.getpid(), host="here", time=time.time(), run_dir=sys.argv[1]).write(beats_folder())
    os.makedirs(f"{sys.argv[1]}/checkpoints/00000006")
    time.sleep(1)
sys.exit(attempt_number() < 3)
"""


def test_a_restart_after_an_attempt_without_a_heartbeat_names_the_step(start, tmp_path):
    gang = start(*launcher(*QUICK, processes=1), sys.executable, "-c", ENDS_BEFORE_IT_BEGINS, tmp_path / "run")
    assert gang.wait(100) == 0, gang.text
    assert [line.rpartition(", ")[2] for line in gang.text.splitlines()] == ["from step 6"] * 2


@pytest.mark.slow
def test_fewer_processes_when_one_fails_repeatedly(start, tmp_path):
    """The process at place 1 never gets further; the others take places with their own numbers."""
    gang = train(start, tmp_path, *QUICK, "--min-processes=2", processes=3, FAULTS="1:1@7#*")
    assert gang.wait() == 0, gang.text
    # The first attempt saved step 5, so the second is the first without progress.
    assert [event["processes"] for event in events(tmp_path, "restart")] == [3, 2]
    assert "with 2 processes (places 0, 2): the one in place 1 keeps failing" in gang.text
    assert gang.text.count("elastic") == 2


@pytest.mark.slow
def test_uneven_ends_are_success(start, tmp_path):
    """No process waits for another, and silence at the end is no hang."""
    options = ("--beat-timeout=5", f"--log-dir={tmp_path / 'logs'}")
    gang = train(start, tmp_path, *QUICK, *options, FAULTS="absent:1@0#1")
    assert gang.wait() == 0, gang.text
    assert gang.text == "" and events(tmp_path) == []
    assert "step 10" in (tmp_path / "logs/process_0.log").read_text() and (tmp_path / "logs/process_1.log").exists()


@pytest.mark.slow
def test_a_signal_during_the_delay_ends_it(start, tmp_path):
    gang = train(start, tmp_path, "--max-restarts=9", "--backoff=6000", FAULTS="1:1@7#1")
    gang.until(lambda: "restart 1 of 9" in gang.text)
    gang.process.send_signal(signal.SIGINT)
    assert gang.wait() == 130
    assert "SIGINT asked for the end before the restart" in last_line(gang)


@pytest.mark.slow
@pytest.mark.parametrize("code", [75, 1])
def test_a_requested_end_is_not_restarted(start, tmp_path, code):
    stop = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))"
    script = f"import signal, sys, time; {stop}; print('up'); time.sleep(600)"
    gang = start(*launcher(*QUICK), sys.executable, "-c", script)
    gang.until(lambda: gang.text.count("up") == 2)
    gang.process.send_signal(signal.SIGTERM)
    assert gang.wait() == code, gang.text
    assert "restart 1" not in gang.text


@pytest.mark.slow
def test_a_second_ctrl_c_ends_even_processes_that_ignore_the_first(start):
    ignore = "signal.signal(signal.SIGINT, lambda *_: print('ignored'))"
    script = f"import signal, time; {ignore}; print('up')\ntime.sleep(600)"
    gang = start(*launcher(*QUICK), sys.executable, "-c", script)
    gang.until(lambda: gang.text.count("up") == 2)
    gang.process.send_signal(signal.SIGINT)
    gang.until(lambda: gang.text.count("ignored") == 2)
    time.sleep(0.5)  # Two that arrive within a quarter of a second count as one.
    gang.process.send_signal(signal.SIGINT)
    assert gang.wait() == 1, gang.text
    assert "killed by SIGKILL" in last_line(gang)


def test_a_reader_that_closes_does_not_end_training(tmp_path):
    """`... | head -1`: later output is dropped, and the exit code is that of the training."""
    command = [*map(str, launcher()), sys.executable, str(FAKE), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    gang = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY, env=environment)
    assert gang.stdout is not None and gang.stderr is not None
    assert gang.stdout.readline() == b"[0] step 1\n"
    gang.stdout.close()
    gang.stderr.close()
    assert gang.wait() == 0
    assert saved(tmp_path) == [5, 10]


@pytest.mark.slow
def test_every_attempt_has_another_port_and_its_number(start, tmp_path):
    script = (
        "import os, sys; print(os.environ['MEGAJAX_COORDINATOR'], os.environ['MEGAJAX_ATTEMPT'], "
        "os.path.isdir(os.environ['MEGAJAX_BEATS']), os.listdir(os.environ['MEGAJAX_BEATS'])); sys.exit(1)"
    )
    gang = start(*launcher("--max-restarts=2", "--backoff=0.1", processes=1), sys.executable, "-c", script)
    assert gang.wait() == 1
    lines = [line.split() for line in gang.text.splitlines() if line.startswith("[0]")]
    assert [line[2:] for line in lines] == [[str(attempt), "True", "[]"] for attempt in (1, 2, 3)]
    assert len({line[1] for line in lines}) > 1
    assert last_line(gang).endswith("all --max-restarts=2 restarts are used up")


def scheduled(start, run_dir: Path, *options: str, tasks: int = 2, **environment: str) -> Started:
    command = (sys.executable, "-m", "megajax.launch", "--scheduler", f"--beats={run_dir / 'beats'}", *options, "--")
    return start(*command, sys.executable, SRUN, tasks, sys.executable, FAKE, run_dir, **environment)


@pytest.mark.slow
def test_a_scheduler_runs_the_processes(start, tmp_path):
    """srun ends with 137 whatever the first failure was: beats identify it, and a code that is never retried."""
    gang = scheduled(start, tmp_path, *QUICK, FAULTS="1:1@7#1,kill:1@8#2,17:1@9#3")
    assert gang.wait() == 17, gang.text
    assert last_line(gang).endswith("exit code 17 is never retried")
    restarts = [event for event in events(tmp_path) if event["event"] == "restart"]
    assert [event["process"] for event in restarts] == [1, 1]
    assert [event["attempt"] for event in restarts] == [2, 3]
    assert "process 1 exited with code 1 after " in restarts[0]["cause"]
    assert sorted(path.name for path in (tmp_path / "beats").iterdir()) == ["attempt_1", "attempt_2", "attempt_3"]


@pytest.mark.parametrize(("handled", "code"), [("signal.SIGUSR1", 75), ("signal.SIGTERM", 143)])
def test_a_scheduler_gets_the_signal_that_it_passes_on(start, tmp_path, handled, code):
    """SIGTERM would make srun kill its tasks. Those that handle no signal yet are no crash either."""
    script = f"import signal, time, os; signal.signal({handled}, lambda *_: os._exit(75)); print('up')\ntime.sleep(600)"
    words = (sys.executable, "-m", "megajax.launch", "--scheduler", f"--beats={tmp_path}", "--max-restarts=3", "--")
    gang = start(*words, sys.executable, SRUN, 2, sys.executable, "-uc", script)
    gang.until(lambda: gang.text.count("up") == 2)
    gang.process.send_signal(signal.SIGTERM)
    assert gang.wait() == code, gang.text


@pytest.mark.slow
def test_a_hang_under_a_scheduler(start, tmp_path):
    gang = scheduled(start, tmp_path, "--watchdog-timeout=5", FAULTS="stuck:1@7#1", STOPS="1")
    assert gang.wait() == 124, gang.text
    assert "process 1 holds up the others" in last_line(gang)
    assert str(tmp_path / "hangs/process_1.txt") in gang.text


@pytest.mark.slow
def test_a_scheduler_is_asked_to_end_its_own_processes(start, tmp_path):
    """Processes on other machines would outlive a killed srun. These are frozen: SIGTERM has no effect."""
    gang = scheduled(start, tmp_path, "--beat-timeout=5", FAULTS="stop:0@7#1,stop:1@7#1")
    gang.until(lambda: (tmp_path / "losses.txt").exists())
    tasks = [task for srun in gang.children() for task in children(srun)]
    assert len(tasks) == 2 and gang.wait() == 124, gang.text
    assert " is stopped (state T)" in last_line(gang) and not any(map(alive, tasks))


@pytest.mark.slow
def test_a_gang_that_was_stopped_with_its_launcher_continues(start, tmp_path):
    """After Ctrl-Z, a paused container or a sleeping machine beats are old, but no process hangs."""
    schedule = ",".join(f"late:0@{step}#1" for step in range(1, 11))
    gang = train(start, tmp_path, "--beat-timeout=6", FAULTS=schedule)
    gang.until(lambda: (tmp_path / "losses.txt").exists())
    everyone = (gang.process.pid, *gang.children())
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(8.0)
    for pid in everyone:  # The launcher first: then it sees the old beats.
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.2)
    assert gang.wait() == 0, gang.text
    assert losses(tmp_path) == whole({1: range(1, 11)})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_before_processes_handle_signals_is_no_crash(start, number):
    """The code is not 1, with which schedulers would start it again."""
    script = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); print('up')\ntime.sleep(600)"
    gang = start(*launcher("--max-restarts=3"), sys.executable, "-c", script)
    gang.until(lambda: gang.text.count("up") == 2)
    gang.process.send_signal(number)
    assert gang.wait() == 128 + number, gang.text
    assert f"killed by {number.name} after" in last_line(gang) and f"{number.name} asked for the end" in last_line(gang)


def test_output_continues_after_a_full_disk(tmp_path, monkeypatch):
    """A full disk may have space again; only a closed reader does not come back."""
    real, full = os.write, [True, False]

    def write(descriptor: int, text: bytes) -> int:
        if full.pop(0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, text)

    path = tmp_path / "log"
    with path.open("wb") as log:
        monkeypatch.setattr("megajax.launcher.gang.os.write", write)
        write_or_drop(log.fileno(), b"lost\n")
        write_or_drop(log.fileno(), b"written\n")
    assert path.read_text() == "written\n"
