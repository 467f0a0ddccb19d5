"""`python -m megajax.convert --quantize`: write a run with quantized weights, and measure the change of its outputs."""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from megajax.checkpoint.weight_source import WeightSource
from megajax.config.compose import problems_of
from megajax.config.errors import ConfigError, UserError
from megajax.interop.quantization.calibration import (
    Calibration,
    LayerByLayer,
    TokenDifference,
    calibrate,
    compare,
    text_rows,
)
from megajax.interop.weights.formats import FILES
from megajax.interop.weights.quantize_on_load import Calibrated, Quantizing
from megajax.interop.weights.stored_model import StoredModel
from megajax.layers.quantization.config import QuantizationConfig
from megajax.metrics.record import to_json
from megajax.metrics.run_folder import write_atomically
from megajax.storage.local_copies import read_text
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.tokenizer_files import copy_files

REPORT = "quantization.json"
LENGTH = 512
"""Maximum tokens of a row of text."""
ROWS = 4
"""Rows computed at once."""
MAX_TOKENS = 2**15
"""Maximum tokens read from a text."""


def quantize(stored: StoredModel, flags: Mapping[str, Any]) -> tuple[StoredModel, Calibration | None]:
    """The source's model with quantized matrices, computed as they are written. flags: of the command line.

    Raises UserError for a model that is quantized already, has no setting for it, or has matrices of unfit shapes.
    """
    cfg, model = _config(flags), stored.model
    if "quantization" not in (field.name for field in fields(model)):
        raise UserError(f"--quantize: {type(model).__name__} has no setting quantization")
    if model.quantization is not None:
        problem = f"the weights are quantized already ({model.quantization.weights})"
        raise UserError(f"--quantize={cfg.weights}: {problem}; convert from the unquantized weights")
    quantized = replace(model, quantization=cfg)
    quantizing, calibration = Quantizing.of(quantized), None
    if flags["calibration"] is not None:
        tokens = read_rows(stored, flags["calibration"])
        calibration = calibrate(model, stored.weights, quantizing.matrices, tokens, rows=ROWS)
    calibrated: Mapping[str, Calibrated] = {} if calibration is None else calibration.matrices
    return stored.derived(quantized, quantizing.weights(stored.weights, calibrated)), calibration


def read_rows(stored: StoredModel, text: Path) -> np.ndarray:
    """Rows of token ids of a text file, int32 [R, S]. Raises UserError for text that the tokenizer cannot read."""
    return text_rows(
        _tokenizer(stored), read_text(str(text)), length=min(LENGTH, stored.model.row_positions()), most=MAX_TOKENS
    )


def report(
    before: StoredModel,
    quantized: StoredModel,
    run: Path,
    calibration: Calibration | None,
    text: tuple[Path, np.ndarray] | None,
) -> list[str]:
    """A table of sizes and errors, also written to the run as quantization.json.

    quantized: as it was read back from the run; text: file and rows to compare outputs on.
    """
    sizes = {"bytes_before": _bytes(before.weights), "bytes_after": _bytes(quantized.weights)}
    content: dict[str, Any] = {"quantization": asdict(quantized.model.quantization), **sizes}
    small, large = sizes["bytes_after"] / 1e6, sizes["bytes_before"] / 1e6
    lines = [f"weights: {large:,.2f} MB before, {small:,.2f} MB after ({small / large:.1%})"]
    if calibration is not None:
        errors = calibration.errors
        content["output_errors"] = {path: {"plain": a, "calibrated": b} for path, (a, b) in errors.items()}
        plain, calibrated = (
            sum(kind_errors) / max(1, len(errors)) for kind_errors in zip(*errors.values(), strict=True)
        )
        title = "mean relative error of a matrix's outputs on the calibration text"
        lines.append(f"{title}: {plain:.3%} without calibration, {calibrated:.3%} with it")
    if text is not None:
        file, rows = text
        models = [LayerByLayer(stored.model, stored.weights) for stored in (before, quantized)]
        difference = compare(*models, rows, rows=ROWS)
        content |= {"text": str(file), **asdict(difference)}
        lines += _table(difference)
    write_atomically(run / REPORT, to_json(content))
    return [*lines, f"report: {run / REPORT}"]


def _table(difference: TokenDifference) -> list[str]:
    mean, largest = difference.mean_logit_difference, difference.largest_logit_difference
    return [
        f"on {difference.tokens:,} tokens, in float32:",
        f"  perplexity         {difference.perplexity_before:.4f} before, {difference.perplexity_after:.4f} after",
        f"  logits differ by   {mean:.4g} on average, {largest:.4g} at most",
        f"  KL divergence      {difference.kl_divergence:.4g} nats",
        f"  most likely token  equal for {difference.same_likeliest:.2%}",
    ]


def _config(flags: Mapping[str, Any]) -> QuantizationConfig:
    calibrated, activations = flags["calibration"] is not None, flags["activations"] or "none"
    cfg = QuantizationConfig(
        weights=flags["quantize"],
        exclude=flags["exclude"],
        activations=activations,
        static=calibrated and activations != "none",
        balanced=calibrated,
        group=flags["group"],
        double=flags["double"],
    )
    if problems := [replace(problem, setting=f"--{problem.setting}") for problem in problems_of(cfg)]:
        raise ConfigError(problems, "command line")
    return cfg


def _tokenizer(stored: StoredModel) -> Tokenizer:
    """The tokenizer of the run to write. Raises UserError if its files are missing."""
    with TemporaryDirectory() as folder:
        files = copy_files(stored.files, Path(folder) / FILES)
        return stored.config(Path(folder), files).tokenizer.build()


def _bytes(weights: WeightSource) -> int:
    """Bytes of all arrays in their stored dtypes."""
    total = 0
    for path, shape in weights.shapes.items():
        empty = weights.read(path, tuple(slice(0, 0) for _ in shape))
        total += prod(shape) * empty.dtype.itemsize
    return total
