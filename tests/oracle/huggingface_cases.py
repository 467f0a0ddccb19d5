"""Checkpoints of transformers: opened by the package, as our arrays, and written back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from megatron_cases import FOLDER, unsupported

from megajax.checkpoint.weights.foreign import declared_by, demand_fit
from megajax.config.errors import UserError
from megajax.interop.formats import open_stored
from megajax.interop.huggingface.registry import families, lost_settings
from megajax.interop.stored.model import StoredModel

TOLERANCE = 1e-5

type Arrays = dict[str, np.ndarray]


def folders(accepted: Callable[[str], bool]) -> list[str]:
    """Names of the cases whose `model_type` is accepted."""
    types = {path.parent.name: json.loads(path.read_text())["model_type"] for path in FOLDER.glob("hf/*/config.json")}
    return [case for case, kind in types.items() if accepted(kind)]


def opened(folder: Path) -> StoredModel:
    """The model of a folder, whose config.json and tensors survive a round trip."""
    try:
        model = open_stored(f"hf:{folder}")
        demand_fit(model.foreign.tensors, model.table, model.foreign.ignored)
    except UserError as error:
        if "MegaJAX lacks" in str(error) or "is not supported" in str(error):
            unsupported(str(error))
        raise
    assert lost_settings(model.model, families()[model.origin.family]) == []
    weights = whole(model, np.asarray)
    for tensor in model.table:
        back, there = (
            tensor.from_weights([weights[p.path][p.index] for p in tensor.pieces]),
            model.foreign.tensors.read(tensor.name),
        )
        assert (back.dtype, back.shape, back.tobytes()) == (there.dtype, there.shape, there.tobytes()), tensor.name
    return model


def whole(model: StoredModel, change: Callable[[np.ndarray], np.ndarray]) -> Arrays:
    """Every weight and observation by path."""
    boxes = {path: tuple(slice(0, n) for n in shape) for path, shape in model.weights.shapes().items()}
    return {path: change(model.weights.read(path, box)) for path, box in boxes.items()}


def arrays(model: StoredModel) -> tuple[Arrays, Arrays]:
    """Weights, and what the table has of observations, in float32."""
    declared, every = declared_by(model.model), whole(model, lambda array: array.astype(np.float32))
    observed = {path for path in every if declared[path].updater is not None}
    kept = {path: array for path, array in every.items() if path in observed}
    return {path: array for path, array in every.items() if path not in observed}, kept


def stored(folder: Path) -> dict[str, Any]:
    """Inputs and outputs of a case."""
    with np.load(folder / "io.npz") as file:
        return dict(file)


def pixels_last(images: np.ndarray) -> np.ndarray:
    """[B, 3, H, W] -> [B, H, W, 3]."""
    return np.ascontiguousarray(images.transpose(0, 2, 3, 1), np.float32)
