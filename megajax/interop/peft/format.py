"""Adapter folders of the PEFT library as a format of stored models."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megajax.checkpoint.weight_source import Entry, WeightSource, converted
from megajax.config.errors import UserError
from megajax.config.hints import listed
from megajax.interop.huggingface.family import Family
from megajax.interop.huggingface.format import chosen_family
from megajax.interop.peft.folder import SUFFIXES, TENSORS, adapter_files, base_of, read_adapter
from megajax.interop.peft.settings import CONFIG
from megajax.interop.weights.adapters import JoinedWeights, merged
from megajax.interop.weights.foreign import declared_by
from megajax.interop.weights.formats import Reading, has_files_of, open_stored, split_name
from megajax.interop.weights.model_differences import demand_same_model
from megajax.interop.weights.model_parts import adapters_of, quantization_of, without_adapters, without_quantization
from megajax.interop.weights.quantize_on_load import Quantizing
from megajax.interop.weights.regrouped import groups_of, regrouped
from megajax.interop.weights.safetensors import SafetensorsFolder, TensorFile
from megajax.interop.weights.stored_model import Advance, Options, StoredModel
from megajax.layers.low_rank import ADAPTERS
from megajax.layers.moe.observations import ExpertLoad
from megajax.layers.param import ParamSpec
from megajax.models.protocol import ids_below
from megajax.optim.groups import trainable
from megajax.storage.atomic_folders import new_folder

SAMPLE = 16
"""Elements of each dimension at both ends of a weight that are compared with the base model's."""
LEFT_OUT = "not in the folder: the biases by which experts are chosen"
BASE_ADVICE = (
    "write the model that the adapters were trained on with --to=hf:DIR, and give it with --base=hf:DIR, or a name at "
    "the Hub with --base=NAME; or set base_model_name_or_path in adapter_config.json"
)


def read(name: str, reading: Reading) -> StoredModel:
    """The model of peft:DIR: that of `reading.base`, by default of the folder that it names, with the adapters."""
    folder = split_name(name)[1]
    base = reading.base or f"hf:{base_of(folder, 'give --base=hf:DIR or --base=RUN')}"
    stored = open_stored(base, replace(reading, base=None, adapter=None))
    stored.demand_fit()
    if adapters_of(stored.model) is not None:
        raise UserError(f"--base={base} already has adapters; convert it with --merge first")
    return with_adapter(stored, folder, reading)


def with_adapter(stored: StoredModel, folder: Path, reading: Reading) -> StoredModel:
    """A model with the adapter of a PEFT folder or of a run beside its weights; adapters that it has are merged.

    reading: says how the run is read. Raises UserError for an adapter of another model.
    """
    encoder = stored.model.text_encoder()  # it has no heads, which a folder may lack
    stored.fitted(None if encoder is None else declared_by(encoder))
    stored = stored if adapters_of(stored.model) is None else merged(stored)
    quantization = quantization_of(stored.model)
    if has_files_of(folder, "peft"):
        plain, quantizing = without_quantization(stored.model), Quantizing.if_any(stored.model)
        weights = stored.weights if quantizing is None else quantizing.inverse(stored.weights)
        peft = read_adapter(folder, plain, chosen_family(plain, "", stored.origin)[0].rows(plain), weights)
        model = peft.model if quantization is None else replace(peft.model, quantization=quantization)
        return stored.derived(model, JoinedWeights(stored.weights, peft))
    run = open_stored(folder, replace(reading, adapter=None))
    if adapters_of(run.model) is None:
        raise UserError(f"{folder}: its run has no adapters (model.lora)")
    message = f"the adapter of {folder} (here) belongs to another model (there):"
    demand_same_model(without_adapters(run.model), without_quantization(stored.model), message)
    model = run.model
    if quantization != quantization_of(model):
        model = replace(model, quantization=quantization)  # an adapter is added to any form of the same weights
    declared, where = declared_by(model), stored.weights.where
    weights = stored.fitted(declared)
    if biases := moved_biases(declared, run.weights, weights):
        problem = f"the biases by which experts are chosen are not those of {where}: {listed(biases)} differ"
        raise UserError(f"{folder}: {problem}. Its adapter alone is another model: give the run itself.")
    return stored.derived(model, JoinedWeights(weights, run.weights))


def write(stored: StoredModel, folder: Path, options: Options, advance: Advance) -> list[str]:
    """Writes the adapters alone. Raises UserError for a model without any, or a run that trained other weights too."""
    if adapters_of(stored.model) is None:
        raise UserError(f"--to=peft:{folder}: the model has no adapters (model.lora)")
    _demand_adapters_alone(stored, folder)
    base, lines = base_model(stored, options)
    config, tensors = _files(stored, options, base)
    with new_folder(folder, sum(tensor.nbytes for tensor in tensors.values())) as staging:
        (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        entries = {name: Entry(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        with TensorFile(staging / TENSORS, entries) as file:
            for name, tensor in tensors.items():
                file.write(name, tensor)
                advance(tensor.size)
    count, kind = sum(name.endswith(SUFFIXES[0]) for name in tensors), "DoRA " * config["use_dora"]
    modules, dtype = ", ".join(config["target_modules"]), options.dtype or "float32"
    return [f"{folder}: {count} {kind}adapters of rank {config['r']} on {modules}, {dtype}", *lines]


def verify(stored: StoredModel, name: str, options: Options, advance: Advance) -> str:
    """Compares the tensors of the adapters with the files. Returns a summary; raises UserError if they differ."""
    folder, (_, expected), (_, lines) = split_name(name)[1], _files(stored, options, None), base_model(stored, options)
    adapters = SafetensorsFolder(folder)
    differing = [name for name, tensor in expected.items() if adapters.read(name).tobytes() != tensor.tobytes()]
    advance(sum(tensor.size for tensor in expected.values()))
    if differing:
        raise UserError(f"{folder} does not hold the adapters that were written: {', '.join(differing)} differ")
    if left_out := [line for line in lines if line.startswith(LEFT_OUT)]:
        return f"verified: {len(expected)} tensors of adapters as written. {left_out[0]}"
    return f"verified: {len(expected)} tensors, all equal"


def _demand_adapters_alone(stored: StoredModel, folder: Path) -> None:
    """Raises UserError for a run that trained other weights as well as adapters."""
    if not stored.trained:
        return
    optimizer = stored.config(folder, []).optimizer
    weights = {path: spec for path, spec in stored.declared.items() if spec.updater is None}
    adapters = [path for path in weights if path.endswith(ADAPTERS)]
    other_weights = [path for path in trainable(optimizer, weights, adapters) if path not in adapters]
    if other_weights:
        raise UserError(
            f"--to=peft:{folder}: the run trained other weights as well as its adapters (optimizer.trainable="
            f"{','.join(optimizer.trainable)}), which would be lost: {', '.join(other_weights)}\n"
            "Write the whole model instead: --merge --to=hf:DIR"
        )


def base_model(stored: StoredModel, options: Options) -> tuple[str | None, list[str]]:
    """(the base model to record for an adapter, lines about it).

    It is --base, or else the folder that the weights came from. Raises UserError if --base has other weights, and if
    the run has moved biases by which experts are chosen, which are the base model's with an adapter.
    """
    named_folder = options.base.removeprefix("hf:")
    folder = named_folder or (stored.origin.folder if stored.origin.family else "")
    biases = moved_biases(stored.declared, stored.weights, None)
    left_out = [f"{LEFT_OUT}, which the base model must have: {listed(biases)}"] * bool(biases)
    if not folder:
        return None, [f"base model: not known; {BASE_ADVICE}", *left_out]
    if not Path(folder).is_dir():
        line = f"base model: {folder}, which is not a folder here, so its weights were not compared"
        return folder, [line, *left_out]
    base = open_stored(f"hf:{folder}", Reading(ignore=["*"]))
    base.demand_fit()
    quantizing = Quantizing.if_any(stored.model)
    weights = regrouped(base.weights, groups_of(base.declared), groups_of(stored.declared))
    if differing := _differing(stored, weights if quantizing is None else quantizing.weights(weights)):
        problem = f"the weights below the adapters are not those of {folder}: {listed(differing)} differ"
        if named_folder:
            raise UserError(f"--base={options.base}: {problem}")
        return None, [f"base model: {problem}; {BASE_ADVICE}", *left_out]
    if biases := moved_biases(stored.declared, stored.weights, weights):
        raise UserError(
            f"--to=peft: the biases by which experts are chosen are not those of {folder}, and an adapter can't hold "
            f"them: {listed(biases)} differ\nWrite the whole model instead: --merge --to=hf:DIR"
        )
    return str(Path(folder).absolute()), [f"base model: {Path(folder).absolute()}"]


def moved_biases(declared: Mapping[str, ParamSpec], weights: WeightSource, base: WeightSource | None) -> list[str]:
    """Paths of the states of experts' loads whose biases differ from those of the base model, or from 0."""
    shapes, known, moved = weights.shapes, {} if base is None else base.shapes, list[str]()
    for path, spec in declared.items():
        if isinstance(spec.updater, ExpertLoad) and path in shapes:
            *layers, _, experts = shapes[path]
            box = tuple(slice(0, size) for size in (*layers, 1, experts))
            expected = base.read(path, box) if base is not None and path in known else 0
            moved += [path] * bool((weights.read(path, box) != expected).any())
    return moved


def _differing(stored: StoredModel, base: WeightSource) -> list[str]:
    """Paths of weights that differ in shape, or in the first or last elements; padding of tables is not compared."""
    shapes, own_shapes = base.shapes, stored.weights.shapes
    paths = [path for path in own_shapes if not path.endswith(ADAPTERS) and stored.declared[path].updater is None]
    differing = [path for path in paths if shapes.get(path) != own_shapes[path]]
    tokens = ids_below(stored.model)
    for path in (path for path in paths if path not in differing):
        axes, shape = stored.declared[path].axes, own_shapes[path]
        unpadded = {} if tokens is None else {"vocab": tokens}
        sizes = [unpadded.get(axis, size) for axis, size in zip(axes, shape, strict=True)]
        for number in (0, -1):
            box = tuple(slice(max(0, number % size - SAMPLE), min(number % size + SAMPLE, size)) for size in sizes)
            values = stored.weights.read(path, box)
            if not np.array_equal(converted(base.read(path, box), values.dtype, path), values):
                differing.append(path)
                break
    return differing


def _files(stored: StoredModel, options: Options, base: str | None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    plain, quantizing = replace(stored.model, quantization=None), Quantizing.if_any(stored.model)
    weights = stored.weights if quantizing is None else quantizing.inverse(stored.weights)
    config, tensors = adapter_files(plain, _family(stored, options.family), weights, base)
    dtype = options.dtype or np.dtype(np.float32)
    return config, {name: converted(tensor, dtype, name) for name, tensor in tensors.items()}


def _family(stored: StoredModel, name: str = "") -> Family:
    """The family of the model without adapters."""
    return chosen_family(without_adapters(stored.model), name, stored.origin)[0]
