"""Checkpoints of other libraries in settings and commands: hf:DIR."""

from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from megajax.config.errors import UserError
from megajax.config.nearest import download_hint

FORMATS: Mapping[str, str] = {"hf": "megajax.interop.huggingface.folder:read_model"}
"""Format -> module:function that reads a folder as a `foreign.ForeignModel`."""


def foreign_format(name: str | Path) -> str | None:
    """The format of FORMAT:DIR; None for the path of a run."""
    before, colon, _ = str(name).partition(":")
    return before if colon and before in FORMATS else None


def read_foreign(name: str | Path, ignore: Collection[str] = ()) -> Any:
    """The `foreign.ForeignModel` of FORMAT:DIR. ignore: patterns of unknown settings of the model that are accepted.

    Raises UserError if the folder does not exist or can't be read.
    """
    before, _, folder = str(name).partition(":")
    if not Path(folder).is_dir():
        raise UserError("\n    ".join(filter(None, (f"{name}: there is no folder {folder}", download_hint(folder)))))
    module, _, function = FORMATS[before].partition(":")
    return getattr(import_module(module), function)(Path(folder).absolute(), ignore)
