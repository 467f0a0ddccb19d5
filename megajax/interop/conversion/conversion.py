"""The work of `python -m megajax.convert`: weights are streamed from one folder to another."""

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.reader import open_checkpoints
from megajax.checkpoint.weights.foreign import (
    ForeignModel,
    ForeignWeights,
    Tensors,
    WeightSource,
    declared_by,
    demand_fit,
)
from megajax.checkpoint.weights.formats import foreign_format, read_foreign
from megajax.checkpoint.weights.tensor_table import Mapped, resolved
from megajax.config.budget import read_json
from megajax.config.dump import to_yaml
from megajax.config.errors import UserError
from megajax.config.nearest import listed
from megajax.data.configs import ImageTextConfig, MaskedSentencesConfig, MaskedSpansConfig
from megajax.interop.conversion.comparison import Verified, verify_copies, verify_tensors, verify_weights
from megajax.interop.conversion.model_differences import describe_differences, differences
from megajax.interop.conversion.provenance import FILES, META, Provenance, tensor_dtypes
from megajax.interop.conversion.weights_config import continued_config, model_facts, special_tokens, weights_config
from megajax.interop.huggingface.export import SHARD_BYTES, family_for, write_model
from megajax.interop.huggingface.folder import CONFIG
from megajax.interop.huggingface.names import extra_tensors, stored_extra, write_extra
from megajax.interop.megatron.checkpoints import conversion as megatron_checkpoint
from megajax.interop.megatron.checkpoints.checkpoint import MegatronModel
from megajax.interop.runs.reader import MeanWeights, RunModel, open_step
from megajax.interop.runs.writer import Advance, StateArray, write_step
from megajax.interop.tokenizers.files import copy_files, tokenizer_config
from megajax.layers.param import ParamSpec
from megajax.models.protocol import ids_below
from megajax.storage.new_folder import new_folder
from megajax.training.run_config import RunConfig

MEGATRON = "megatron"
STEPS = "checkpoints"
LONGEST = 60
"""Characters of a setting in a message."""


@dataclass(frozen=True)
class Options:
    """How weights are written."""

    dtype: np.dtype | None = None
    """Dtype of weights; None: float32 in a run, the dtype of the source in other formats."""
    family: str = ""
    shard_bytes: int = SHARD_BYTES
    base: str = ""
    """The base model of an adapter that is written: hf:DIR, or a name to record."""


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model with its weights, in any format."""

    model: Any
    """The model config."""
    weights: WeightSource
    files: Path
    """Folder with files that came with the weights."""
    config: Callable[[Path, Sequence[str]], RunConfig]
    """(folder of a new run, its tokenizer files) -> the config of a run from these weights."""
    origin: Provenance = field(default_factory=Provenance)
    """The original source of the weights."""
    left_out: Sequence[str] = ()
    """Names of tensors that the model does not use."""
    extra: Tensors | None = None
    """Those of them that an export keeps, under their names in the files."""
    note: str = ""
    """About settings of the source that were ignored."""
    tensors: Tensors | None = None
    """The tensors of the weights in another library's format."""
    table: Sequence[Mapped] | None = None
    """The mapping from those tensors to weights."""
    optimizer: MegatronModel | None = None
    """The checkpoint of Megatron-LM with the optimizer's moments."""
    trained: bool = False
    """Whether the weights are those of a training run, unchanged."""
    trusted: bool = False
    """Whether the configs of runs may name code that is not of MegaJAX."""

    @cached_property
    def declared(self) -> Mapping[str, ParamSpec]:
        """Weights and observations of the model on one device, by path."""
        return declared_by(self.model)

    def derived(self, model: Any, weights: WeightSource) -> "StoredModel":
        """A model derived from this one, with its files, origin and config."""

        def config(run: Path, files: Sequence[str]) -> RunConfig:
            return replace(self.config(run, files), model=model)

        changes = {"tensors": None, "table": None, "optimizer": None, "trained": False}
        return replace(self, model=model, weights=weights, config=config, **changes)

    def verify(self, converted: "StoredModel", advance: Advance) -> Verified:
        """Compares all weights with their converted ones. Raises UserError if they differ.

        Other libraries' tensors are rebuilt from the result, unless its dtype can't hold their values.
        """
        if self.tensors is not None and self.table is not None:
            path, shape = next(iter(self.weights.shapes().items()))
            dtype = converted.weights.read(path, tuple(slice(0, 0) for _ in shape)).dtype
            if all(
                jnp.promote_types(source_dtype, dtype) == dtype
                for source_dtype in tensor_dtypes(self.tensors, self.table).values()
            ):
                return verify_tensors(self.tensors, self.table, converted.weights, advance)
        return verify_weights(self.weights, converted.weights, self.declared, advance, converted.table)


def _foreign(name: str, foreign: ForeignModel) -> StoredModel:
    """Weights in another library's format. Raises UserError for tensors that do not fit the model."""
    if not hasattr(foreign.model, "schema"):
        kind = type(foreign.model).__name__.removesuffix("Config")
        raise UserError(
            f"{name} is only a {kind}, which no run can train alone: load it into a model that has one with "
            f"--checkpoint.weights='[{{run: \"{name}\", into: vision}}]'"
        )
    declared, files = declared_by(foreign.model), Path(name.partition(":")[2])
    table = resolved(foreign.rows, declared)
    demand_fit(foreign.tensors, table, foreign.ignored)
    names = {tensor.name for tensor in table}
    extra, unread = extra_tensors(foreign, table), {*foreign.unread(table).values()}
    unmapped = (name for name in foreign.tensors.entries() if name not in names)

    def config(run: Path, files_of_run: Sequence[str]) -> RunConfig:
        tokenizer = tokenizer_config(files_of_run, run / FILES, ids_below(foreign.model), files)
        return weights_config(foreign.model, tokenizer, run)

    return StoredModel(
        model=foreign.model,
        weights=ForeignWeights(foreign.tensors, table, declared),
        files=files,
        config=config,
        origin=Provenance.of(format_of(name) or "", foreign, table),
        extra=extra,
        left_out=[
            *(n for n in unmapped if n not in unread and any(fnmatchcase(n, pattern) for pattern in foreign.ignored)),
            *foreign.copies,
        ],
        note=foreign.note(),
        tensors=foreign.tensors,
        table=table,
    )


def _megatron(name: str, vocabulary: int | None) -> StoredModel:
    """A checkpoint of Megatron-LM, with the optimizer's state if it can be split by weights."""
    opened = megatron_checkpoint.open_model(Path(name.partition(":")[2]).absolute(), vocabulary=vocabulary)
    stored = _foreign(name, opened.foreign)
    stored = replace(stored, left_out=[*stored.left_out, *opened.dropped])
    return replace(stored, optimizer=opened) if opened.moments else stored


def _run(steps: Sequence[RunModel]) -> StoredModel:
    """A step of a run, or the mean of several. Raises UserError if their models differ."""
    last = steps[-1]
    for step in steps[:-1]:
        pairs = differences(step.config.model, last.config.model)
        if pairs := [pair for pair in pairs if pair.name != "sequence_length"]:
            lines = "\n".join(f"  {line}" for line in describe_differences(pairs))
            raise UserError(f"{step.path} (here) and {last.path} (there) are different models:\n{lines}")
    return StoredModel(
        model=last.config.model,
        weights=last.weights() if len(steps) == 1 else MeanWeights([step.weights() for step in steps]),
        files=last.run / FILES,
        extra=stored_extra(last.run / FILES),
        config=lambda run, files: continued_config(last.config, run, last.run / FILES, run / FILES),
        origin=Provenance.of_meta(last.meta, last.path),
        trained=True,
        trusted=last.trusted,
    )


def format_of(name: str) -> str | None:
    """The format of FORMAT:DIR; None for the path of a run."""
    return MEGATRON if name.startswith(f"{MEGATRON}:") else foreign_format(name)


def open_source(
    name: str | None,
    average: Sequence[str] = (),
    last: int | None = None,
    vocabulary: int | None = None,
    *,
    trusted: bool = False,
    ignore: Sequence[str] = (),
) -> StoredModel:
    """FORMAT:DIR, a run or one of its steps; or the mean of the steps `average`, or of the `last` newest of a run.

    vocabulary: number of tokens, for a Megatron-LM checkpoint that does not record it. trusted: whether the config of a
    run may name code that is not of MegaJAX. ignore: patterns of unknown settings of a folder's model that are
    accepted. Raises UserError if the source does not exist or its tensors do not fit the model.
    """
    if average:
        return _run([open_step(Path(path), trusted=trusted) for path in average])
    if name is not None and format_of(name) is not None:
        if last is not None:
            raise UserError(f"--average-last: {name} has no steps to average")
        if format_of(name) == MEGATRON:
            return _megatron(name, vocabulary)
        return _foreign(name, read_foreign(name, ignore))
    if last is None:
        return _run([open_step(Path(name or ""), trusted=trusted)])
    steps = open_checkpoints(name or "")[0].steps()
    if len(steps) < last:
        count = f"{len(steps)} step{'s' * (len(steps) != 1)}"
        raise UserError(f"--average-last={last}: {name} has {count}: {', '.join(map(str, steps))}")
    return _run([open_step(Path(name or ""), step, trusted=trusted) for step in steps[-last:]])


def options(dtype: str | None, family: str = "", shard_gigabytes: float = SHARD_BYTES / 1e9, base: str = "") -> Options:
    """The options of a command line."""
    return Options(jnp.dtype(dtype) if dtype else None, family, int(shard_gigabytes * 1e9), base)


def write(stored: StoredModel, target: str, options: Options, advance: Advance) -> list[str]:
    """Writes a run, or the folder of FORMAT:DIR. Returns a summary, line by line.

    Raises UserError for a target that exists, can't be written, or can't hold the model.
    """
    format_name, folder = format_of(target), Path(target.partition(":")[2])
    quantized_dtype = _quantized_dtype(stored)
    if format_name is not None and quantized_dtype is not None:
        problem = f"the weights are quantized ({quantized_dtype}), which is written to runs only"
        raise UserError(f"--to={target}: {problem}\nConvert from the unquantized weights.")
    if format_name is None:
        lines = _write_run(stored, Path(target), options, advance)
    else:
        write_folder = _write_megatron if format_name == MEGATRON else _write_huggingface
        lines = write_folder(stored, folder, options, advance)
    return [*lines, *[stored.note] * bool(stored.note)]


def elements(stored: StoredModel) -> int:
    """Number of weights."""
    return sum(map(prod, stored.weights.shapes().values()))


def _write_run(stored: StoredModel, run: Path, options: Options, advance: Advance) -> list[str]:
    dtype, quantized_dtype = options.dtype or np.dtype(np.float32), _quantized_dtype(stored)
    if quantized_dtype and options.dtype is None:
        dtype = jnp.dtype(stored.config(run, []).precision.compute)
    with new_folder(run, _bytes(stored, dtype)) as folder:
        files = copy_files(stored.files, folder / FILES)
        write_extra(stored.extra, folder / FILES)
        cfg, left_out = stored.config(run, files), [*stored.left_out]
        number, state = 0, dict[str, StateArray]()
        if stored.optimizer is not None:
            cfg, unread = megatron_checkpoint.continued_config(stored.optimizer, cfg, run)
            left_out += unread
            number = stored.optimizer.iteration
            state = megatron_checkpoint.state(stored.optimizer, stored.declared)
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
        f"{run}: {len(stored.weights.shapes())} arrays, {elements(stored):,} elements, "
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


def _quantized_dtype(stored: StoredModel) -> str | None:
    """The dtype of quantized matrices as the model's config names it; None: not quantized."""
    quantization = getattr(stored.model, "quantization", None)
    return None if quantization is None else quantization.weights


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


def _write_huggingface(stored: StoredModel, target: Path, options: Options, advance: Advance) -> list[str]:
    origin = stored.origin if stored.origin.format == "hf" else Provenance(special_tokens=stored.origin.special_tokens)
    family = family_for(stored.model, options.family, origin.family)
    usual = jnp.dtype(origin.dtype or "float32")

    special = origin.special_tokens
    if not (special or origin.settings):
        special = special_tokens(stored.config(target, []))

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
            special=special,
            extra=stored.extra if family.name == origin.family else None,
            shard_bytes=options.shard_bytes,
            advance=advance,
        )
        files = copy_files(stored.files, folder)
        count = len([*folder.glob("*.safetensors")])
        changes = _changes(origin.settings, read_json(folder / CONFIG, unique=False))
    written_paths = {piece.path for tensor in table for piece in tensor.pieces}
    left_out = [path for path in stored.weights.shapes() if path not in written_paths]
    dtypes = Counter((options.dtype or dtype_of(tensor.name)).name for tensor in table)
    return [
        f"{target}: {len(table)} tensors of {family.name} in {count} file{'s' * (count > 1)}, "
        + ", ".join(f"{number} in {dtype}" for dtype, number in dtypes.items()),
        *[f"left out, not in the format: {listed(left_out)}"] * bool(left_out),
        *[f"{CONFIG}: {changes}"] * bool(origin.settings),
        f"tokenizer: {', '.join(files)}" if files else f"tokenizer: none, because there is none in {stored.files}",
    ]


def _changes(recorded: Mapping[str, Any], written: Mapping[str, Any]) -> str:
    """A text about the settings that differ."""
    kinds = [settings.get("model_type") for settings in (recorded, written)]
    if kinds[0] != kinds[1]:
        return f"written for {kinds[1]}, the source was {kinds[0]}"
    names = [*written, *(name for name in recorded if name not in written)]
    pairs = [(name, recorded.get(name, "absent"), written.get(name, "absent")) for name in names]
    changes = "; ".join(f"{name}={_short(new)}, not {_short(old)}" for name, old, new in pairs if new != old)
    return f"that of the source, but {changes}" if changes else "that of the source"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _write_megatron(stored: StoredModel, target: Path, options: Options, advance: Advance) -> list[str]:
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
        "without the tokenizer; Megatron-LM reads it with --load, --ckpt-format torch, --use-checkpoint-args",
    ]


def verify(stored: StoredModel, target: str, advance: Advance) -> str:
    """Reads the target back and compares it. Returns a summary; raises UserError if they differ."""
    converted_model = open_source(target, trusted=stored.trusted, ignore=["*"])
    result = stored.verify(converted_model, advance)
    if stored.extra is not None and converted_model.extra is not None:
        verify_copies(stored.extra, converted_model.extra)
    return f"verified: {result.arrays} arrays, {result.elements:,} elements, all equal (sha256 {result.sha256})"


def set_aside(folder: Path) -> Path:
    """Renames a folder to NAME.unverified, so that nothing mistakes it for a valid one. Returns the new path."""
    aside = folder.with_name(f"{folder.name}.unverified")
    if aside.exists():
        aside = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.unverified")
    return folder.rename(aside)
