"""MegaJAX: large-scale transformer training in JAX."""

import sys
from importlib import import_module
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

__version__ = "0.1.0"

_ENTRIES = {
    "load": "megajax.config:load",
    "setup": "megajax.job.notebook:setup",
    "visualize": "megajax.training.placement:visualize",
}


def __getattr__(name: str) -> Any:
    # Looked up on first use: `import megajax` is fast and imports no jax.
    if name not in _ENTRIES:
        raise AttributeError(f"module 'megajax' has no attribute {name!r}")
    module, _, attribute = _ENTRIES[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ENTRIES})
