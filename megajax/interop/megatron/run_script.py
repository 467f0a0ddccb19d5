"""The commands of a launch script, found by bash itself: programs are not started, and their words are recorded.

Bash runs the script in a temporary folder, with copies of the small files beside the script and in the working folder.
The kernel refuses to start programs (confined_bash.py), so no trick of a script can start one. Builtins do run: a
script can read the files that its user can read, and write in the temporary folder. Without Landlock in the kernel, it
can also create files elsewhere, and change those that it opens by >> or >|.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megajax.config.errors import UserError
from megajax.config.read_limits import Budget, Limits
from megajax.interop.megatron import confined_bash

STUBS = Path(__file__).with_name("script_stubs.sh")
SECONDS = 10
RECORDS = Limits(bytes=2**24, entries=10_000)
LEVELS, ENTRIES, SMALL = 3, 5000, 2**16
"""Levels of folders and number of entries that are copied; largest file in bytes. Larger files are empty copies."""


class ScriptRun(NamedTuple):
    """What a script did."""

    commands: tuple[tuple[str, ...], ...]
    """The words of each program, in order, repeated ones once."""
    notes: tuple[str, ...]
    """The last lines that bash and the script wrote, and how the script ended."""


def run_script(script: Path, text: bytes, arguments: Sequence[str], defined: Mapping[str, str]) -> ScriptRun:
    """Run a script that the user trusts. text: its content; defined: its variables. Raises UserError without means."""
    if shutil.which("bash", path=os.defpath) is None:
        raise UserError("--run-script needs bash: install it, or give the expanded command in a file")
    working, folder = Path.cwd(), script.absolute().parent
    with tempfile.TemporaryDirectory(prefix="megajax-script-") as name:
        root = Path(name).resolve()
        work, beside, home, records = (root / part for part in ("work", "beside", "home", "records"))
        copy = work / folder.relative_to(working) if folder.is_relative_to(working) else beside
        _copy(working, work, LEVELS)
        _copy(folder, copy, 1)
        home.mkdir()
        records.mkdir()
        (copy / script.name).write_bytes(text)
        path = copy / script.name if copy == beside else (copy / script.name).relative_to(work)
        user = {name: os.environ[name] for name in ("USER", "LOGNAME") if name in os.environ}
        variables = {"HOME": str(home), "TMPDIR": str(root), **user, **defined}
        variables |= {"PATH": os.devnull, "BASH_ENV": str(STUBS), "MEGAJAX_RECORDS": str(records)}
        status = _run([str(path), *arguments], variables, work, root)
        if status == confined_bash.NO_FILTER and not any(records.iterdir()):
            raise UserError("--run-script needs Linux on x86_64 or arm64, with seccomp, which keeps the script from "
                            "starting programs: give the expanded command in a file instead")  # fmt: skip
        budget, commands = Budget(f"the commands of {script}", RECORDS), []
        for record in sorted(records.iterdir()):
            budget.spend(1, bytes=record.stat().st_size)
            commands.append(_with_origins(record.read_text(errors="replace"), root, working, folder).split("\0")[:-1])
        notes = _with_origins((root / "output").read_text(errors="replace"), root, working, folder).splitlines()[-10:]
    if status != 0:
        notes.append(f"stopped after {SECONDS} seconds" if status is None else f"the script ended with {status}")
    return ScriptRun(tuple(dict.fromkeys(map(tuple, filter(None, commands)))), tuple(notes))


def _run(arguments: Sequence[str], variables: Mapping[str, str], work: Path, root: Path) -> int | None:
    """The exit status; None after SECONDS. No process is left."""
    end, (requests, inherited) = time.monotonic() + SECONDS, socket.socketpair()  # closes with the last process
    with (root / "output").open("ab") as file, inherited:
        process = subprocess.Popen(
            [sys.executable, "-IS", confined_bash.__file__, str(root), "--", *arguments], cwd=work,
            env={**variables, "MEGAJAX_FOLDERS": str(inherited.fileno())}, pass_fds=[inherited.fileno()],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    with suppress(TimeoutError, subprocess.TimeoutExpired), requests, process:
        try:
            requests.settimeout(SECONDS)
            while names := requests.recv(SMALL):  # the stub of mkdir asks
                for folder in (Path(os.fsdecode(name)).resolve() for name in names.split(b"\0") if name):
                    with suppress(OSError):
                        folder.is_relative_to(root) and folder.mkdir(parents=True, exist_ok=True)
                requests.settimeout(max(0.001, end - time.monotonic()))
            return process.wait(max(0, end - time.monotonic()))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return None


def _copy(source: Path, target: Path, levels: int) -> None:
    """Copy folders and small files, the upper levels first, without hidden ones."""
    folders, count = [(source, target, levels)], 0
    for folder, copy, below in folders:
        copy.mkdir(parents=True, exist_ok=True)
        for entry in sorted(folder.glob("[!.]*"))[: ENTRIES - count]:
            count += 1
            with suppress(OSError):
                if entry.is_dir():
                    (copy / entry.name).mkdir(exist_ok=True)
                    if below and not entry.is_symlink():
                        folders.append((entry, copy / entry.name, below - 1))
                elif entry.is_file() and entry.stat().st_size <= SMALL:
                    shutil.copyfile(entry, copy / entry.name)
                else:
                    (copy / entry.name).touch()


def _with_origins(text: str, root: Path, working: Path, folder: Path) -> str:
    """A text in which the copies have their originals' paths."""
    origins = {root / "work": working, root / "beside": folder, root / "home": Path.home(), STUBS: "bash"}
    for copy, origin in {**origins, root: tempfile.gettempdir()}.items():
        text = text.replace(str(copy), str(origin))
    return text
