"""Writes checkpoints in Megatron-LM's `torch` format: one file for one rank, which Megatron's converters reshard."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megajax.checkpoint.weights.foreign import WeightSource, declared_by, export_tensor
from megajax.checkpoint.weights.tensor_table import Mapped, resolved
from megajax.interop.megatron.checkpoints.checkpoint import TRACKER
from megajax.interop.megatron.checkpoints.names import FUSED_NORMS, LazyTensor
from megajax.interop.megatron.checkpoints.pickles import Record
from megajax.interop.megatron.checkpoints.ranks import FILE
from megajax.interop.megatron.checkpoints.tables import second_names, table
from megajax.interop.megatron.checkpoints.writer import NAMESPACE, write_archive

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
    """Writes release/mp_rank_00/model_optim_rng.pt and the tracker file into an existing folder -> the table.

    args: the namespace of a run with this model; engine: whether names are those of Transformer Engine's layers, else
    of plain torch layers; dtype: of the weights; None: float32. Raises OSError if it can't be written.
    """
    declared, kind = declared_by(model), dtype or np.dtype(np.float32)
    tensors = resolved(table(model), declared)
    names = {tensor.name: tensor.name for tensor in tensors}
    if engine:
        names = {name: _engine_name(name, names) for name in names}
    seconds, content = second_names(model), dict[str, Any]()
    for tensor in tensors:
        read = partial(_read, tensor, weights, kind, advance)
        content[names[tensor.name]] = LazyTensor(tensor.shape(), kind, read)
        if second := seconds.get(tensor.name):
            content[second] = LazyTensor(tensor.shape(), kind, partial(export_tensor, tensor, weights, kind))
        if match := LINEAR.match(names[tensor.name]):
            content[f"{match[1]}._extra_state"] = None
    rank = folder / "release" / "mp_rank_00"
    rank.mkdir(parents=True)
    record = Record(NAMESPACE, (), dict(args))
    checkpoint = {"args": record, "checkpoint_version": VERSION, "iteration": 0, "model": content}
    write_archive(rank / FILE, checkpoint)
    (folder / TRACKER).write_text("release", encoding="utf-8")
    return tensors


def _engine_name(name: str, names: Mapping[str, str]) -> str:
    """The name of a norm in Transformer Engine, which stores it in the layer of the next matrix, if there is one."""
    for matrix, norm in FUSED_NORMS.items():
        layer, separator, kind = name.rpartition(f".{norm}.")
        if separator and f"{layer}.{matrix}.weight" in names:
            return f"{layer}.{matrix}.layer_norm_{kind}"
    return name


def _read(tensor: Mapped, weights: WeightSource, dtype: np.dtype, advance: Callable[[int], None]) -> np.ndarray:
    """A tensor of Megatron-LM from the weights."""
    values = export_tensor(tensor, weights, dtype)
    advance(values.size)
    return values
