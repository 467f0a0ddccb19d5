"""The debug twin of a config: the same tree with small sizes, for a machine with fewer devices.

By convention the twin of `config()` is `debug()`, and that of `NAME()` is `NAME_debug()` in the same file.
"""

from dataclasses import replace

from megajax.config.errors import ConfigError, TooFewDevices, UserError
from megajax.config.files import find, functions_of, split_source


def twin_of(source: str) -> str | None:
    """ "gpt3.py" -> "gpt3.py:debug", "gpt3.py:gpt3_175b" -> "gpt3.py:gpt3_175b_debug"; None: no debug twin."""
    name, function = split_source(source)
    twin = f"{function}_debug" if function not in ("", "config") else "debug"
    try:
        return f"{name}:{twin}" if twin in functions_of(find(name)) else None
    except UserError:
        return None


def advised(error: ConfigError, source: str | None, verb: str) -> ConfigError:
    """The error; if devices are lacking, its first hint is the command of the debug twin, if one exists."""
    if not any(isinstance(problem, TooFewDevices) for problem in error.problems):
        return error
    twin = twin_of(source) if source else None
    run = f"its debug twin runs on any machine: python -m megajax.{verb} --config={twin} --devices=cpu:8"
    problems = [
        replace(problem, hint="\n".join([*[run] * bool(twin), problem.hint, _virtual(problem.wanted)]))
        if isinstance(problem, TooFewDevices)
        else problem
        for problem in error.problems
    ]
    return ConfigError(problems, error.place)


def _virtual(count: int) -> str:
    return f"for a small model, --devices=cpu:{count} makes {count} virtual devices of the CPU"
