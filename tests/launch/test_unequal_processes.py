"""Two real processes that differ in code, environment or data: both end with 2 and say in what."""

import shutil
from pathlib import Path

from gangs import REPOSITORY, TINY, TRAIN, free_port

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


def two_processes(start, tmp_path, *settings: str, folder: Path = REPOSITORY, **environment: str):
    """Processes 0 and 1 of one run. folder, environment: what process 1 has of its own."""
    port, members = free_port(), []
    for index in (0, 1):
        flags = [f"--coordinator=127.0.0.1:{port}", "--num-processes=2", f"--process-id={index}"]
        command = [*TRAIN, *TINY, "--logging.report=false", f"--run_dir={tmp_path / 'run'}", *flags, *settings]
        own = environment | {"PYTHONPATH": str(folder)} if index else {}
        place = folder if index else REPOSITORY
        members.append(start("sh", "-c", f'cd {place} && exec "$@"', "sh", *command, name=f"output{index}", **own))
    return members


def test_other_code_in_one_process(start, tmp_path):
    folder = other_package(tmp_path / "copy")
    members = two_processes(start, tmp_path, folder=folder)
    assert [member.wait() for member in members] == [2, 2], [member.text for member in members]
    message = members[0].text
    assert "megajax: process 1 (" in message and "differs from process 0 (" in message
    assert "in code: folder " in message and f"{folder}/megajax (process 0: {REPOSITORY}/megajax), optim " in message
    assert "start all processes from the same files" in message and "Traceback" not in message + members[1].text
    assert not (tmp_path / "run").exists()
