"""Tensors under the names of a family's table, without the prefixes of transformers' classes and without copies."""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megajax.checkpoint.weights.foreign import Entry, ForeignModel, Tensors, contiguous
from megajax.checkpoint.weights.tensor_table import Mapped
from megajax.config.errors import UserError
from megajax.interop.huggingface.family import Family
from megajax.interop.huggingface.safetensors import ONE_FILE, SafetensorsFolder, TensorFile

ROWS = 4096
"""Rows of a tensor that are compared at a time."""
EXTRA = "extra"
"""Folder, below that of a run's files, of tensors that its model does not read: an export has them again."""


class NamedTensors:
    """Some tensors of a source under other names: `megajax.checkpoint.weights.foreign.Tensors`."""

    def __init__(self, tensors: Tensors, names: Mapping[str, str]):
        """names: new name -> name in the source."""
        self.where, self._tensors, self.names = tensors.where, tensors, names

    def entries(self) -> Mapping[str, Entry]:
        entries = self._tensors.entries()
        return {name: entries[stored_name] for name, stored_name in self.names.items()}

    def read(self, name: str) -> np.ndarray:
        return self._tensors.read(self.names[name])


def extra_tensors(foreign: ForeignModel, table: Sequence[Mapped]) -> Tensors | None:
    """The tensors outside of the table that an export keeps, under their names in the files; None without any."""
    names = foreign.unread(table)
    return NamedTensors(foreign.tensors, names) if names else None


def stored_extra(files: Path) -> Tensors | None:
    """Those that were written for a run. files: the folder of its files; it may not exist."""
    return SafetensorsFolder(files / EXTRA) if (files / EXTRA).is_dir() else None


def write_extra(tensors: Tensors | None, files: Path) -> None:
    """Writes them for a run. Raises OSError if the folder can't be written."""
    shutil.rmtree(files / EXTRA, ignore_errors=True)  # of an earlier attempt
    if tensors is None:
        return
    (files / EXTRA).mkdir(parents=True)
    with TensorFile(files / EXTRA / ONE_FILE, tensors.entries()) as file:
        for name in tensors.entries():
            file.write(name, contiguous(tensors.read(name)))


def rename_tensors(tensors: Tensors, family: Family, model: Any) -> tuple[NamedTensors, Any]:
    """The tensors under the names of the family's table, without copies; and the model, untied if the head differs.

    Raises UserError if two tensors have the same name in the table.
    """
    names: dict[str, str] = {}
    for stored_name in tensors.entries():
        name = _renamed(stored_name, family.renamed)
        if name in names:
            raise UserError(f"{tensors.where} has {name} twice, as {names[name]} and as {stored_name}")
        names[name] = stored_name
    copies, heads = _present(family.copies, names), _present(family.heads, names)
    if getattr(model, "tied", False) and heads:
        if all(_is_copy(copy, original, names, tensors) for copy, original in heads.items()):
            copies |= heads
        else:
            model = replace(model, tied=False)
    for copy, original in copies.items():
        if _is_copy(copy, original, names, tensors):
            # A copy without an original gets the original's name.
            names.setdefault(original, names.pop(copy))
    return NamedTensors(tensors, names), model


def _present(copies: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    return {copy: original for copy, original in copies.items() if copy in names}


def _renamed(name: str, rules: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _is_copy(copy: str, original: str, names: Mapping[str, str], tensors: Tensors) -> bool:
    """Whether a tensor equals its original, or there is no original."""
    return original not in names or _equal(tensors.read(names[copy]), tensors.read(names[original]))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and all(
        np.array_equal(a[row : row + ROWS], b[row : row + ROWS]) for row in range(0, len(a), ROWS)
    )
