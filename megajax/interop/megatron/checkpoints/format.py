"""Checkpoints of Megatron-LM as a format of stored models.

The model config comes from the arguments inside, by the table of Megatron-LM's flags. Checkpoints are written in the
`torch` format: one file for one rank, which Megatron's converters reshard.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.weight_source import Entry, WeightSource
from megajax.checkpoint.zarr_reader import OBSERVED
from megajax.config.compose import assemble
from megajax.config.errors import ConfigError, UserError
from megajax.config.hints import below
from megajax.config.settings_tree import patch_of
from megajax.data.text.config import MockConfig
from megajax.interop.megatron.checkpoints.archive import NAMESPACE, write_archive
from megajax.interop.megatron.checkpoints.arguments import arguments, script_of
from megajax.interop.megatron.checkpoints.checkpoint import TRACKER, MegatronCheckpoint, MegatronModel
from megajax.interop.megatron.checkpoints.names import FUSED_NORMS, LazyTensor
from megajax.interop.megatron.checkpoints.pickles import Name, Record
from megajax.interop.megatron.checkpoints.ranks import FILE
from megajax.interop.megatron.checkpoints.tables import second_names, table
from megajax.interop.megatron.flags import run as megatron_run
from megajax.interop.megatron.flags.encoders import bert_embedding, bert_stack, t5_embedding, t5_stack
from megajax.interop.megatron.flags.hybrid import decoder_stack
from megajax.interop.megatron.flags.model import embedding, width_scaling
from megajax.interop.megatron.flags.reading import Arguments, MegatronFlag
from megajax.interop.megatron.flags.translate import FLAGS, FLAGS_OF
from megajax.interop.weights.foreign import declared_by, export_tensor
from megajax.interop.weights.formats import Reading, split_name
from megajax.interop.weights.model_differences import describe_differences, differences
from megajax.interop.weights.name_mapping import MappedTensor, resolved
from megajax.interop.weights.stored_model import (
    Advance,
    Options,
    StateArray,
    StoredModel,
    TrainingState,
    stored_foreign,
)
from megajax.layers.param import ParamSpec
from megajax.optim.config import AdamWConfig
from megajax.storage.atomic_folders import new_folder
from megajax.training.run_config import RunConfig


def read(name: str, reading: Reading) -> StoredModel:
    """The model of megatron:DIR, with the optimizer's state if it can be split by weights."""
    opened = open_model(split_name(name)[1].absolute(), vocabulary=reading.vocabulary)
    stored = stored_foreign(name, opened.foreign)
    training = None
    if opened.moments:
        training = TrainingState(opened.iteration, partial(continued_config, opened), partial(state, opened))
    return replace(stored, left_out=[*stored.left_out, *opened.dropped], training=training)


def write(stored: StoredModel, target: Path, options: Options, advance: Advance) -> list[str]:
    """Writes a checkpoint in the `torch` format for one rank."""
    dtype = options.dtype or jnp.dtype(stored.origin.dtype or "float32")
    with new_folder(target, stored.elements() * dtype.itemsize) as folder:
        table = write_model(
            folder, stored.model, stored.weights, engine=options.family != "local", dtype=dtype, advance=advance
        )
    return [
        f"{target}: {len(table)} tensors in {dtype.name} for one rank, layers of "
        + ("plain torch" if options.family == "local" else "Transformer Engine (--family=local: of plain torch)"),
        "without the tokenizer; Megatron-LM reads it with --load, --ckpt-format torch, --use-checkpoint-args",
    ]


MAKERS = {
    "pretrain_gpt.py": (decoder_stack, embedding, width_scaling),
    "pretrain_bert.py": (bert_stack, bert_embedding, width_scaling),
    "pretrain_t5.py": (t5_stack, t5_embedding, width_scaling),
}
"""Script -> functions that make the model's settings from flags."""
NEGATED = {
    "disable-bias-linear": "add_bias_linear",
    "no-bias-gelu-fusion": "bias_gelu_fusion",
    "bert-no-binary-head": "bert_binary_head",
    "no-yarn-correction-range-round-to-int": "yarn_correction_range_round_to_int",
}
"""Flags that set an argument of another name to false -> the argument."""
EXPORTED: Mapping[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "make_vocab_size_divisible_by": 1,
    "consumed_train_samples": 0,
    "consumed_valid_samples": 0,
    "no_save_optim": True,
    "no_save_rng": True,
}
"""Arguments of exported checkpoints: the whole model on one rank, without padding of the vocabulary."""
MEMBERS = {"megatron.core.transformer.enums.AttnBackend": ("flash", "fused", "unfused", "local", "auto")}
"""Enum of an argument that a flag sets -> its members, numbered from 1."""
NULL_TOKENIZERS = ("NullTokenizer",)
"""Tokenizers with one token more than --vocab-size, the end of a document."""


def open_model(folder: Path, *, vocabulary: int | None = None) -> MegatronModel:
    """The model with the state of its optimizer; tensors are compared, not read.

    vocabulary: number of tokens, if the arguments hold only the padded number.
    Raises UserError for unsupported features, for files that are damaged or refused, and with everything that does not
    fit.
    """
    checkpoint = MegatronCheckpoint(folder)
    return checkpoint.open(model_config(checkpoint.args, checkpoint.script(), vocabulary, checkpoint.where))


def continued_config(opened: MegatronModel, base: RunConfig, run: Path) -> tuple[RunConfig, list[str]]:
    """The config of a continued run with optimizer, schedule and batch from the arguments; and the settings they lack.

    base: the config of a new run with the weights.
    """
    schedule = replace(base.schedule, warmup_fraction=None)
    run_config = replace(base, checkpoint=CheckpointConfig(load=run), run_dir=f"{run}-continued", schedule=schedule)
    flags = _flags(opened.args, "pretrain_gpt.py")
    makers = (megatron_run.optimizer, megatron_run.schedule, megatron_run.batch)
    parts = ("optimizer", "schedule", "batch")
    settings = _settings(flags, makers, (*parts, "steps"))
    config, config_problems = assemble(RunConfig, run_config, patch_of(settings.items()))
    problems = [*flags.problems, *(problem for problem in config_problems if problem.setting.startswith(parts))]
    if config is not None and not problems:
        return config, []
    betas = {name: opened.args.get(f"adam_{name}") for name in ("beta1", "beta2")}
    rule = AdamWConfig(**{name: beta for name, beta in betas.items() if beta is not None})
    return replace(run_config, optimizer=rule), [
        f"settings of optimizer, schedule and batch ({problem})" for problem in problems
    ]


def state(opened: MegatronModel, declared: Mapping[str, ParamSpec]) -> dict[str, StateArray]:
    """A run's state except weights, by name: moments and counts. Missing observations are 0."""
    counts: dict[str, np.ndarray | np.generic] = {
        "step": np.int32(opened.iteration),
        "optimizer.count": np.int32(opened.updates),
        "consumed_samples": np.uint32(opened.consumed_samples),
        "scheduled_samples": np.int32(opened.scheduled_samples),
        "skipped": np.int32(max(0, opened.iteration - opened.updates)),
        "loss_scale": np.float32(1),
        "scale_counters": np.zeros(2, np.int32),
    }
    stored_paths = opened.foreign.weights.shapes
    counts |= {
        OBSERVED + path: np.zeros(spec.shape, np.float32)
        for path, spec in declared.items()
        if spec.updater is not None and path not in stored_paths
    }
    arrays = {
        name: StateArray(Entry(values.shape, values.dtype), partial(np.asarray(values).__getitem__))
        for name, values in counts.items()
    }
    for kind, moments in opened.moments.items():
        for path, shape in moments.shapes.items():
            entry = Entry(tuple(shape), np.dtype(np.float32))
            arrays[f"optimizer.{kind}.{path}"] = StateArray(entry, partial(moments.read, path))
    return arrays


def write_model(
    folder: Path,
    model: Any,
    weights: WeightSource,
    *,
    engine: bool = True,
    dtype: np.dtype | None = None,
    advance: Callable[[int], None] = lambda elements: None,
) -> list[MappedTensor]:
    """Writes release/mp_rank_00/model_optim_rng.pt and the tracker file into an existing folder -> the table.

    engine: whether names are those of Transformer Engine's layers, else of plain torch layers; dtype: of the weights;
    None: float32. Raises UserError for a model that Megatron-LM's arguments can't express, OSError if the folder can't
    be written.
    """
    impl = "transformer_engine" if engine else "local"
    args = {**arguments(model), **EXPORTED, "transformer_impl": impl}
    args["padded_vocab_size"] = args["vocab_size"]
    try:
        unexpressed = describe_differences(differences(model, model_config(args, script_of(model))))
    except UserError as error:
        unexpressed = [str(error)]
    if unexpressed:
        problem = "Megatron-LM's arguments can't express the model. These settings would differ:"
        raise UserError(below(problem, unexpressed))
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


def model_config(
    args: Mapping[str, Any], script: str, vocabulary: int | None = None, source: str = "the arguments"
) -> Any:
    """Arguments of a run of Megatron-LM -> the model config.

    args: the namespace by attribute; script: the script of Megatron-LM that trains this kind of model.
    """
    flags = _flags(args, script)
    settings = _settings(flags, MAKERS[script], ("model.",))
    settings |= {"model.vocabulary_size": _vocabulary(args, vocabulary, source), "data": MockConfig()}
    if flags.refusals:
        raise UserError(below(f"{source}: the model has features that MegaJAX lacks:", flags.refusals))
    config, config_problems = assemble(RunConfig, None, patch_of(settings.items()))
    problems = [*flags.problems, *(problem for problem in config_problems if problem.setting.startswith("model"))]
    if problems or config is None:
        raise ConfigError(problems or config_problems, source)
    return config.model


def _settings(flags: Arguments, makers: Sequence[Callable], parts: tuple[str, ...]) -> dict[str, Any]:
    """The settings that start with one of `parts`, from flags."""
    settings = {name: value for maker in makers for name, value in maker(flags).items()}
    settings |= flags.single_settings()
    return {name: value for name, value in settings.items() if name.startswith(parts)}


def _flags(args: Mapping[str, Any], script: str) -> Arguments:
    """The arguments as flags of a command line, without those that Megatron-LM derives from others."""
    if args.get("weight_decay_incr_style") == "constant":
        args = {**args, "start_weight_decay": None, "end_weight_decay": None}
    flags = Arguments({**FLAGS, **FLAGS_OF.get(script, {})})
    flags.flags = {row.name: value for row in flags.table.values() if (value := _value(row, args)) is not None}
    return flags


def _value(row: MegatronFlag, args: Mapping[str, Any]) -> Any:
    """The value of a flag; None: it was not given, or is off."""
    if row.name in NEGATED:
        return True if args.get(NEGATED[row.name], True) is False else None
    names = [name.replace("-", "_") for name in (row.name, *row.also)]
    value = next((args[name] for name in names if args.get(name) is not None), None)
    if isinstance(value, Record | Name):
        value = _member(value) if row.kind is str else None
    if value is None or (row.kind is bool and not value):
        return None
    if row.kind is list:
        return list(map(str, value)) if isinstance(value, list | tuple) else [str(value)]
    if row.kind is str and isinstance(value, tuple):
        return ",".join(map(str, value))
    return row.kind(value) if isinstance(value, int | float | str | list) else None


def _member(value: Record | Name) -> str | None:
    """The name of a member of an enum, which a pickle has by name or by number; None: not known."""
    if isinstance(value, Name) or not value.arguments:
        return (value.dotted if isinstance(value, Name) else value.kind).rpartition(".")[2]
    numbers = dict(enumerate(MEMBERS.get(value.kind, ()), 1))
    return numbers.get(value.arguments[0]) if type(value.arguments[0]) is int else None


def _vocabulary(args: Mapping[str, Any], vocabulary: int | None, source: str) -> int:
    padded, recorded = args.get("padded_vocab_size"), args.get("vocab_size")
    unpadded = recorded + (args.get("tokenizer_type") in NULL_TOKENIZERS) if isinstance(recorded, int) else None
    size = vocabulary or unpadded or padded
    if not isinstance(size, int):
        raise UserError(f"{source} does not record the number of tokens: give --vocabulary=N")
    if isinstance(padded, int) and size > padded:
        raise UserError(f"{source}: {padded} rows of embeddings, fewer than {size} tokens: see --vocabulary")
    return size


VERSION = 3.0
LINEAR = re.compile(r"^(.*\blinear_\w+|output_layer)\.weight$")


def _engine_name(name: str, names: Mapping[str, str]) -> str:
    """The name of a norm in Transformer Engine, which stores it in the layer of the next matrix, if there is one."""
    for matrix, norm in FUSED_NORMS.items():
        layer, separator, kind = name.rpartition(f".{norm}.")
        if separator and f"{layer}.{matrix}.weight" in names:
            return f"{layer}.{matrix}.layer_norm_{kind}"
    return name


def _read(tensor: MappedTensor, weights: WeightSource, dtype: np.dtype, advance: Callable[[int], None]) -> np.ndarray:
    """A tensor of Megatron-LM from the weights."""
    values = export_tensor(tensor, weights, dtype)
    advance(values.size)
    return values
