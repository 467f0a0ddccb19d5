"""Replacing matrices of a built model by quantized ones."""

from fnmatch import fnmatchcase
from typing import Any

import jax
from flax import nnx

from megajax.config.errors import UserError
from megajax.config.hints import matching
from megajax.layers.param import Matrix, matrices_of
from megajax.layers.quantization.config import GROUPS, QuantizationConfig
from megajax.layers.quantized import Quantized, form_of
from megajax.precision.fp8 import refuse_old

SETTING = "model.quantization"
MAX_LISTED = 10


def quantize[M: nnx.Module](cfg: QuantizationConfig, model: M) -> M:
    """The model with quantized matrices, as the config says. Their values are zeros until they are loaded.

    Raises UserError for a pattern that matches no matrix, if there is nothing to quantize, and for matrices whose shape
    does not fit the format.
    """
    matrices = matrices_of(model)
    for pattern in cfg.exclude:
        matching(f"{SETTING}.exclude", pattern, matrices, "matrix")
    selected = {path: matrix for path, matrix in matrices.items() if not any(fnmatchcase(path, p) for p in cfg.exclude)}
    if not selected:
        raise UserError(f"{SETTING}: the model has no matrix to quantize")
    forms = {path: _quantized(cfg, matrix) for path, matrix in selected.items()}
    misfits = {path: forms[path].form.misfit(tuple(matrix.array.shape)) for path, matrix in selected.items()}
    if problems := [f"  {path}: {misfit}" for path, misfit in misfits.items() if misfit]:
        more = [f"  and {len(problems) - MAX_LISTED} more"] * (len(problems) > MAX_LISTED)
        raise UserError(
            "\n".join([f"these matrices can't be stored in {cfg.weights}:", *problems[:MAX_LISTED], *more])
            + f"\nChange {SETTING}.group, or leave them out with {SETTING}.exclude."
        )
    for path, matrix in selected.items():
        matrix.quantize(forms[path])
    return model


def demand_device(model: Any, device: jax.Device) -> None:
    """Raises UserError for a GPU without 8-bit matmuls if the model config needs them. CPUs emulate them slowly."""
    cfg = getattr(model, "quantization", None)
    if cfg is not None and cfg.activations == "fp8":
        refuse_old(device, f"{SETTING}.activations")


def _quantized(cfg: QuantizationConfig, matrix: Matrix) -> Quantized:
    axes = matrix.array.axes
    leading = sum(name in ("layer", "expert") for name in axes)
    group = cfg.group or GROUPS.get(cfg.weights, 0)
    form = form_of(cfg.weights, group, matrix.inputs, len(axes) - leading - matrix.inputs)
    # Experts use a grouped matmul kernel, and calibration does not observe their inputs.
    plain = "expert" in axes
    eight = cfg.activations == "fp8" and not plain
    return Quantized(
        form, balanced=cfg.balanced and not plain, activations=eight, static=cfg.static and eight, double=cfg.double
    )
