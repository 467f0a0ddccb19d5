"""What `python -m megajax.convert` does: weights from one folder to another, streamed."""

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.huggingface.export import SHARD_BYTES, family_for, write_model
from megajax.checkpoint.huggingface.tokenizer_files import copy_files, tokenizer_config
from megajax.checkpoint.new_folder import new_folder
from megajax.checkpoint.reader import open_checkpoints
from megajax.checkpoint.weights.comparison import Verified, verify_tensors, verify_weights
from megajax.checkpoint.weights.foreign import ForeignModel, ForeignWeights, WeightSource, declared_by, demand_fit
from megajax.checkpoint.weights.formats import foreign_format, read_foreign
from megajax.checkpoint.weights.model_differences import differences, in_words
from megajax.checkpoint.weights.run_writer import Advance, StateArray, write_step
from megajax.checkpoint.weights.runs import MeanWeights, RunModel, open_step
from megajax.checkpoint.weights.tensor_table import Mapped, resolved
from megajax.config.dump import to_yaml
from megajax.config.errors import UserError
from megajax.config.nearest import listed
from megajax.data.config import ImageTextConfig, MaskedSentencesConfig, MaskedSpansConfig
from megajax.layers.param import ParamSpec
from megajax.models.protocol import ids_below
from megajax.tools import megatron_checkpoint
from megajax.tools.weights_config import continued, model_facts, special_tokens, weights_config
from megajax.training.run_config import RunConfig

MEGATRON = "megatron"
FILES = "tokenizer"
"""Folder of a run with the files that came with the weights."""
STEPS = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where weights came from first, as a checkpoint remembers it, so that they can go back there unchanged."""

    format: str = ""
    family: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The model's description in that format, such as a config.json."""
    dtype: str = ""
    """Of most tensors."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Of the others, by name."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name in the table of the family -> in the files, where they differ."""


@dataclass(frozen=True)
class Options:
    """How weights are written."""

    dtype: np.dtype | None = None
    """None: float32 in a run; elsewhere as they came, or as they are stored."""
    family: str = ""
    shard_bytes: int = SHARD_BYTES


class Stored(Protocol):
    """A model with its weights, wherever they are stored."""

    @property
    def model(self) -> Any:
        """The model config."""
        ...

    @property
    def declared(self) -> Mapping[str, ParamSpec]:
        """Weights and observations of the model on one device, by path."""
        ...

    @property
    def weights(self) -> WeightSource:
        """Their values."""
        ...

    @property
    def files(self) -> Path:
        """Folder with files that came with the weights."""
        ...

    @property
    def origin(self) -> Origin:
        """Where they came from first."""
        ...

    def config(self, run: Path, files: Sequence[str]) -> RunConfig:
        """Of a new run from these weights. files: of the tokenizer, in the run's folder."""
        ...

    def left_out(self) -> list[str]:
        """Names of tensors that have no place in the model."""
        ...

    def verify(self, made: WeightSource, advance: Advance, table: Sequence[Mapped] | None = None) -> Verified:
        """Compares all weights with those that were made of them, see `verify_weights`. Raises UserError."""
        ...


class ForeignFolder:
    """Weights in another library's format."""

    def __init__(self, name: str, read: ForeignModel):
        self._name, self._read = name, read
        if not hasattr(read.model, "schema"):
            kind = type(read.model).__name__.removesuffix("Config")
            raise UserError(
                f"{name} is a {kind} alone, which no run can train: load it into a model that has one, "
                f"--checkpoint.weights='[{{run: \"{name}\", into: vision}}]'"
            )
        self.model, self.declared = read.model, declared_by(read.model)
        self.table: list[Mapped] = resolved(read.rows, self.declared)
        demand_fit(read.tensors, self.table, read.ignored)
        self.weights = ForeignWeights(read.tensors, self.table, self.declared)
        self.files = Path(name.partition(":")[2])

    @cached_property
    def origin(self) -> Origin:
        entries = self._read.tensors.entries()
        dtypes = {tensor.name: entries[tensor.name].dtype.name for tensor in self.table}
        usual = Counter(dtypes.values()).most_common(1)[0][0]
        return Origin(
            format=format_of(self._name) or "",
            family=self._read.family,
            settings=self._read.settings,
            dtype=usual,
            dtypes={name: dtype for name, dtype in dtypes.items() if dtype != usual},
            names=self._read.names,
        )

    def config(self, run: Path, files: Sequence[str]) -> RunConfig:
        """Of a new run from these weights. files: of the tokenizer, in the run's folder."""
        return weights_config(self.model, tokenizer_config(files, run / FILES, ids_below(self.model), self.files), run)

    def left_out(self) -> list[str]:
        """Names of tensors that have no place in the model."""
        patterns, names = self._read.ignored, {tensor.name for tensor in self.table}
        others = [name for name in self._read.tensors.entries() if name not in names]
        return [*(name for name in others if any(fnmatchcase(name, each) for each in patterns)), *self._read.copies]

    def verify(self, made: WeightSource, advance: Advance, table: Sequence[Mapped] | None = None) -> Verified:
        """Through the tensors that the result gives back, unless it was written in a dtype that can't hold them."""
        path = next(iter(self.weights.shapes()))
        dtype = made.read(path, tuple(slice(0, 0) for _ in self.weights.shapes()[path])).dtype
        if all(jnp.promote_types(each, dtype) == dtype for each in {self.origin.dtype, *self.origin.dtypes.values()}):
            return verify_tensors(self._read.tensors, self.table, made, advance)
        return verify_weights(self.weights, made, self.declared, advance, table)


class MegatronFolder(ForeignFolder):
    """A checkpoint of Megatron-LM, with the state of its optimizer where that can be told apart by weights."""

    def __init__(self, name: str, vocabulary: int | None):
        folder = Path(name.partition(":")[2]).absolute()
        self.opened = megatron_checkpoint.open_model(folder, vocabulary=vocabulary)
        super().__init__(name, self.opened.read)
        self._unsaid: list[str] = []

    def config(self, run: Path, files: Sequence[str]) -> RunConfig:
        """Of a run that goes on with the arguments' optimizer and schedule, where the moments are there."""
        fresh = super().config(run, files)
        if not self.opened.moments:
            return fresh
        config, self._unsaid = megatron_checkpoint.continued(self.opened, fresh, run)
        return config

    def left_out(self) -> list[str]:
        return [*super().left_out(), *self.opened.lost, *self._unsaid]


class RunSteps:
    """The weights of a step of a run, or the mean of several."""

    def __init__(self, steps: Sequence[RunModel]):
        """Raises UserError for steps of other models than the last one's."""
        self._last = steps[-1]
        for step in steps[:-1]:
            pairs = differences(step.config.model, self._last.config.model)
            if pairs := [pair for pair in pairs if pair.name != "sequence_length"]:
                lines = "\n".join(f"  {line}" for line in in_words(pairs))
                raise UserError(f"{step.path} (here) and {self._last.path} (there) are different models:\n{lines}")
        self.model = self._last.config.model
        self.declared = declared_by(self.model)
        self.weights = self._last.weights() if len(steps) == 1 else MeanWeights([step.weights() for step in steps])
        self.files = self._last.run / FILES
        self.origin = Origin(**self._last.meta.get("source", {}))

    def config(self, run: Path, files: Sequence[str]) -> RunConfig:
        """Of a new run from these weights: this one's."""
        del files
        return continued(self._last.config, run)

    def left_out(self) -> list[str]:
        return []

    def verify(self, made: WeightSource, advance: Advance, table: Sequence[Mapped] | None = None) -> Verified:
        return verify_weights(self.weights, made, self.declared, advance, table)


def format_of(name: str) -> str | None:
    """What stands before the colon of FORMAT:DIR; None for the path of a run."""
    return MEGATRON if name.startswith(f"{MEGATRON}:") else foreign_format(name)


def open_source(
    name: str | None, average: Sequence[str] = (), last: int | None = None, vocabulary: int | None = None
) -> Stored:
    """FORMAT:DIR, a run or one of its steps; or the mean of the steps `average`, or of the `last` newest of a run.

    vocabulary: tokens of a Megatron-LM checkpoint that does not say. Raises UserError where there is no such source, or
    where it does not fit.
    """
    if average:
        return RunSteps([open_step(Path(each)) for each in average])
    if name is not None and format_of(name) is not None:
        if last is not None:
            raise UserError(f"--average-last: {name} has no steps")
        return (
            MegatronFolder(name, vocabulary) if format_of(name) == MEGATRON else ForeignFolder(name, read_foreign(name))
        )
    if last is None:
        return RunSteps([open_step(Path(name or ""))])
    steps = open_checkpoints(name or "")[0].steps()
    if len(steps) < last:
        raise UserError(f"--average-last={last}: {name} has {len(steps)} steps: {', '.join(map(str, steps))}")
    return RunSteps([open_step(Path(name or ""), step) for step in steps[-last:]])


def options(dtype: str | None, family: str = "", shard_gigabytes: float = SHARD_BYTES / 1e9) -> Options:
    """Of a command line."""
    return Options(jnp.dtype(dtype) if dtype else None, family, int(shard_gigabytes * 1e9))


def write(stored: Stored, target: str, options: Options, advance: Advance) -> list[str]:
    """Writes a run, or the folder of FORMAT:DIR. Returns lines on what was written.

    Raises UserError for a target that exists, that can't be written, or that has no place for the model.
    """
    form, folder = format_of(target), Path(target.partition(":")[2])
    kept = _quantized_dtype(stored)
    if form is not None and kept is not None:
        what = f"the weights are quantized ({kept}), which is written to runs only"
        raise UserError(f"--to={target}: {what}\nConvert from the weights they were made of.")
    if form is None:
        return _write_run(stored, Path(target), options, advance)
    write_folder = _write_megatron if form == MEGATRON else _write_huggingface
    return write_folder(stored, folder, options, advance)


def elements(stored: Stored) -> int:
    """Number of weights."""
    return sum(map(prod, stored.weights.shapes().values()))


def _write_run(stored: Stored, run: Path, options: Options, advance: Advance) -> list[str]:
    dtype, kept = options.dtype or np.dtype(np.float32), _quantized_dtype(stored)
    if kept and options.dtype is None:
        dtype = jnp.dtype(stored.config(run, []).precision.compute)
    with new_folder(run, _bytes(stored, dtype)) as folder:
        files = copy_files(stored.files, folder / FILES)
        cfg = stored.config(run, files)
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
            "source": asdict(stored.origin),
        }
        number, state = _state(stored)
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
    if state:
        fresh = []
    return [
        f"{run}: {len(stored.weights.shapes())} arrays, {elements(stored):,} elements, "
        + (f"matrices in {kept}, other weights in {dtype.name}" if kept else f"weights in {dtype.name}"),
        *[f"not stored, zero in a new run: {listed(fresh)}"] * bool(fresh),
        *[f"optimizer: {number} steps with their moments, to go on from"] * bool(state),
        *[f"left out: {listed(stored.left_out())}"] * bool(stored.left_out()),
        f"tokenizer: {type(cfg.tokenizer).__name__}" + (f" of {', '.join(files)}" if files else ""),
        f"evaluate it: python -m megajax.evaluate --run={run} --tasks=text:FILE"
        if kept
        else f"train from it: python -m megajax.train --config={run}/config.yaml{_data_setting(cfg.data)}",
    ]


def _quantized_dtype(stored: Stored) -> str | None:
    """What the model's config calls it."""
    quantization = getattr(stored.model, "quantization", None)
    return None if quantization is None else quantization.weights


def _bytes(stored: Stored, dtype: np.dtype) -> int:
    """Of a run, whose weights but quantized ones are in `dtype`."""
    quantized = {path: jnp.dtype(spec.dtype) for path, spec in stored.declared.items() if spec.role == "quantized"}
    return sum(prod(shape) * quantized.get(path, dtype).itemsize for path, shape in stored.weights.shapes().items())


def _data_setting(data: Any) -> str:
    """The setting that names the data, after a blank."""
    value = {"path": "FOLDER", "paths": "PREFIX"}
    if isinstance(data, MaskedSentencesConfig | MaskedSpansConfig):
        value["paths"] = "SENTENCES_PREFIX"
    elif isinstance(data, ImageTextConfig):
        value["paths"] = "FILE.jsonl"
    name = next((name for name in value if hasattr(data, name)), None)
    return "" if name is None else f" --data.{name}={value[name]}"


def _state(stored: Stored) -> tuple[int, dict[str, StateArray]]:
    """The step to write, and what it has beside weights: 0 and nothing where there are no moments."""
    if not isinstance(stored, MegatronFolder) or not stored.opened.moments:
        return 0, {}
    return stored.opened.iteration, megatron_checkpoint.state(stored.opened, stored.declared)


def _write_huggingface(stored: Stored, target: Path, options: Options, advance: Advance) -> list[str]:
    origin = stored.origin if stored.origin.format == "hf" else Origin()
    family = family_for(stored.model, options.family, origin.family)
    usual = jnp.dtype(origin.dtype or "float32")

    def dtype_of(name: str) -> np.dtype:
        return jnp.dtype(origin.dtypes.get(name, usual))

    with new_folder(target, elements(stored) * (options.dtype or usual).itemsize) as folder:
        table = write_model(
            folder,
            stored.model,
            stored.weights,
            family,
            dtype=options.dtype,
            dtypes=dtype_of,
            recorded=origin.settings,
            names=origin.names if family.name == origin.family else {},
            special={} if origin.settings else special_tokens(stored.config(target, [])),
            shard_bytes=options.shard_bytes,
            advance=advance,
        )
        files = copy_files(stored.files, folder)
        count = len([*folder.glob("*.safetensors")])
    held = {piece.path for tensor in table for piece in tensor.pieces}
    left = [path for path in stored.weights.shapes() if path not in held]
    written = Counter((options.dtype or dtype_of(tensor.name)).name for tensor in table)
    return [
        f"{target}: {len(table)} tensors of {family.name} in {count} file{'s' * (count > 1)}, "
        + ", ".join(f"{number} in {dtype}" for dtype, number in written.items()),
        *[f"left out, no place for it: {listed(left)}"] * bool(left),
        *[f"tokenizer: {', '.join(files)}"] * bool(files),
    ]


def _write_megatron(stored: Stored, target: Path, options: Options, advance: Advance) -> list[str]:
    dtype = options.dtype or jnp.dtype("float32" if stored.origin.format != MEGATRON else stored.origin.dtype)
    with new_folder(target, elements(stored) * dtype.itemsize) as folder:
        table = megatron_checkpoint.write_model(
            folder,
            stored.model,
            stored.weights,
            engine=options.family != "local",
            dtype=dtype,
            advance=advance,
        )
    return [
        f"{target}: {len(table)} tensors in {dtype.name} for one rank, layers of "
        + ("plain torch" if options.family == "local" else "Transformer Engine (--family=local: of plain torch)"),
        "the tokenizer is not part of it; Megatron-LM reads it by --load, --ckpt-format torch, --use-checkpoint-args",
    ]


def verified(stored: Stored, target: str, advance: Advance) -> str:
    """Reads the target back and compares it. Returns what was compared; raises UserError where they differ."""
    made = open_source(target)
    result = stored.verify(made.weights, advance, made.table if isinstance(made, ForeignFolder) else None)
    return f"verified: {result.arrays} arrays, {result.elements:,} elements, all equal (sha256 {result.sha256})"


def set_aside(folder: Path) -> Path:
    """Renames a folder to NAME.unverified, so that nothing takes it for a good one. Returns the new path."""
    aside = folder.with_name(f"{folder.name}.unverified")
    if aside.exists():
        aside = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.unverified")
    return folder.rename(aside)
