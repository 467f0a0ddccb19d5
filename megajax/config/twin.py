"""The debug twin of a config: the same tree with small sizes, for a machine with fewer devices.

By convention the twin of `config()` is `debug()`, and that of `NAME()` is `NAME_debug()` in the same file.
"""

from dataclasses import replace

from megajax.config.errors import ConfigError, TooFewDevices, UserError
from megajax.config.files import assembled, find, functions_of, read, split_source

COUNTS = (8, 4, 2, 1)
"""Virtual CPU devices to try a twin on, the preferred number first: eight show a layout and still start fast."""


def twin_of(source: str) -> str | None:
    """ "gpt3.py" -> "gpt3.py:debug", "gpt3.py:gpt3_175b" -> "gpt3.py:gpt3_175b_debug"; None where there is none."""
    name, function = split_source(source)
    twin = f"{function}_debug" if function not in ("", "config") else "debug"
    try:
        return f"{name}:{twin}" if twin in functions_of(find(name)) else None
    except UserError:
        return None


def command(source: str, root: str | type) -> str | None:
    """Arguments that run the twin on any machine: "--config=gpt3.py:debug --devices=cpu:8". None without a twin."""
    twin = twin_of(source)
    if twin is None:
        return None
    try:
        file = read(twin, root)
    except UserError:
        return None
    counts = (count for count in COUNTS if not assembled(file, root, {}, count)[1])
    return next((f"--config={twin} --devices=cpu:{count}" for count in counts), f"--config={twin}")


def advised(error: ConfigError, source: str | None, verb: str, root: str | type) -> ConfigError:
    """The error; a lack of devices gets the command of the twin, if there is one, as its first hint."""
    if not any(isinstance(problem, TooFewDevices) for problem in error.problems):
        return error
    words = command(source, root) if source else None
    first = [f"its debug twin runs on any machine: python -m megajax.{verb} {words}"] if words else []
    problems = [
        replace(problem, hint="\n".join([*first, problem.hint, _virtual(problem.wanted)]))
        if isinstance(problem, TooFewDevices)
        else problem
        for problem in error.problems
    ]
    return ConfigError(problems, error.place)


def _virtual(count: int) -> str:
    return f"for a small model, --devices=cpu:{count} makes {count} virtual devices of the CPU"
