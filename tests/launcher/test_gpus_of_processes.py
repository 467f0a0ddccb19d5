"""Processes of one machine divide its GPUs: real processes, started by the launcher, with a folder of device files."""

import json
import os
from pathlib import Path

import pytest
from gangs import REPOSITORY, free_port, launch_on

from megajax.config.errors import ConfigError
from megajax.launch import main

PLACES = REPOSITORY / "tests/launcher/gpu_places.py"
ONE = "NCCL_LAUNCH_ORDER_IMPLICIT=1 (MegaJAX)"


def launch(start, folder: Path, gpus: int, *flags: object, **variables: str):
    """The launcher, and processes that print their GPUs."""
    return launch_on(start, folder, gpus, *flags, "--", "python", PLACES, folder, **variables)


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("NCCL_", "CUDA_VISIBLE"))]:
        monkeypatch.delenv(name)


def places(gang) -> list[list]:
    """GPUs and variables that each process printed, in their order."""
    lines = sorted(line for line in gang.text.splitlines() if line.startswith("["))
    return [json.loads(line.partition(" ")[2]) for line in lines]


def test_one_process_for_each_visible_gpu_is_the_default(start, tmp_path):
    gang = launch(start, tmp_path, 4, CUDA_VISIBLE_DEVICES="3,1")
    assert gang.wait() == 0, gang.text
    assert "megajax.launch: 2 visible GPUs, so 2 processes with 1 GPU each; --processes=N" in gang.text
    assert places(gang) == [[[0], ONE], [[1], ONE]]


REFUSED = {
    "more processes than GPUs": (
        *(1, ["--processes=2", "--max-restarts=3"], {}),
        "has 2 processes and 1 visible GPU, but each process needs one: start 1 there",
    ),
    "not divisible": (4, ["--devices-per-process=3"], {}, "--devices-per-process=3 does not divide 4 visible GPUs"),
    "on the CPU": (4, [], {"JAX_PLATFORMS": "cpu"}, "--processes: must be given where no GPU is visible"),
}
"""GPUs, flags, variables and the message."""


@pytest.mark.parametrize("case", REFUSED)
def test_numbers_that_do_not_fit_end_with_one_message(start, tmp_path, case):
    gpus, flags, variables, message = REFUSED[case]
    gang = launch(start, tmp_path, gpus, *flags, **variables)
    assert gang.wait() == 2 and message in gang.text
    assert "Traceback" not in gang.text and "restart 1" not in gang.text


@pytest.mark.slow
def test_two_gpus_for_each_of_two(start, tmp_path):
    gang = launch(start, tmp_path, 4, "--devices-per-process=2", NCCL_LAUNCH_MODE="PARALLEL")
    assert gang.wait() == 0, gang.text
    assert "4 visible GPUs, so 2 processes with 2 GPUs each" in gang.text
    # JAX_LOCAL_DEVICE_IDS of each gives its GPUs; jax reads it.
    assert places(gang) == [[None, "NCCL_LAUNCH_MODE=PARALLEL (environment)"]] * 2


@pytest.mark.slow
def test_two_launchers_start_one_run(start, tmp_path):
    """The launchers of two pods know nothing of each other; here both are on one machine."""
    common = ("--machines=2", f"--coordinator=127.0.0.1:{free_port()}", "--processes=1")
    first, second = (launch(start, tmp_path, 0, *common, f"--machine={n}", name=f"machine{n}") for n in range(2))
    assert [first.wait(), second.wait()] == [0, 0], first.text + second.text
    assert "[0] [null" in first.text and "[1] [null" in second.text


MACHINES = {
    "no place": (["--machines=2", "--coordinator=a:1"], "--machine: must be one of 2 machines, 0 to 1"),
    "no coordinator": (["--machines=2", "--machine=0"], "--coordinator: must be given with --machines"),
    "no port": (["--machines=2", "--machine=0", "--coordinator=a"], "--coordinator: must be HOST:PORT, got 'a'"),
    "restarts": (["--machines=2", "--machine=0", "--coordinator=a:1", "--max-restarts=1"], "of several machines alone"),
    "one machine": (["--coordinator=a:1"], "--coordinator: has no meaning without --machines"),
    "none": (["--machines=0"], "--machines: must be at least 1, got 0"),
}


@pytest.mark.parametrize("case", MACHINES)
def test_impossible_machines(case):
    flags, message = MACHINES[case]
    with pytest.raises(ConfigError) as refused:
        main([*flags, "--processes=2", "--", "true"])
    assert message in str(refused.value)
