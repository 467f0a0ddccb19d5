"""The words of a command line as settings, before they are converted to the types of a config."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megajax.config.config_files import SUFFIXES, split_source
from megajax.config.errors import Problem
from megajax.config.parse_scalar import Text
from megajax.config.settings_tree import Additions, Mark, setting

XLA, XLA_OPTIONS = "xla", "xla.options"
"""The flag for single compiler options, and the setting that holds them."""


def read_arguments(argv: Sequence[str], lists: Iterable[str] = ()) -> tuple[dict[str, Any], list[Problem], list[str]]:
    """Name -> value, problems, and warnings of repeated names, of which the last one counts; in `lists`, all count.

    A name takes the next argument unless that is a name too.
    """
    settings, problems, warnings, arguments = dict[str, Any](), list[Problem](), list[str](), list(argv)
    while arguments:
        argument = arguments.pop(0)
        if argument in ("-h", "--help"):
            argument = "--help"
        if not re.match(r"--[A-Za-z]", argument):
            problems.append(Problem(argument or "''", "unexpected argument", _meant(argument)))
            is_short = re.match(r"-[A-Za-z]", argument) and "=" not in argument
            if is_short and arguments and not arguments[0].startswith("-"):
                arguments.pop(0)  # its value
            continue
        name, value = setting(argument)
        if value is Mark.BARE and arguments and not arguments[0].startswith("--"):
            value = Text(arguments.pop(0))
        if name == XLA:
            problems += _add_options(settings, value)
            continue
        if name in settings and name in lists and not isinstance(value, Mark):
            value = Text(f"{settings[name]},{value}")
        elif name in settings:
            text = f"--{name} is given more than once; the last one counts ({_value_text(value)})"
            warnings.append(f"warning: {text}\n")
        settings.pop(name, None)
        settings[name] = value
    return settings, problems, warnings


def _meant(argument: str) -> str:
    """A hint for an argument that is no name of a setting."""
    if re.match(r"-[A-Za-z]", argument):
        return f"did you mean -{argument}?"
    if re.match(r"[A-Za-z][\w.-]*=", argument):
        return f"did you mean --{argument}?"
    is_file = Path(split_source(argument)[0]).suffix in SUFFIXES
    return f"did you mean --config={argument}?" if is_file else "settings are written --name=value"


def _add_options(settings: dict[str, Any], value: Text | Mark) -> list[Problem]:
    """Add --xla=name=value,name=value to the settings. It may be repeated, and names may start with --."""
    parts = re.split(r"[,\s]+(?=(?:--)?\w+=)", "" if isinstance(value, Mark) else value.strip())
    pairs = [part.removeprefix("--").partition("=") for part in parts]
    if not all(name and equals for name, equals, _ in pairs):
        message = f"expected name=value, got {_value_text(value)!r}"
        return [Problem(f"--{XLA}", message, "e.g. --xla=xla_gpu_enable_triton_gemm=false; docs/compiler.md")]
    # An empty Text would be read as none.
    options = {name: Text(text) if text else "" for name, _, text in pairs}
    settings[XLA_OPTIONS] = Additions({**settings.get(XLA_OPTIONS, {}), **options})
    return []


def _value_text(value: object) -> str:
    return "true" if value is Mark.BARE else str(value)
