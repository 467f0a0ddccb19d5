"""MegaJAX: large-scale transformer training in JAX."""

import sys

if sys.version_info < (3, 12):  # noqa: UP036 - a checkout runs without being installed, so pip has not checked it
    print(
        f"MegaJAX needs Python 3.12 or newer; {sys.executable} is {sys.version.split()[0]}. In a checkout: uv sync, "
        "then source .venv/bin/activate",
        file=sys.stderr,
    )
    raise SystemExit(2)

__version__ = "0.1.0"
