"""Runs of MegaJAX as a format of stored models: a step, or the mean of several.

Weights are read without devices, a box at a time, with layers in natural order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.boxes import Box
from megajax.checkpoint.integrity import Damaged
from megajax.checkpoint.reader import Meta, open_checkpoints
from megajax.checkpoint.weights.foreign import WeightSource, declared_by
from megajax.checkpoint.zarr_reader import OBSERVED, WEIGHTS, StoredArrays
from megajax.config.dump import to_yaml
from megajax.config.errors import UserError
from megajax.config.file_paths import store_url
from megajax.config.files import ROOT, Source, assembled
from megajax.config.hints import listed
from megajax.config.yaml_and_json import read_yaml
from megajax.data.images.config import ImageTextConfig
from megajax.data.masked.config import MaskedSentencesConfig, MaskedSpansConfig
from megajax.interop.formats import Reading
from megajax.interop.huggingface.folder import stored_extra, write_extra
from megajax.interop.runs.writer import write_step
from megajax.interop.stored.model import Advance, Options, StateArray, StoredModel
from megajax.interop.stored.model_differences import describe_differences, differences
from megajax.interop.stored.provenance import FILES, META, Provenance
from megajax.interop.stored.weights_config import continued_config, model_facts
from megajax.interop.tokenizer_files import copy_files
from megajax.layers.param import ParamSpec
from megajax.mesh.processes.peers import Peers
from megajax.pipeline.partition import row_order
from megajax.storage.atomic_folders import new_folder
from megajax.storage.folders import Folder


class StepWeights:
    """A `WeightSource` of a step: its weights and observations, by path."""

    def __init__(self, step: Folder, declared: Mapping[str, ParamSpec], chunks: Sequence[range] = ()):
        """declared: specs of the model on one device. chunks: layers of each stored chunk; (): in natural order.

        Raises UserError for weights that the step lacks, and if it is damaged.
        """
        self.where, self._chunks = str(step), chunks
        try:
            self._stored = StoredArrays(step)
        except Damaged as error:
            raise UserError(f"{step} is damaged: {error}") from error
        names = {path: (WEIGHTS if spec.updater is None else OBSERVED) + path for path, spec in declared.items()}
        self._names = {path: name for path, name in names.items() if name in self._stored.arrays}
        if missing := [path for path, spec in declared.items() if spec.updater is None and path not in self._names]:
            raise UserError(f"{step} has no weights of {', '.join(missing)}")
        self._declared = {path: declared[path] for path in self._names}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Path -> stored shape without padding rows."""
        stored = {path: self._stored.arrays[name].shape for path, name in self._names.items()}
        return {
            path: (len(self._declared[path].layers), *shape[1:]) if self._declared[path].layers else shape
            for path, shape in stored.items()
        }

    def dtypes(self) -> Mapping[str, str]:
        """Path -> name of the stored dtype."""
        return {path: self._stored.arrays[name].dtype for path, name in self._names.items()}

    def read(self, path: str, box: Box) -> np.ndarray:
        """A box, in its stored dtype. Raises UserError if the file is damaged."""
        try:
            parts = [self._stored.read(self._names[path], part) for part in self._parts(path, box)]
        except Damaged as error:
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
        layers = self._declared[path].layers
        if not layers or len(self._chunks) <= 1:
            return None
        order = row_order(self._chunks, layers)
        return [order.index(place) for place in range(len(layers))]


class MeanWeights:
    """A `WeightSource` of the mean of other sources, in float32."""

    def __init__(self, sources: Sequence[WeightSource]):
        """Raises UserError if names or shapes of weights differ between sources."""
        self._sources = [*sources]
        self.where = f"the mean of {', '.join(source.where for source in sources)}"
        first, expected = sources[0], sources[0].shapes()
        for source in sources[1:]:
            shapes = source.shapes()
            if paths := [path for path in {**expected, **shapes} if expected.get(path) != shapes.get(path)]:
                lines = "\n".join(
                    f"  {path}: {expected.get(path, 'none')}, {shapes.get(path, 'none')}" for path in paths
                )
                raise UserError(f"the weights of {first.where} and {source.where} differ in shape:\n{lines}")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._sources[0].shapes()

    def read(self, path: str, box: Box) -> np.ndarray:
        total = self._sources[0].read(path, box).astype(np.float32)
        for source in self._sources[1:]:
            total += source.read(path, box)
        return total / np.float32(len(self._sources))


@dataclass(frozen=True)
class RunModel:
    """A step of a run."""

    run: Path
    """The run's folder, or the one that holds the checkpoints."""
    step: int
    path: Folder
    """Files of the step."""
    meta: Meta
    trusted: bool = False
    """Whether its config may name code that is not of MegaJAX."""

    @cached_property
    def config(self) -> Any:
        """The run's config when the step was saved. Raises UserError if it can't be read or names other code."""
        try:
            document = read_yaml(str(self.meta.get("config", ""))) or {}
        except ValueError as error:
            raise UserError(f"the config of {self.path} is damaged: {error}") from error
        source = Source(f"the config of {self.path}", None, document)
        config, problems = assembled(source, ROOT, {}, trusted=self.trusted)
        if config is None or any(problem.setting.startswith("model") for problem in problems):
            lines = "\n".join(f"  {line}" for problem in problems for line in str(problem).splitlines())
            raise UserError(f"the config of {self.path} can't be used:\n{lines}")
        return config

    def weights(self) -> StepWeights:
        chunks = [range(*bounds) for bounds in self.meta.get("rows", [])]
        return StepWeights(self.path, declared_by(self.config.model), chunks)


def open_step(path: Path, step: int | None = None, *, trusted: bool = False, single: bool = False) -> RunModel:
    """A step of a run, by default the newest intact one. path: a run folder, a checkpoints folder or one step in it.

    trusted: whether its config may name code that is not of MegaJAX, which is imported then. single: whether
    only this process opens it; else all do, together. Raises UserError if the step does not exist or is damaged.
    """
    if (
        store_url(path) is None and not path.exists() and path.name.isdigit() and step is None
    ):  # RUN/100: short for RUN/checkpoints/00000100
        path, step = path.parent, int(path.name)
    reader, path_step = open_checkpoints(path, peers=Peers(single=True) if single else None)
    step = path_step if step is None else step
    # Weights are read while others are written or served, when there is no way back to the step before.
    step = reader.newest_intact(blocks=True) if step is None else step
    if step is None:
        raise UserError(f"there are no checkpoints in {path}")
    folder = reader.folder
    run = folder.parent if folder.name == "checkpoints" else folder
    return RunModel(run, step, reader.demand(step), reader.meta(step), trusted)


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
