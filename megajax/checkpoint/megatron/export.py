"""Writing checkpoints in Megatron-LM's `torch` format: one file for one rank, which its converters share out."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megajax.checkpoint.megatron.checkpoint import TRACKER
from megajax.checkpoint.megatron.names import FUSED_NORMS, LazyTensor
from megajax.checkpoint.megatron.pickles import Record
from megajax.checkpoint.megatron.ranks import FILE
from megajax.checkpoint.megatron.tables import table
from megajax.checkpoint.megatron.writer import NAMESPACE, write_archive
from megajax.checkpoint.weights.foreign import WeightSource, declared_by, export_tensor
from megajax.checkpoint.weights.tensor_table import Mapped, resolved

VERSION = 3.0
LINEAR = re.compile(r"^(.*\blinear_\w+|output_layer)\.weight$")


def write_model(
    folder: Path,
    model: Any,
    weights: WeightSource,
    args: Mapping[str, Any],
    *,
    engine: bool = True,
    dtype: np.dtype | None = None,
    advance: Callable[[int], None] = lambda elements: None,
) -> list[Mapped]:
    """Writes release/mp_rank_00/model_optim_rng.pt and the tracker file into a folder that is there.

    args: the namespace of a run with this model; engine: names as Transformer Engine's layers have them, else as those
    of plain torch; dtype: of the weights, None for float32. Returns the table. Raises OSError if it can't be written.
    """
    declared, kind = declared_by(model), dtype or np.dtype(np.float32)
    tensors = resolved(table(model), declared)
    names = {tensor.name: tensor.name for tensor in tensors}
    if engine:
        names = {name: _engine_name(name, names) for name in names}
    content: dict[str, Any] = {}
    for tensor in tensors:
        read = partial(_read, tensor, weights, kind, advance)
        content[names[tensor.name]] = LazyTensor(tensor.shape(), kind, read)
        if match := LINEAR.match(names[tensor.name]):
            content[f"{match[1]}._extra_state"] = None
    rank = folder / "release" / "mp_rank_00"
    rank.mkdir(parents=True)
    whole = {"args": Record(NAMESPACE, (), dict(args)), "checkpoint_version": VERSION, "iteration": 0, "model": content}
    write_archive(rank / FILE, whole)
    (folder / TRACKER).write_text("release", encoding="utf-8")
    return tensors


def _engine_name(name: str, names: Mapping[str, str]) -> str:
    """The name that Transformer Engine gives to a norm: it is kept with the matrix behind it, if the model has that."""
    for matrix, norm in FUSED_NORMS.items():
        layer, separator, kind = name.rpartition(f".{norm}.")
        if separator and f"{layer}.{matrix}.weight" in names:
            return f"{layer}.{matrix}.layer_norm_{kind}"
    return name


def _read(tensor: Mapped, weights: WeightSource, dtype: np.dtype, advance: Callable[[int], None]) -> np.ndarray:
    """A tensor of theirs out of our weights."""
    made = export_tensor(tensor, weights, dtype)
    advance(made.size)
    return made
