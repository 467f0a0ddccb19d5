"""Runs of MegaJAX as a format of stored models: a step, or the mean of several.

Weights are read without devices, a box at a time, with layers in natural order.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.boxes import Box
from megajax.checkpoint.manifest import Damaged
from megajax.checkpoint.reader import Meta, open_checkpoints
from megajax.checkpoint.weight_source import WeightSource
from megajax.checkpoint.zarr_reader import OBSERVED, WEIGHTS, StoredArrays
from megajax.config.config_files import ROOT, Source, assembled
from megajax.config.dump import to_yaml
from megajax.config.errors import UserError
from megajax.config.hints import below, listed
from megajax.config.paths_and_store_urls import store_url
from megajax.config.yaml_and_json import read_yaml
from megajax.data.images.config import ImageTextConfig
from megajax.data.masked.config import MaskedSentencesConfig, MaskedSpansConfig
from megajax.interop.weights.foreign import declared_by
from megajax.interop.weights.formats import FILES, Reading
from megajax.interop.weights.model_differences import demand_same_model
from megajax.interop.weights.provenance import META, Ancestor
from megajax.interop.weights.regrouped import Groups, group_name, groups_of, numbered, regrouped
from megajax.interop.weights.step_writer import write_step
from megajax.interop.weights.stored_model import Advance, Options, StateArray, StoredModel, stored_extra, write_extra
from megajax.interop.weights.weights_config import continued_config, model_facts
from megajax.layers.param import ParamSpec
from megajax.pipeline.partition import row_order
from megajax.processes.peers import Peers
from megajax.storage.atomic_folders import new_folder
from megajax.storage.folders import Folder
from megajax.tokenizers.tokenizer_files import copy_files
from megajax.training.run_config import RunConfig

KINDS = OBSERVED, WEIGHTS


class StepWeights:
    """A `WeightSource` of a step: its weights and observations, by path, with layers in natural order."""

    def __init__(self, stored: StoredArrays, meta: Meta, paths: Collection[str] | None = None, *, agreed: bool = False):
        """paths: the weights to give; None: all that are stored. agreed: whether the processes agree on damage: it is
        then raised as Damaged, and otherwise as UserError."""
        self.where, self._stored, self._agreed = str(stored.step), stored, agreed
        self._chunks = [range(*bounds) for bounds in meta.get("rows", [])]
        self._layers = {path: sorted({*layers} - {-1}) for path, layers in meta.get("layers", {}).items()}
        names = {name.removeprefix(kind): name for kind in KINDS for name in stored.arrays if name.startswith(kind)}
        self._names = {path: name for path, name in names.items() if paths is None or path in paths}
        shapes = {path: stored.arrays[name].shape for path, name in self._names.items()}
        depths = {path: (len(layers),) for path, layers in self._layers.items()}
        self.shapes = {path: depths.get(path, shape[:1]) + shape[1:] for path, shape in shapes.items()}

    def read(self, path: str, box: Box) -> np.ndarray:
        """A box, in its stored dtype. Raises UserError if the file is damaged."""
        try:
            parts = [self._stored.read(self._names[path], part) for part in self._parts(path, box)]
        except Damaged as error:
            if self._agreed:
                raise
            raise UserError(f"{self.where} is damaged: {error}") from error
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _parts(self, path: str, box: Box) -> list[Box]:
        """The stored boxes that make up a box, split along the layers."""
        rows = self._rows(path)
        if rows is None or not (stored_rows := rows[box[0]]):
            return [box]
        runs = [[row for _, row in run] for _, run in groupby(enumerate(stored_rows), lambda pair: pair[1] - pair[0])]
        return [(slice(run[0], run[-1] + 1), *box[1:]) for run in runs]

    def _rows(self, path: str) -> list[int] | None:
        """Stored row of each layer; None if the rows are in natural order."""
        layers = self._layers.get(path)
        if layers is None or len(self._chunks) <= 1:
            return None
        order = row_order(self._chunks, layers)
        return [order.index(place) for place in range(len(layers))]


def stored_groups(meta: Meta) -> Groups:
    """The groups of layers of the weights of a step."""
    return numbered(meta.get("layers", {}))


class MeanWeights:
    """A `WeightSource` of the mean of other sources, in float32."""

    def __init__(self, sources: Sequence[WeightSource]):
        """Raises UserError if names or shapes of weights differ between sources."""
        self._sources = [*sources]
        self.where = f"the mean of {', '.join(source.where for source in sources)}"
        first, expected = sources[0], sources[0].shapes
        self.shapes = expected
        for source in sources[1:]:
            shapes = source.shapes
            if paths := [path for path in {**expected, **shapes} if expected.get(path) != shapes.get(path)]:
                lines = [f"{path}: {expected.get(path, 'none')}, {shapes.get(path, 'none')}" for path in paths]
                raise UserError(below(f"the weights of {first.where} and {source.where} differ in shape:", lines))

    def read(self, path: str, box: Box) -> np.ndarray:
        total = self._sources[0].read(path, box).astype(np.float32)
        for source in self._sources[1:]:
            total += source.read(path, box)
        return total / np.float32(len(self._sources))


def open_step(path: Path, step: int | None, reading: Reading) -> StoredModel:
    """A step of a run, by default the newest intact one. path: a run folder, a checkpoints folder or one step in it.

    Raises UserError if the step does not exist, is damaged, or lacks weights, and if its config names other code than
    MegaJAX's, unless it is trusted.
    """
    if (
        store_url(path) is None and not path.exists() and path.name.isdigit() and step is None
    ):  # RUN/100: short for RUN/checkpoints/00000100
        path, step = path.parent, int(path.name)
    reader, path_step = open_checkpoints(path, peers=Peers(single=True) if reading.single else None)
    step = path_step if step is None else step
    # Weights are read while others are written or served, when there is no way back to the step before.
    step = reader.newest_intact(blocks=True) if step is None else step
    if step is None:
        raise UserError(f"there are no checkpoints in {path}")
    files, meta = reader.demand(step), reader.meta(step)
    origin, copies, _, _ = Ancestor.of(meta, reader.folder)
    recorded = _recorded_config(files, meta, trusted=reading.trusted)
    return StoredModel(
        name=str(files),
        model=recorded.model,
        weights=_weights(files, meta, declared_by(recorded.model)),
        files=copies,
        extra=stored_extra(copies),
        config=lambda run, _: continued_config(recorded, run, copies, run / FILES),
        origin=origin,
        trained=True,
        trusted=reading.trusted,
    )


def _recorded_config(files: Folder, meta: Meta, *, trusted: bool) -> RunConfig:
    """The run's config when the step was saved. Raises UserError if it can't be read or names other code."""
    try:
        document = read_yaml(str(meta.get("config", ""))) or {}
    except ValueError as error:
        raise UserError(f"the config of {files} is damaged: {error}") from error
    config, problems = assembled(Source(f"the config of {files}", None, document), ROOT, {}, trusted=trusted)
    if config is None or any(problem.setting.startswith("model") for problem in problems):
        raise UserError(below(f"the config of {files} can't be used:", problems))
    return config


def _weights(files: Folder, meta: Meta, declared: Mapping[str, ParamSpec]) -> WeightSource:
    """The weights of the step's model. Raises UserError for weights that the step lacks, and if it is damaged."""
    try:
        arrays = StoredArrays(files)
    except Damaged as error:
        raise UserError(f"{files} is damaged: {error}") from error
    stored, alike = stored_groups(meta), {group_name(path) for path in declared}
    paths = {*declared, *(path for path in stored if group_name(path) in alike)}
    weights = regrouped(StepWeights(arrays, meta, paths), stored, groups_of(declared))
    present = weights.shapes
    if missing := [path for path, spec in declared.items() if spec.updater is None and path not in present]:
        raise UserError(f"{files} has no weights of {', '.join(missing)}")
    return weights


STEPS = "checkpoints"


def read(name: str, reading: Reading) -> StoredModel:
    """A run's newest intact step, or one of its steps. Raises UserError if it does not exist or is damaged."""
    return open_step(Path(name), None, reading)


def newest_steps(name: str, count: int) -> list[tuple[Path, int]]:
    """As for `mean_of`. Raises UserError for a run with fewer."""
    steps = open_checkpoints(name)[0].steps()
    if len(steps) < count:
        present = f"{len(steps)} step{'s' * (len(steps) != 1)}"
        raise UserError(f"--average-last={count}: {name} has {present}: {', '.join(map(str, steps))}")
    return [(Path(name), step) for step in steps[-count:]]


def mean_of(paths: Sequence[tuple[Path, int | None]], reading: Reading) -> StoredModel:
    """The mean of several steps, each by the arguments of `open_step`. Raises UserError if their models differ."""
    steps = [open_step(path, step, reading) for path, step in paths]
    for step in steps[:-1]:
        message = f"{step.name} (here) and {steps[-1].name} (there) are different models:"
        demand_same_model(step.model, steps[-1].model, message)
    return replace(steps[-1], weights=MeanWeights([step.weights for step in steps]))


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
            META: stored.origin.record(),
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
    fresh = [path for path, spec in stored.declared.items() if spec.updater and path not in stored.weights.shapes]
    return [
        f"{run}: {len(stored.weights.shapes)} arrays, {stored.elements():,} elements, "
        + (
            f"matrices in {quantized_dtype}, other weights in {dtype.name}"
            if quantized_dtype
            else f"weights in {dtype.name}"
        ),
        *[f"not stored, zero in a new run: {listed(fresh)}"] * bool(fresh and not state),
        *[f"optimizer: moments and counters after {number} steps"] * bool(state),
        *[f"left out: {listed(left_out)}"] * bool(left_out),
        *[f"for exports only: {listed([*stored.extra.entries])}" for _ in [0] if stored.extra is not None],
        f"tokenizer: {type(cfg.tokenizer).__name__}" + (f" of {', '.join(files)}" if files else ""),
        f"evaluate it: python -m megajax.evaluate --run={run} --tasks=text:FILE"
        if quantized_dtype
        else f"train from it: python -m megajax.train --config={run}/config.yaml{_data_setting(cfg.data)}",
    ]


def _bytes(stored: StoredModel, dtype: np.dtype) -> int:
    """Bytes of a run whose weights, except quantized ones, are in `dtype`."""
    quantized = {path: jnp.dtype(spec.dtype) for path, spec in stored.declared.items() if spec.role == "quantized"}
    return sum(prod(shape) * quantized.get(path, dtype).itemsize for path, shape in stored.weights.shapes.items())


def _data_setting(data: Any) -> str:
    """The setting that names the data, after a space."""
    value = {"path": "FOLDER", "paths": "PREFIX"}
    if isinstance(data, MaskedSentencesConfig | MaskedSpansConfig):
        value["paths"] = "SENTENCES_PREFIX"
    elif isinstance(data, ImageTextConfig):
        value["paths"] = "FILE.jsonl"
    name = next((name for name in value if hasattr(data, name)), None)
    return "" if name is None else f" --data.{name}={value[name]}"
