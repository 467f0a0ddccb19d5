"""Adapters in `python -m megajax.convert`: PEFT's folders (peft:DIR), and adapters merged into the weights."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megajax.checkpoint.weights.foreign import Entry
from megajax.checkpoint.weights.formats import foreign_format
from megajax.config.errors import UserError
from megajax.config.nearest import listed
from megajax.interop.conversion import conversion
from megajax.interop.conversion.conversion import Options, StoredModel
from megajax.interop.huggingface.export import family_for
from megajax.interop.huggingface.family import Family
from megajax.interop.huggingface.safetensors import SafetensorsFolder
from megajax.interop.huggingface.shards import TensorFile
from megajax.interop.peft.folder import TENSORS, adapter_files, base_of, read_adapter
from megajax.interop.peft.settings import CONFIG
from megajax.interop.peft.weights import LORA_A, LORA_B, JoinedWeights, MergedWeights
from megajax.interop.runs.writer import Advance, converted
from megajax.optim.groups import trainable
from megajax.storage.new_folder import new_folder

PEFT = "peft:"
"""Prefix of a PEFT folder."""
SAMPLE = 16
"""Elements of each dimension at both ends of a weight that are compared with the base model's."""
BASE_ADVICE = (
    "write the model that the adapters were trained on with --to=hf:DIR, and give it with --base=hf:DIR, or a name at "
    "the Hub with --base=NAME; or set base_model_name_or_path in adapter_config.json"
)


def open_source(
    name: str | None,
    average: Sequence[str],
    last: int | None,
    base: str | None,
    *,
    merge: bool,
    vocabulary: int | None = None,
    trusted: bool = False,
    ignore: Sequence[str] = (),
) -> StoredModel:
    """Like `conversion.open_source`; also opens peft:DIR with the weights of `base`, by default the base that it names.

    merge: add adapters to the weights.
    """
    if name is not None and name.startswith(PEFT):
        if last is not None:
            raise UserError(f"--average-last: {name} has no steps to average")
        stored = _with_adapter(Path(name.removeprefix(PEFT)), base, trusted, ignore)
    elif base is not None:
        raise UserError(f"--base={base}: only an adapter has a base model, and --from={name} is not peft:DIR")
    else:
        stored = conversion.open_source(name, average, last, vocabulary, trusted=trusted, ignore=ignore)
    if not merge:
        return stored
    if (lora := getattr(stored.model, "lora", None)) is None:
        raise UserError("--merge: the model has no adapters (model.lora)")
    merged = MergedWeights(stored.weights, stored.declared, lora.scale())
    return stored.derived(replace(stored.model, lora=None), merged)


def write(stored: StoredModel, target: str, options: Options, advance: Advance) -> list[str]:
    """Like `conversion.write`; also writes the adapters alone, to peft:DIR."""
    adapted = getattr(stored.model, "lora", None) is not None
    if not target.startswith(PEFT):
        if adapted and foreign_format(target) is not None:
            remedy = "--merge adds them to the weights, --to=peft:DIR writes only them"
            raise UserError(f"--to={target}: the model has adapters, which this format can't hold; {remedy}")
        return conversion.write(stored, target, options, advance)
    if not adapted:
        raise UserError(f"--to={target}: the model has no adapters (model.lora)")
    _demand_adapters_alone(stored, target)
    base, lines = base_model(stored, options)
    config, tensors = _files(stored, options, base)
    folder = Path(target.removeprefix(PEFT))
    with new_folder(folder, sum(tensor.nbytes for tensor in tensors.values())) as staging:
        (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        entries = {name: Entry(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        with TensorFile(staging / TENSORS, entries) as file:
            for name, tensor in tensors.items():
                file.write(name, tensor)
                advance(tensor.size)
    rank, modules = config["r"], ", ".join(config["target_modules"])
    return [f"{folder}: {len(tensors) // 2} adapters of rank {rank} on {modules}, {options.dtype or 'float32'}", *lines]


def verify(stored: StoredModel, target: str, options: Options, advance: Advance) -> str:
    """Like `conversion.verify`; a folder that differs is renamed to NAME.unverified."""
    try:
        return _verify(stored, target, options, advance)
    except UserError as error:
        prefix, colon, path = target.partition(":")
        has_format = colon and (prefix == PEFT.removesuffix(":") or conversion.format_of(target) is not None)
        aside = conversion.set_aside(Path(path if has_format else target).absolute())
        raise UserError(f"{error}\nThe folder was renamed to {aside}.") from error


def _verify(stored: StoredModel, target: str, options: Options, advance: Advance) -> str:
    if not target.startswith(PEFT):
        return conversion.verify(stored, target, advance)
    folder, (_, expected) = Path(target.removeprefix(PEFT)), _files(stored, options, None)
    adapters = SafetensorsFolder(folder)
    differing = [name for name, tensor in expected.items() if adapters.read(name).tobytes() != tensor.tobytes()]
    advance(sum(tensor.size for tensor in expected.values()))
    if differing:
        raise UserError(f"{folder} does not hold the adapters that were written: {', '.join(differing)} differ")
    return f"verified: {len(expected)} tensors, all equal"


def _demand_adapters_alone(stored: StoredModel, target: str) -> None:
    """Raises UserError for a run that trained other weights as well as adapters."""
    if not stored.trained:
        return
    optimizer = stored.config(Path(target.removeprefix(PEFT)), []).optimizer
    weights = {path: spec for path, spec in stored.declared.items() if spec.updater is None}
    adapters = [path for path in weights if path.endswith((LORA_A, LORA_B))]
    other_weights = [path for path in trainable(optimizer, weights, adapters) if path not in adapters]
    if other_weights:
        raise UserError(
            f"--to={target}: the run trained other weights as well as its adapters (optimizer.trainable="
            f"{','.join(optimizer.trainable)}), which would be lost: {', '.join(other_weights)}\n"
            "Write the whole model instead: --merge --to=hf:DIR"
        )


def _with_adapter(folder: Path, base: str | None, trusted: bool, ignore: Sequence[str]) -> StoredModel:
    recorded_base = base_of(folder)
    if base is None and (recorded_base is None or not Path(recorded_base).is_dir()):
        problem = "names no base model" if recorded_base is None else f"names {recorded_base}, which is not a folder"
        raise UserError(f"{folder} {problem}: give --base=hf:DIR or --base=RUN")
    stored = conversion.open_source(base or f"hf:{recorded_base}", trusted=trusted, ignore=ignore)
    if getattr(stored.model, "lora", None) is not None:
        raise UserError(f"--base={base} already has adapters; convert it with --merge first")
    adapter = read_adapter(folder, stored.model, _family(stored).rows(stored.model))
    return stored.derived(adapter.model, JoinedWeights(stored.weights, adapter))


def base_model(stored: StoredModel, options: Options) -> tuple[str | None, list[str]]:
    """(the base model to record for an adapter, lines about it).

    It is --base, or else the folder that the weights came from. Raises UserError if --base has other weights.
    """
    named_folder = options.base.removeprefix("hf:")
    folder = named_folder or (stored.origin.folder if stored.origin.format == "hf" else "")
    if not folder:
        return None, [f"base model: not known; {BASE_ADVICE}"]
    if not Path(folder).is_dir():
        return folder, [f"base model: {folder}, which is not a folder here, so its weights were not compared"]
    if differing := _differing(stored, conversion.open_source(f"hf:{folder}", ignore=["*"])):
        problem = f"the weights below the adapters are not those of {folder}: {listed(differing)} differ"
        if named_folder:
            raise UserError(f"--base={options.base}: {problem}")
        return None, [f"base model: {problem}; {BASE_ADVICE}"]
    return str(Path(folder).absolute()), [f"base model: {Path(folder).absolute()}"]


def _differing(stored: StoredModel, base: StoredModel) -> list[str]:
    """Paths of weights that differ in shape, or in the first or last elements."""
    shapes, own_shapes = base.weights.shapes(), stored.weights.shapes()
    paths = [
        path for path in own_shapes if not path.endswith((LORA_A, LORA_B)) and stored.declared[path].updater is None
    ]
    differing = [path for path in paths if shapes.get(path) != own_shapes[path]]
    for path in (path for path in paths if path not in differing):
        for number in (0, -1):
            box = tuple(slice(max(0, number % size - SAMPLE), number % size + SAMPLE) for size in own_shapes[path])
            box = tuple(
                slice(part.start, min(part.stop, size)) for part, size in zip(box, own_shapes[path], strict=True)
            )
            values = stored.weights.read(path, box)
            if not np.array_equal(converted(base.weights.read(path, box), values.dtype, path), values):
                differing.append(path)
                break
    return differing


def _files(stored: StoredModel, options: Options, base: str | None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config, tensors = adapter_files(stored.model, _family(stored, options.family), stored.weights, base)
    dtype = options.dtype or np.dtype(np.float32)
    return config, {name: converted(tensor, dtype, name) for name, tensor in tensors.items()}


def _family(stored: StoredModel, name: str = "") -> Family:
    """The family of the model without adapters."""
    recorded = stored.origin.family if stored.origin.format == "hf" else ""
    return family_for(replace(stored.model, lora=None), name, recorded)
