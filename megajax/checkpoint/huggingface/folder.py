"""A Hugging Face model folder: config.json, safetensors, tokenizer files."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megajax.checkpoint.huggingface.family import Family, Settings
from megajax.checkpoint.huggingface.names import fitted
from megajax.checkpoint.huggingface.quantized import dequantizing
from megajax.checkpoint.huggingface.registry import family_of
from megajax.checkpoint.huggingface.safetensors import SafetensorsFolder
from megajax.checkpoint.weights.foreign import ForeignModel, ForeignWeights, Tensors, declared_by, demand_fit
from megajax.checkpoint.weights.tensor_table import Mapped, resolved
from megajax.config.errors import ConfigError, UserError
from megajax.config.tree import check

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"


class HuggingFaceModel(NamedTuple):
    """A folder that was read and fits."""

    family: Family
    config: dict[str, Any]
    """config.json, without how tensors are quantized."""
    model: Any
    """The model config."""
    tensors: Tensors
    table: Sequence[Mapped]
    weights: ForeignWeights


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises UserError if there is none."""
    try:
        return _json(folder / CONFIG)
    except OSError as error:
        raise UserError(
            f"{folder} is not a Hugging Face model folder: {CONFIG} can't be read ({error.strerror})"
        ) from error


def _json(path: Path) -> dict[str, Any]:
    """A file with a mapping of settings. Raises UserError if it is none, OSError if it can't be read."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not a JSON file ({error})") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path} is a {type(settings).__name__}, not a mapping of settings")
    return settings


def _pixels(folder: Path) -> dict[str, Any]:
    """How preprocessor_config.json normalises images; {} if there is none."""
    path = folder / PREPROCESSOR
    if not path.is_file():
        return {}
    settings = _json(path)
    return {name: settings[name] for name in ("image_mean", "image_std") if settings.get(name)}


def read_model(folder: Path) -> ForeignModel:
    """The model of a folder. Raises UserError for settings that we lack, and for files that are damaged."""
    _, _, model = _described(folder)
    return model


def open_model(folder: Path) -> HuggingFaceModel:
    """The model of a folder, whose tensors fit; none is read yet. Raises UserError with everything that does not."""
    family, config, read = _described(folder)
    declared = declared_by(read.model)
    table = resolved(read.rows, declared)
    demand_fit(read.tensors, table, read.ignored)
    weights = ForeignWeights(read.tensors, table, declared)
    return HuggingFaceModel(family, config, read.model, read.tensors, table, weights)


def model_of(folder: Path | str) -> Any:
    """The model config of a folder's config.json. Raises UserError for settings that we lack."""
    return _settings_read(Path(folder)).model


class _Read(NamedTuple):
    """What config.json says."""

    family: Family
    config: dict[str, Any]
    """It, without how tensors are quantized."""
    model: Any
    reader: Callable[[Tensors], Tensors]
    """Tensors of files -> as they are without quantization."""


def _settings_read(folder: Path) -> _Read:
    config = read_config(folder)
    settings = Settings({**_pixels(folder), **config}, str(folder / CONFIG))
    family = family_of(settings)
    reader, model = dequantizing(settings), _model(family, settings)
    settings.finish(family.unused)
    try:
        check(model)
    except ConfigError as error:
        lines = "\n".join(f"  {problem}" for problem in error.problems)
        raise UserError(f"{settings.where} gives a model that is not possible:\n{lines}") from error
    config.pop("quantization_config", None)
    return _Read(family, config, model, reader)


def _model(family: Family, settings: Settings) -> Any:
    """The model config. Raises UserError for values that nothing can be computed with."""
    try:
        return family.read(settings)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        lines = "".join(f"\n  {problem}" for problem in settings.problems)
        raise UserError(f"{settings.where} can't be read as {family.name} ({error}){lines}") from error


def _described(folder: Path) -> tuple[Family, dict[str, Any], ForeignModel]:
    family, config, model, reader = _settings_read(folder)
    files = reader(SafetensorsFolder(folder))
    tensors, model = fitted(files, family, model)
    model = family.adjusted(model, tensors.entries())
    named = {*tensors.names.values()}
    read = ForeignModel(
        model=model,
        tensors=tensors,
        rows=family.rows(model),
        ignored=family.ignored,
        family=family.name,
        settings=config,
        names={here: there for here, there in tensors.names.items() if here != there},
        copies=[name for name in files.entries() if name not in named],
    )
    return family, config, read
