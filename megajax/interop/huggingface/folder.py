"""A Hugging Face model folder: config.json, safetensors, tokenizer files.

Tensors have the names of the family's table, without the prefixes of transformers' classes and without copies.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megajax.config.compose import check
from megajax.config.config_files import download_of
from megajax.config.errors import ConfigError, UserError
from megajax.config.hints import below, download_hint
from megajax.config.read_limits import demanded_settings, read_file
from megajax.interop.huggingface.family import UNREADABLE, Family, Settings
from megajax.interop.huggingface.quantized import dequantizer
from megajax.interop.huggingface.registry import families, family_of, kin_of
from megajax.interop.weights.foreign import ForeignModel, Tensors
from megajax.interop.weights.safetensors import SafetensorsFolder
from megajax.interop.weights.stored_model import RenamedTensors

CONFIG, PREPROCESSOR, KIND = "config.json", "preprocessor_config.json", "a Hugging Face model folder"


def _pixels(folder: Path) -> dict[str, Any]:
    """Mean, deviation and sizes in preprocessor_config.json; {} if there is no such file."""
    path = folder / PREPROCESSOR
    if not path.is_file():
        return {}
    settings = demanded_settings(path, KIND)
    return {name: settings[name] for name in ("image_mean", "image_std", "size") if settings.get(name)}


def read_model(folder: Path, ignore: Collection[str] = ()) -> ForeignModel:
    """The model of a folder. ignore: patterns of unknown settings in config.json that are accepted.

    Raises UserError for a missing folder, unsupported settings and damaged files.
    """
    if not folder.is_dir():
        lines = (
            f"hf:{folder}: there is no folder {folder}",
            download_hint(str(folder)) or f"get it: {download_of(folder)}",
        )
        raise UserError("\n    ".join(filter(None, lines)))
    model, family, config, dequantize, accepted = _read_settings(folder.absolute(), ignore)
    files = dequantize(SafetensorsFolder(folder.absolute()))
    tensors, model = rename_tensors(files, family, model)
    model = family.adjusted(model, tensors.entries)
    originals, text = {*tensors.names.values()}, read_file(folder / CONFIG).decode("utf-8", "replace")
    return ForeignModel(
        model=model,
        tensors=tensors,
        rows=family.rows(model),
        ignored=family.ignored,
        extra=family.extra,
        family=family.name,
        settings=config,
        text=text,
        accepted=accepted,
        names={name: stored_name for name, stored_name in tensors.names.items() if name != stored_name},
        copies=[name for name in files.entries if name not in originals],
    )


def model_of(folder: Path | str, ignore: Collection[str] = ()) -> Any:
    """The model config of a folder's config.json. Raises UserError for unsupported settings.

    Example: `mj.model_of("models/Llama-3.1-8B-Instruct")`
    """
    return _read_settings(Path(folder), ignore)[0]


def _read_settings(
    folder: Path, ignore: Collection[str]
) -> tuple[Any, Family, dict[str, Any], Callable[[Tensors], Tensors], dict[str, Any]]:
    """(model, family, config.json without quantization_config, dequantizer, accepted unknown settings)."""
    config = demanded_settings(folder / CONFIG, KIND)
    settings = Settings({**_pixels(folder), **config}, str(folder / CONFIG))
    try:
        family = family_of(settings)
    except UserError as error:
        raise UserError(f"{error}{_differences(config)}") from None
    dequantize, model = dequantizer(settings), family.model_of(settings)
    accepted = settings.finish(family.unused, ignore)
    try:
        check(model)
    except ConfigError as error:
        raise UserError(below(f"{settings.where} gives an invalid model:", error.problems)) from error
    config.pop("quantization_config", None)
    model = replace(model, family=family.name) if hasattr(model, "family") else model
    return model, family, config, dequantize, accepted


LISTED = 8
"""Differences in a message."""


def _differences(config: Mapping[str, Any]) -> str:
    """Lines on the settings of an unsupported type that its nearest family lacks or refuses; "" if those are most."""
    kin, differences = kin_of(str(config.get("model_type"))), dict[str, list[str]]()
    for name in ("llama",) if kin is None else kin.nearest:
        settings, family = Settings(config), families()[name]
        with suppress(*UNREADABLE, UserError):
            family.read(settings)
            settings.close(family.unused)
            unknown = [f"{key}={value}: {name} has no such setting" for key, value in settings.findings.unknown.items()]
            differences[name] = [*settings.findings.problems, *unknown]
    nearest = min(differences, key=lambda name: len(differences[name]), default="")
    if not nearest or 2 * len(differences[nearest]) > len(config):
        return ""
    return "\n" + below(f"Differences of its settings from {nearest}:", differences[nearest] or ["none"], LISTED)


ROWS = 4096
"""Rows of a tensor that are compared at a time."""


def rename_tensors(tensors: Tensors, family: Family, model: Any) -> tuple[RenamedTensors, Any]:
    """The tensors under the names of the family's table, without copies; and the model, untied if the head differs.

    Raises UserError if two tensors have the same name in the table.
    """
    names: dict[str, str] = {}
    for stored_name in tensors.entries:
        name = family.name_in_table(stored_name)
        if name in names:
            raise UserError(f"{tensors.where} has {name} twice, as {names[name]} and as {stored_name}")
        names[name] = stored_name
    copies, heads = _present(family.copies, names), _present(family.heads, names)
    if getattr(model, "tied", False) and heads:
        if all(_is_copy(copy, original, names, tensors) for copy, original in heads.items()):
            copies |= heads
        else:
            model = replace(model, tied=False)
    if not getattr(model, "tied", True):
        # Until transformers 5, an untied head had the bias of the tied one, which is stored under that name alone.
        biases = [(copy, bias) for copy, bias in family.heads.items() if bias.endswith(".bias") and bias in names]
        names |= {copy: names.pop(bias) for copy, bias in biases if copy not in names}
    for copy, original in copies.items():
        if _is_copy(copy, original, names, tensors):
            # A copy without an original gets the original's name.
            names.setdefault(original, names.pop(copy))
    return RenamedTensors(tensors, names), model


def _present(copies: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    return {copy: original for copy, original in copies.items() if copy in names}


def _is_copy(copy: str, original: str, names: Mapping[str, str], tensors: Tensors) -> bool:
    """Whether a tensor equals its original, or there is no original."""
    return original not in names or _equal(tensors.read(names[copy]), tensors.read(names[original]))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and all(
        np.array_equal(a[row : row + ROWS], b[row : row + ROWS]) for row in range(0, len(a), ROWS)
    )
