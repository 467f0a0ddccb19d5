"""Missing packages and how to install them. Imports only Python's standard library."""

import importlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from megajax.config.errors import UserError

REQUIRED = frozenset(
    ("absl", "flax", "grain", "jax", "jaxlib", "ml_dtypes", "numpy", "optax", "orbax", "rich", "tensorstore", "yaml")
)
"""Import names of packages that every installation has."""
EXTRAS = {
    "PIL": "images",
    "jinja2": "tokenizers",
    "llguidance": "serve",
    "lm_eval": "eval",
    "matplotlib": "plot",
    "opentelemetry": "telemetry",
    "pyarrow": "data",
    "prometheus_client": "serve",
    "ray": "ray",
    "sentencepiece": "tokenizers",
    "tensorboardX": "log",
    "tiktoken": "tokenizers",
    "tokenizers": "tokenizers",
    "starlette": "serve",
    "uvicorn": "serve",
    "wandb": "wandb",
    "zstandard": "data",
}
"""Import name of a package -> the extra of MegaJAX that installs it."""
CHECKOUT = Path(__file__).resolve().parents[2]


def require(module: str, feature: str, otherwise: str = "") -> ModuleType:
    """Import a module of an extra's package for a feature, such as a flag.

    Raises:
        UserError: the package is not installed. The message says how to install it, or to do `otherwise`.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        instead = f", or {otherwise}" if otherwise else ""
        commands = f"{install(EXTRAS[package])}{instead}"
        raise UserError(
            f"{feature} needs the package {package}, which is not installed. Install it: {commands}."
        ) from error


def install(*extras: str) -> str:
    """The commands that install extras, as part of a sentence."""
    options = " ".join(f"--extra {extra}" for extra in extras)
    return f"uv sync {options} --inexact, or pip install 'megajax[{','.join(extras)}]'"


def remedy(error: ModuleNotFoundError, argv: Sequence[str], checkout: Path = CHECKOUT) -> str | None:
    """The package, the interpreter that lacks it, and how to install it; None for a module that MegaJAX does not need.

    argv: the command with its interpreter, as in sys.orig_argv. checkout: the folder of pyproject.toml in a checkout.
    """
    name = (error.name or "").partition(".")[0]
    if name not in REQUIRED and name not in EXTRAS:
        return None
    checked_out = (checkout / "pyproject.toml").is_file()
    extra = EXTRAS.get(name)
    extra_suffix = f"[{extra}]" if extra else ""
    lines = [f"No module named {name!r} in {sys.executable}, which runs this command."]
    if extra is not None:
        lines += [f"It comes with the extra {extra}:", *[f"  uv sync --extra {extra} --inexact"] * checked_out]
    elif checked_out:
        has_environment = (checkout / ".venv").is_dir()
        lines += ["Activate the environment of the checkout first:"]
        lines += [f"  {'' if has_environment else f'cd {checkout} && uv sync && '}source {checkout}/.venv/bin/activate"]
        lines += ["or run the command through uv:", f"  uv run python {shlex.join(argv[1:])}"]
    package = f"-e '{checkout}{extra_suffix}'" if checked_out else f"'megajax{extra_suffix}'"
    return "\n".join([*lines, "Or install MegaJAX into this Python:", f"  {sys.executable} -m pip install {package}"])
