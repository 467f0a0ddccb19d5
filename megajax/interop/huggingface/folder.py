"""A Hugging Face model folder: config.json, safetensors, tokenizer files.

Tensors have the names of the family's table, without the prefixes of transformers' classes and without copies.
"""

import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.checkpoint.weights.foreign import ForeignModel, Tensors, contiguous
from megajax.config.compose import check
from megajax.config.errors import ConfigError, UserError
from megajax.config.hints import download_hint
from megajax.config.read_limits import read_json
from megajax.interop.huggingface.family import Family, Settings
from megajax.interop.huggingface.quantized import dequantizer
from megajax.interop.huggingface.registry import families, family_of, kin_of
from megajax.interop.huggingface.safetensors import ONE_FILE, SafetensorsFolder, TensorFile
from megajax.interop.stored.model import RenamedTensors

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises UserError if there is none."""
    try:
        return _json(folder / CONFIG)
    except OSError as error:
        raise UserError(
            f"{folder} is not a Hugging Face model folder: {CONFIG} can't be read ({error.strerror})"
        ) from error


def _json(path: Path) -> dict[str, Any]:
    """A JSON file with a mapping of settings. Raises UserError if it is not one, OSError if it can't be read."""
    try:
        settings = read_json(path, unique=False)
    except ValueError as error:
        raise UserError(f"{path} is not a JSON file ({error})") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path} is a {type(settings).__name__}, not a mapping of settings")
    return settings


def _pixels(folder: Path) -> dict[str, Any]:
    """Mean, deviation and sizes in preprocessor_config.json; {} if there is no such file."""
    path = folder / PREPROCESSOR
    if not path.is_file():
        return {}
    settings = _json(path)
    return {name: settings[name] for name in ("image_mean", "image_std", "size") if settings.get(name)}


def read_model(folder: Path, ignore: Collection[str] = ()) -> ForeignModel:
    """The model of a folder. ignore: patterns of unknown settings in config.json that are accepted.

    Raises UserError for a missing folder, unsupported settings and damaged files.
    """
    if not folder.is_dir():
        lines = f"hf:{folder}: there is no folder {folder}", download_hint(str(folder))
        raise UserError("\n    ".join(filter(None, lines)))
    family, config, model, dequantize, accepted = _read_settings(folder.absolute(), ignore)
    files = dequantize(SafetensorsFolder(folder.absolute()))
    tensors, model = rename_tensors(files, family, model)
    model = family.adjusted(model, tensors.entries())
    originals = {*tensors.names.values()}
    return ForeignModel(
        model=model,
        tensors=tensors,
        rows=family.rows(model),
        ignored=family.ignored,
        extra=family.extra,
        family=family.name,
        settings=config,
        accepted=accepted,
        names={name: stored_name for name, stored_name in tensors.names.items() if name != stored_name},
        copies=[name for name in files.entries() if name not in originals],
    )


def model_of(folder: Path | str, ignore: Collection[str] = ()) -> Any:
    """The model config of a folder's config.json. Raises UserError for unsupported settings.

    Example: `mj.model_of("models/Llama-3.1-8B-Instruct")`
    """
    return _read_settings(Path(folder), ignore).model


class _ConfigJson(NamedTuple):
    """The content of config.json."""

    family: Family
    config: dict[str, Any]
    """config.json without quantization_config."""
    model: Any
    dequantize: Callable[[Tensors], Tensors]
    accepted: dict[str, Any]
    """Unknown settings that are accepted, with their values."""


def _read_settings(folder: Path, ignore: Collection[str]) -> _ConfigJson:
    config = read_config(folder)
    settings = Settings({**_pixels(folder), **config}, str(folder / CONFIG))
    family = _family(settings, config)
    dequantize, model = dequantizer(settings), _model(family, settings)
    accepted = settings.finish(family.unused, ignore)
    try:
        check(model)
    except ConfigError as error:
        lines = "\n".join(f"  {problem}" for problem in error.problems)
        raise UserError(f"{settings.where} gives an invalid model:\n{lines}") from error
    config.pop("quantization_config", None)
    return _ConfigJson(family, config, model, dequantize, accepted)


LISTED = 8
"""Differences in a message."""


def _family(settings: Settings, config: Mapping[str, Any]) -> Family:
    """Raises UserError for an unsupported model_type, with what differs from the nearest family."""
    try:
        return family_of(settings)
    except UserError as error:
        raise UserError(f"{error}{_differences(config)}") from None


def _differences(config: Mapping[str, Any]) -> str:
    """Lines on the settings of an unsupported type that its nearest family lacks or refuses; "" if those are most."""
    kin, differences = kin_of(str(config.get("model_type"))), dict[str, list[str]]()
    for name in ("llama",) if kin is None else kin.nearest:
        settings, family = Settings(config), families()[name]
        with suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError, UserError):
            family.read(settings)
            settings.close(family.unused)
            unknown = [f"{key}={value}: {name} has no such setting" for key, value in settings.findings.unknown.items()]
            differences[name] = [*settings.findings.problems, *unknown]
    nearest = min(differences, key=lambda name: len(differences[name]), default="")
    if not nearest or 2 * len(differences[nearest]) > len(config):
        return ""
    lines = differences[nearest] or ["none"]
    lines = [*lines[:LISTED], *[f"and {len(lines) - LISTED} more"] * (len(lines) > LISTED)]
    return "".join((f"\nDifferences of its settings from {nearest}:", *(f"\n  {line}" for line in lines)))


def _model(family: Family, settings: Settings) -> Any:
    """The model config. Raises UserError for values that the family can't read."""
    try:
        return family.read(settings)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        lines = "".join(f"\n  {problem}" for problem in settings.findings.problems)
        raise UserError(f"{settings.where} can't be read as {family.name} ({error}){lines}") from error


ROWS = 4096
"""Rows of a tensor that are compared at a time."""
EXTRA = "extra"
"""Folder, below that of a run's files, of tensors that its model does not read: an export has them again."""


def stored_extra(files: Path) -> Tensors | None:
    """Those that were written for a run. files: the folder of its files; it may not exist."""
    return SafetensorsFolder(files / EXTRA) if (files / EXTRA).is_dir() else None


def write_extra(tensors: Tensors | None, files: Path) -> None:
    """Writes them for a run. Raises OSError if the folder can't be written."""
    shutil.rmtree(files / EXTRA, ignore_errors=True)  # of an earlier attempt
    if tensors is None:
        return
    (files / EXTRA).mkdir(parents=True)
    with TensorFile(files / EXTRA / ONE_FILE, tensors.entries()) as file:
        for name in tensors.entries():
            file.write(name, contiguous(tensors.read(name)))


def rename_tensors(tensors: Tensors, family: Family, model: Any) -> tuple[RenamedTensors, Any]:
    """The tensors under the names of the family's table, without copies; and the model, untied if the head differs.

    Raises UserError if two tensors have the same name in the table.
    """
    names: dict[str, str] = {}
    for stored_name in tensors.entries():
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
