"""A command that was started alone on several GPUs starts again with one process for each."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from megajax import launch, train
from megajax.launcher.one_process_each import gpus_here, processes_to_start


def device_folder(folder: Path, gpus: int) -> Path:
    for number in range(gpus):
        (folder / f"nvidia{number}").touch()
    return folder


@pytest.mark.parametrize(
    ("gpus", "environment", "processes"),
    [
        (8, {}, 8),
        (8, {"CUDA_VISIBLE_DEVICES": "2,5"}, 2),
        (1, {}, None),
        (0, {}, None),
        (8, {"JAX_PLATFORMS": "cpu"}, None),
        (8, {"SLURM_PROCID": "0"}, None),
        (8, {"MEGAJAX_PROCESS_ID": "3"}, None),
        (8, {"MEGAJAX_NUM_PROCESSES": "1"}, None),
        (8, {"JAX_LOCAL_DEVICE_IDS": "0,1"}, None),
    ],
)
def test_one_process_for_each_gpu_unless_a_launcher_or_the_user_decides(
    gpus: int, environment: dict, processes: int | None, tmp_path: Path
) -> None:
    assert processes_to_start(environment, device_folder(tmp_path, gpus)) == processes
    if processes is not None:
        assert gpus_here(environment, tmp_path) == processes


class Replaced(Exception):
    """The process runs another program from here on."""


@pytest.mark.parametrize("alone", [True, False])
def test_training_replaces_its_process_after_the_settings_are_checked(
    alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def replace_process(path: str, command: list[str]) -> None:
        raise Replaced(command)

    def counted() -> int:
        raise Replaced("one process")

    monkeypatch.setattr(os, "execv", replace_process)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    folder, gangs = device_folder(tmp_path, 4), list[Any]()
    here = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    counts = {"MEGAJAX_NUM_PROCESSES": "1"} if alone else {}
    monkeypatch.setattr(train, "processes_to_start", lambda: processes_to_start({**here, **counts}, folder))
    monkeypatch.setattr(train, "gpus_here", counted)
    with pytest.raises(Replaced) as replaced:
        train.main(["--config=quickstart.py"])
    if alone:
        assert str(replaced.value) == "one process"
        return
    assert "a process for each of 4 GPUs; --num-processes=1 drives all in one" in capsys.readouterr().err
    command = replaced.value.args[0]
    assert command[:5] == [sys.executable, "-m", "megajax", "launch", "--processes=4"]
    monkeypatch.setattr(launch, "run", lambda gang, *rest: gangs.append(gang) or 0)
    assert launch.main(command[4:], tmp_path) == 0
    assert gangs[0].processes == 4
    assert gangs[0].command == [sys.executable, "-m", "megajax.train", "--config=quickstart.py"]
