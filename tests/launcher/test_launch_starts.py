"""Failing starts of `megajax.train` in several processes: one message, in time, and nothing written."""

import socket

import pytest
from gangs import TINY, TRAIN, free_port, launcher

from megajax.config.errors import UserError
from megajax.launch import main


def member(start, tmp_path, index: int, port: int, *settings: str, count: int = 2):
    flags = [f"--coordinator=127.0.0.1:{port}", f"--num-processes={count}", f"--process-id={index}"]
    return start(*TRAIN, *TINY, f"--run_dir={tmp_path / 'run'}", *flags, *settings, name=f"output{index}")


def test_a_missing_process(start, tmp_path):
    port = free_port()
    members = [member(start, tmp_path, index, port, "--init-timeout=8", count=3) for index in (0, 2)]
    assert [member.wait() for member in members] == [1, 1]
    first, second = (member.text for member in members)
    assert f"megajax: process 1 of 3 did not connect to 127.0.0.1:{port} within 8 s" in first
    assert "Traceback" not in first + second and second == ""
    assert not (tmp_path / "run").exists()


def test_a_config_that_one_process_lacks(start, tmp_path):
    """Process 0 can only report that the process is missing, and refers to its own message."""
    flags = ("--coordinator=127.0.0.1:1", "--num-processes=2", "--process-id=1")
    second = start(*TRAIN, f"--config={tmp_path / 'nowhere.py'}", *flags)
    assert second.wait(100) == 2
    assert second.text == f"process 1: --config: no config file {tmp_path / 'nowhere.py'} in {tmp_path}\n"


def test_the_port_of_process_0_is_in_use(start, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        first = member(start, tmp_path, 0, port)
        assert first.wait(100) == 2
    assert f"megajax: port {port} of 127.0.0.1 is in use" in first.text
    assert not (tmp_path / "run").exists()


LAUNCHES = {
    "no command": (["--processes=2"], "needs a command to start"),
    "no number": (["--", "true"], "--processes: must be given where no GPU is visible"),
    "too many": (["--processes=10000000", "--", "true"], "--processes: 10000000 processes need 4 open files each"),
    "none": (["--processes=0", "--", "true"], "--processes: must be at least 1, got 0"),
    "no such program": (["--processes=2", "--", "/no/such/program"], "/no/such/program cannot be started"),
    "no port": (["--processes=2", "--coordinator-port=99999", "--", "true"], "must be between 1 and 65535"),
    "no time": (["--processes=1", "--beat-timeout=0", "--", "true"], "--beat-timeout: must be above 0, got 0"),
    "misspelt": (["--proceses=2", "--processes=1", "--", "true"], "did you mean processes?"),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_an_invalid_launch(case, monkeypatch):
    arguments, message = LAUNCHES[case]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(UserError) as refused:
        main(arguments)
    assert message in str(refused.value) and refused.value.code == 2


def test_the_launchers_port_is_in_use(start):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        gang = start(*launcher(f"--coordinator-port={port}"), "true")
        assert gang.wait(100) == 2
    assert f"--coordinator-port={port}: Address already in use" in gang.text


def test_an_invalid_setting_is_reported_once(start, tmp_path):
    gang = start(*launcher(processes=3), *TRAIN, *TINY, "--steps=many", f"--run_dir={tmp_path / 'run'}")
    assert gang.wait(100) == 2
    message = "steps: expected a whole number, got 'many'"
    *lines, last = gang.text.splitlines()
    assert "\n".join(lines).count(message) == 1, gang.text
    assert last.startswith("megajax.launch: process ") and message in last  # The cause of the gang's end comes last.
