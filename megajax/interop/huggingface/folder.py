"""A Hugging Face model folder: config.json, safetensors, tokenizer files."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megajax.checkpoint.weights.foreign import ForeignModel, ForeignWeights, Tensors, declared_by, demand_fit
from megajax.checkpoint.weights.tensor_table import Mapped, resolved
from megajax.config.budget import read_json
from megajax.config.errors import ConfigError, UserError
from megajax.config.nearest import download_hint
from megajax.config.tree import check
from megajax.interop.huggingface.family import Family, Settings
from megajax.interop.huggingface.names import rename_tensors
from megajax.interop.huggingface.quantized import dequantizer
from megajax.interop.huggingface.registry import family_of
from megajax.interop.huggingface.safetensors import SafetensorsFolder

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"


class HuggingFaceModel(NamedTuple):
    """A model folder whose tensors match its config."""

    family: Family
    config: dict[str, Any]
    """config.json without quantization_config."""
    model: Any
    """The model config."""
    tensors: Tensors
    table: Sequence[Mapped]
    weights: ForeignWeights
    note: str
    """About accepted settings, see `ForeignModel.note`."""


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
    """Mean and deviation in preprocessor_config.json; {} if there is no such file."""
    path = folder / PREPROCESSOR
    if not path.is_file():
        return {}
    settings = _json(path)
    return {name: settings[name] for name in ("image_mean", "image_std") if settings.get(name)}


def read_model(folder: Path, ignore: Collection[str] = ()) -> ForeignModel:
    """The model of a folder. ignore: patterns of unknown settings in config.json that are accepted.

    Raises UserError for a missing folder, unsupported settings and damaged files.
    """
    if not folder.is_dir():
        lines = f"hf:{folder}: there is no folder {folder}", download_hint(str(folder))
        raise UserError("\n    ".join(filter(None, lines)))
    _, _, model = _open(folder.absolute(), ignore)
    return model


def open_model(folder: Path, ignore: Collection[str] = ()) -> HuggingFaceModel:
    """The model of a folder; tensors are checked but not read yet. Raises UserError with everything that differs."""
    family, config, foreign = _open(folder, ignore)
    declared = declared_by(foreign.model)
    table = resolved(foreign.rows, declared)
    demand_fit(foreign.tensors, table, foreign.ignored)
    weights = ForeignWeights(foreign.tensors, table, declared)
    return HuggingFaceModel(family, config, foreign.model, foreign.tensors, table, weights, foreign.note())


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
    family = family_of(settings)
    dequantize, model = dequantizer(settings), _model(family, settings)
    accepted = settings.finish(family.unused, ignore)
    try:
        check(model)
    except ConfigError as error:
        lines = "\n".join(f"  {problem}" for problem in error.problems)
        raise UserError(f"{settings.where} gives an invalid model:\n{lines}") from error
    config.pop("quantization_config", None)
    return _ConfigJson(family, config, model, dequantize, accepted)


def _model(family: Family, settings: Settings) -> Any:
    """The model config. Raises UserError for values that the family can't read."""
    try:
        return family.read(settings)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        lines = "".join(f"\n  {problem}" for problem in settings.findings.problems)
        raise UserError(f"{settings.where} can't be read as {family.name} ({error}){lines}") from error


def _open(folder: Path, ignore: Collection[str]) -> tuple[Family, dict[str, Any], ForeignModel]:
    family, config, model, dequantize, accepted = _read_settings(folder, ignore)
    files = dequantize(SafetensorsFolder(folder))
    tensors, model = rename_tensors(files, family, model)
    model = family.adjusted(model, tensors.entries())
    originals = {*tensors.names.values()}
    foreign = ForeignModel(
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
    return family, config, foreign
