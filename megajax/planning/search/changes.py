"""From one config to another: as settings of a command line, and as a config file that loads the one and has them."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

from megajax.config.dump import flatten
from megajax.config.errors import UserError
from megajax.config.files import ROOT, SHIPPED, assembled, find, read
from megajax.training.run_config import RunConfig


def base_of(source: str) -> RunConfig:
    """The config of a file alone, whether or not its checks pass. Raises UserError where there is none."""
    file = read(source, ROOT)
    config, problems = assembled(file, ROOT, {})
    if config is None:
        raise UserError(f"{file.name} can't be read without settings: {problems[0]}")
    return config


def settings(old: RunConfig, new: RunConfig) -> list[str]:
    """What to lay over `old` to get `new`, as "parallel.tensor=4"."""
    before, after = flatten(old), flatten(new)
    return [f"{name}={text(value)}" for name, value in after.items() if name not in before or before[name] != value]


def text(value: Any) -> str:
    """A plain value as a command line has it."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case list():
            return ",".join(map(text, value))
    return str(value)


def command(verb: str, source: str, given: list[str]) -> str:
    """The command line that uses them."""
    words = [f"--config={source}", *(f"--{one}" for one in given)]
    return f"python -m megajax.{verb} {shlex.join(words)}"


def check_out(path: Path | None, source: str) -> None:
    """Raises UserError for a file that `write` would refuse, before there is anything to write."""
    if path is None:
        return
    if path.suffix != ".py":
        raise UserError(f"--out={path} must end in .py: it is a config file of a few lines.")
    if not path.resolve().parent.is_dir():
        raise UserError(f"--out={path} can't be written: there is no folder {path.parent}.")
    if _parts(source)[0] == path.resolve():
        raise UserError(f"--out={path} is the config itself.\nGive another file: it will load this one.")


def _parts(source: str) -> tuple[Path, str]:
    """The file of FILE[:function], and the function."""
    name, colon, function = source.rpartition(":")
    return (find(name), function) if colon and function.isidentifier() else (find(source), "")


def write(path: Path, source: str, given: list[str], about: str) -> None:
    """A config file that loads another and lays settings over it. Raises UserError where it can't be written.

    about: its docstring's first line.
    """
    base, function = _parts(source)
    if base.parent == SHIPPED:
        place = json.dumps(f"{base.name}{':' + function if function else ''}")
        imports = ""
    else:
        near = os.path.relpath(base, path.resolve().parent)
        behind = f" + {json.dumps(':' + function)}" if function else ""
        place = f"str(Path(__file__).parent / {json.dumps(near)}){behind}"
        imports = "from pathlib import Path\n\n"
    lines = "".join(f"        {json.dumps(one)},\n" for one in given)
    written = (
        f'"""{about}\n\nTrain:    python -m megajax.train --config={path}\n"""\n\n{imports}'
        "from megajax.config import load\nfrom megajax.training.run_config import RunConfig\n\n\n"
        'def config() -> RunConfig:\n    """The config it was searched for, in another layout."""\n'
        f"    return load(\n        {place},\n{lines}    )\n"
    )
    try:
        path.write_text(written, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from error
