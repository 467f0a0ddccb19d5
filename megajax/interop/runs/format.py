"""Runs of MegaJAX as a format of stored models: a step, or the mean of several."""

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from megajax.config.dump import to_yaml
from megajax.config.errors import UserError
from megajax.config.nearest import listed
from megajax.data.configs import ImageTextConfig, MaskedSentencesConfig, MaskedSpansConfig
from megajax.interop.conversion.model_differences import describe_differences, differences
from megajax.interop.conversion.provenance import FILES, META, Provenance
from megajax.interop.conversion.weights_config import continued_config, model_facts
from megajax.interop.formats import Reading
from megajax.interop.huggingface.names import stored_extra, write_extra
from megajax.interop.runs.reader import MeanWeights, RunModel, open_step
from megajax.interop.runs.writer import Advance, StateArray, write_step
from megajax.interop.stored_model import Options, StoredModel
from megajax.interop.tokenizers.files import copy_files
from megajax.storage.new_folder import new_folder

STEPS = "checkpoints"


def read(name: str, reading: Reading) -> StoredModel:
    """A run's newest intact step, or one of its steps. Raises UserError if it does not exist or is damaged."""
    return mean_of([open_step(Path(name), trusted=reading.trusted)])


def mean_of(steps: Sequence[RunModel]) -> StoredModel:
    """A step of a run, or the mean of several. Raises UserError if their models differ."""
    last = steps[-1]
    for step in steps[:-1]:
        pairs = differences(step.config.model, last.config.model)
        if pairs := [pair for pair in pairs if pair.name != "sequence_length"]:
            lines = "\n".join(f"  {line}" for line in describe_differences(pairs))
            raise UserError(f"{step.path} (here) and {last.path} (there) are different models:\n{lines}")
    return StoredModel(
        name=str(last.path),
        model=last.config.model,
        weights=last.weights() if len(steps) == 1 else MeanWeights([step.weights() for step in steps]),
        files=last.run / FILES,
        extra=stored_extra(last.run / FILES),
        config=lambda run, files: continued_config(last.config, run, last.run / FILES, run / FILES),
        origin=Provenance.of_meta(last.meta, last.path),
        trained=True,
        trusted=last.trusted,
    )


def write(stored: StoredModel, run: Path, options: Options, advance: Advance) -> list[str]:
    """Writes a run with one step. Returns a summary, line by line."""
    dtype, quantized_dtype = options.dtype or np.dtype(np.float32), stored.quantized_dtype()
    if quantized_dtype and options.dtype is None:
        dtype = jnp.dtype(stored.config(run, []).precision.compute)
    with new_folder(run, _bytes(stored, dtype)) as folder:
        files = copy_files(stored.files, folder / FILES)
        write_extra(stored.extra, folder / FILES)
        cfg, left_out = stored.config(run, files), [*stored.left_out]
        number, state = 0, dict[str, StateArray]()
        if stored.training is not None:
            cfg, unread = stored.training.config(cfg, run)
            left_out += unread
            number, state = stored.training.iteration, stored.training.arrays(stored.declared)
        text = to_yaml(cfg)
        (folder / "config.yaml").write_text(text, encoding="utf-8")
        layers = sum(stack.layers() for stack in cfg.model.stacks().values())
        meta = {
            "facts": model_facts(cfg),
            "rows": [[0, layers]],
            "mesh": {},
            "axes": {path: list(spec.axes) for path, spec in stored.declared.items()},
            "layers": {path: list(spec.layers) for path, spec in stored.declared.items() if spec.layers},
            "config": text,
            "seed": cfg.seed,
            "versions": {name: version(name) for name in ("jax", "orbax-checkpoint", "tensorstore", "numpy")},
            META: asdict(stored.origin),
        }
        write_step(
            folder / STEPS,
            stored.declared,
            stored.weights,
            meta,
            dtype=dtype,
            number=number,
            state=state,
            advance=advance,
        )
    fresh = [path for path, spec in stored.declared.items() if spec.updater and path not in stored.weights.shapes()]
    return [
        f"{run}: {len(stored.weights.shapes())} arrays, {stored.elements():,} elements, "
        + (
            f"matrices in {quantized_dtype}, other weights in {dtype.name}"
            if quantized_dtype
            else f"weights in {dtype.name}"
        ),
        *[f"not stored, zero in a new run: {listed(fresh)}"] * bool(fresh and not state),
        *[f"optimizer: moments and counters after {number} steps"] * bool(state),
        *[f"left out: {listed(left_out)}"] * bool(left_out),
        *[f"for exports only: {listed([*stored.extra.entries()])}" for _ in [0] if stored.extra is not None],
        f"tokenizer: {type(cfg.tokenizer).__name__}" + (f" of {', '.join(files)}" if files else ""),
        f"evaluate it: python -m megajax.evaluate --run={run} --tasks=text:FILE"
        if quantized_dtype
        else f"train from it: python -m megajax.train --config={run}/config.yaml{_data_setting(cfg.data)}",
    ]


def _bytes(stored: StoredModel, dtype: np.dtype) -> int:
    """Bytes of a run whose weights, except quantized ones, are in `dtype`."""
    quantized = {path: jnp.dtype(spec.dtype) for path, spec in stored.declared.items() if spec.role == "quantized"}
    return sum(prod(shape) * quantized.get(path, dtype).itemsize for path, shape in stored.weights.shapes().items())


def _data_setting(data: Any) -> str:
    """The setting that names the data, after a space."""
    value = {"path": "FOLDER", "paths": "PREFIX"}
    if isinstance(data, MaskedSentencesConfig | MaskedSpansConfig):
        value["paths"] = "SENTENCES_PREFIX"
    elif isinstance(data, ImageTextConfig):
        value["paths"] = "FILE.jsonl"
    name = next((name for name in value if hasattr(data, name)), None)
    return "" if name is None else f" --data.{name}={value[name]}"
