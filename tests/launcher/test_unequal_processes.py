"""Two real processes that differ in code or data: both end with 2 and name the difference."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from gangs import REPOSITORY, TINY, TRAIN, free_port
from token_files import write

RULE = "p - lr * direction"


def other_package(folder: Path) -> Path:
    """A folder with another copy of MegaJAX: Adam's update is three times as long."""
    package = REPOSITORY / "megajax"
    (folder / "megajax").mkdir(parents=True)
    for entry in package.iterdir():
        if entry.name != "optim":
            (folder / "megajax" / entry.name).symlink_to(entry)
    shutil.copytree(package / "optim", folder / "megajax/optim", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "megajax/optim/optimizer.py"
    text = file.read_text()
    assert RULE in text
    file.write_text(text.replace(RULE, RULE.replace("lr", "3 * lr")))
    (folder / "configs").symlink_to(REPOSITORY / "configs")
    return folder


def two_processes(start, tmp_path, *settings: str, places: tuple[Path, Path], package: Path = REPOSITORY):
    """Processes 0 and 1 of one run. places: their working folders. package: that of process 1."""
    port, members = free_port(), []
    for index, place in enumerate(places):
        flags = [f"--coordinator=127.0.0.1:{port}", "--num-processes=2", f"--process-id={index}"]
        command = [*TRAIN, *TINY, "--logging.report=false", f"--run_dir={tmp_path / 'run'}", *flags, *settings]
        environment = {"PYTHONPATH": str(package)} if index else {}
        shell = ("sh", "-c", f'cd {place} && exec "$@"', "sh")
        members.append(start(*shell, *command, name=f"output{index}", **environment))
    return members


@pytest.mark.slow
def test_other_code_in_one_process(start, tmp_path):
    folder = other_package(tmp_path / "copy")
    members = two_processes(start, tmp_path, places=(REPOSITORY, folder), package=folder)
    assert [member.wait() for member in members] == [2, 2], [member.text for member in members]
    message = members[0].text
    assert "megajax: process 1 (" in message and "differs from process 0 (" in message
    # Long paths are shortened.
    assert f"in code: folder {str(folder)[:40]}" in message and f"(process 0: {str(REPOSITORY)[:40]}" in message
    assert "), optim " in message
    assert "start all processes from the same files" in message and "Traceback" not in message + members[1].text
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_other_data_in_one_process(start, tmp_path):
    """The files have the same size, and the same path from the working folders of the processes."""
    places = (tmp_path / "first", tmp_path / "second")
    for number, place in enumerate(places):
        place.mkdir()
        write(place / "text", [(np.arange(document, document + 100) + 7 * number) % 60 for document in range(200)])
    data = ("--data.type=BlendConfig", "--data.paths=text", "--data.split=1", f"--data.cache_dir={tmp_path / 'cache'}")
    short = ("--evaluation.every=none", "--evaluation.at_end=false", "--steps=3", "--schedule.decay_steps=3")
    members = two_processes(start, tmp_path, *data, *short, places=places)
    assert [member.wait() for member in members] == [2, 2], [member.text for member in members]
    for member in members:
        assert "process 1 reads other files than process 0. From process 0 to process 1: " in member.text
        assert "text.bin: checksum of a sample of its content" in member.text
