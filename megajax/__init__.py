"""MegaJAX: large-scale transformer training in JAX.

`import megajax as mj` gives every config class, `mj.load`, `mj.setup` and the other names that `__init__.pyi` lists.
"""

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

if sys.version_info < (3, 12):  # noqa: UP036 - a checkout runs without being installed, so pip has not checked it
    print(
        f"MegaJAX needs Python 3.12 or newer; {sys.executable} is {sys.version.split()[0]}. In a checkout: uv sync, "
        "then source .venv/bin/activate",
        file=sys.stderr,
    )
    raise SystemExit(2)


def _interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print no traceback for Ctrl-C while a command imports its modules."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2].partition(".")[0] == __name__:  # a command, not a user's program
    sys.excepthook = _interrupted

__version__ = "0.2.0"


@cache
def _places() -> dict[str, tuple[str, str]]:
    """Public name -> its module and its name there, from the imports of `__init__.pyi`."""
    import ast

    statements = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    imports = [statement for statement in statements if isinstance(statement, ast.ImportFrom)]
    return {str(name.asname): (str(line.module), name.name) for line in imports for name in line.names}


def __getattr__(name: str) -> Any:
    # Looked up on first use: `import megajax` is fast and imports no jax.
    if name.startswith("__") or name not in _places():
        raise AttributeError(f"module 'megajax' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    module, attribute = _places()[name]
    value = globals()[name] = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return ["__version__", *_places()]
