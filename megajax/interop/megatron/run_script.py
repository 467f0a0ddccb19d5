"""The commands of a launch script, found by bash itself: programs are not started, and their words are recorded.

Bash runs the script in a temporary folder, with copies of the small files beside the script and in the working folder.
The kernel refuses to start programs (confined_bash.py), so no trick of a script can start one. Builtins do run: a
script can read the files that its user can read, and write in the temporary folder. Without Landlock in the kernel, it
can also create files elsewhere, and change those that it opens by >> or >|.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megajax.config.errors import UserError
from megajax.config.read_limits import Budget, Limits, read_file
from megajax.interop.megatron import confined_bash

STUBS = Path(__file__).with_name("script_stubs.sh")
SECONDS = 10
RECORDS = Limits(bytes=2**24, entries=10_000)
LEVELS, ENTRIES, SMALL = 3, 5000, 2**16
"""Levels of folders and number of entries that are copied; largest file in bytes. Larger files are empty copies."""


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """What a script did."""

    commands: tuple[tuple[str, ...], ...]
    """The words of each program, in order, repeated ones once."""
    notes: tuple[str, ...]
    """The last messages of bash and the script."""


def run_script(script: Path, arguments: Sequence[str] = (), defined: Mapping[str, str] | None = None) -> ScriptRun:
    """Run a script that the user trusts. defined: its environment variables.

    Raises:
        UserError: there is no bash, or the kernel can't refuse programs.
        OSError: the script can't be read.
    """
    if shutil.which("bash", path=os.defpath) is None:
        raise UserError("--run-script needs bash: install it, or give the expanded command in a file")
    text, working, folder = read_file(script, pipes=True), Path.cwd(), script.absolute().parent
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
        variables = {"HOME": str(home), "TMPDIR": str(root), **(defined or {})}
        variables |= {"PATH": os.devnull, "BASH_ENV": str(STUBS), "MEGAJAX_RECORDS": str(records)}
        status = _run([str(root), "--", str(path), *arguments], variables, work, root / "errors")
        if status == confined_bash.NO_FILTER and not any(records.iterdir()):
            raise UserError("--run-script needs Linux on x86_64 or arm64, with seccomp, which keeps the script from "
                            "starting programs: give the expanded command in a file instead")  # fmt: skip
        budget, commands = Budget(f"the commands of {script}", RECORDS), []
        for record in sorted(records.iterdir()):
            budget.spend(1, bytes=record.stat().st_size)
            commands.append(_with_origins(record.read_text(errors="replace"), root, working, folder).split("\0")[:-1])
        messages = _with_origins((root / "errors").read_text(errors="replace"), root, working, folder).splitlines()
    notes = [*messages[-10:], *([f"stopped after {SECONDS} seconds"] if status is None else [])]
    return ScriptRun(tuple(dict.fromkeys(map(tuple, filter(None, commands)))), tuple(notes))


def _run(arguments: Sequence[str], variables: Mapping[str, str], work: Path, errors: Path) -> int | None:
    """The exit status; None after SECONDS. No process is left."""
    command, nothing = [sys.executable, "-IS", confined_bash.__file__, *arguments], subprocess.DEVNULL
    with errors.open("wb") as file:
        process = subprocess.Popen(
            command, env=variables, cwd=work, stdin=nothing, stdout=nothing, stderr=file, start_new_session=True
        )
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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
    for copy, origin in {
        root / "work": working,
        root / "beside": folder,
        root / "home": Path.home(),
        STUBS: "bash",
    }.items():
        text = text.replace(str(copy), str(origin))
    return text
