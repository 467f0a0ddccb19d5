"""The formats of stored models: runs of MegaJAX, and FORMAT:DIR of other libraries. Imports neither jax nor numpy.

A new format is one file, with functions `read` and `write`, and one row in `FORMATS`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megajax.config.class_references import resolve
from megajax.config.paths_and_store_urls import format_prefix, store_url


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How a stored model is read."""

    base: str | None = None
    """The model that adapters belong to; None: the one that they name."""
    adapter: Path | None = None
    """An adapter beside the weights: a PEFT folder, or a run with `model.lora`."""
    vocabulary: int | None = None
    """Number of tokens, for a checkpoint that does not record it."""
    trusted: bool = False
    """Whether the config of a run may name code that is not of MegaJAX."""
    ignore: Sequence[str] = ()
    """Patterns of unknown settings of a folder's model that are accepted."""
    single: bool = False
    """Whether only this process opens it; else all do, together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A format of models in folders. Functions are named, not imported, because they need jax."""

    title: str
    """A folder in this format, in words."""
    files: tuple[str, ...]
    """Names of files and folders of which a folder in this format has at least one."""
    reader: str
    """(name, Reading) -> StoredModel. Tensors of another library are not compared with the model yet.

    Raises UserError for a name that does not exist or can't be read.
    """
    writer: str
    """(StoredModel, new folder, Options, advance) -> lines of a summary.

    Raises UserError for a folder that exists, can't be written, or can't hold the model.
    """
    verifier: str = "megajax.interop.conversion:verify_all"
    """(StoredModel, name of its copy, Options, advance) -> a summary; raises UserError if the copy differs."""
    adapters: Literal["beside", "only", "merged"] = "merged"
    """Whether low-rank adapters are stored beside the weights, are all that is stored, or must be merged."""
    quantized: bool = False
    """Whether weights may be quantized."""
    steps: bool = False
    """Whether a folder has several steps of training."""
    with_tokenizer: bool = False
    """Whether a folder without a tokenizer's files belongs to a model without one."""
    unknown_settings: bool = False
    """Whether its description of a model may have settings that MegaJAX does not know."""


FILES = "tokenizer"
"""Folder of a run for the files beside its weights, such as those of its tokenizer."""
FORMATS = {
    "": Format(
        title="a run",
        files=("config.yaml", "checkpoints"),
        reader="megajax.interop.weights.run_format:read",
        writer="megajax.interop.weights.run_format:write",
        adapters="beside",
        quantized=True,
        steps=True,
    ),
    "hf": Format(
        title="a Hugging Face folder",
        files=("config.json",),
        reader="megajax.interop.huggingface.format:read",
        writer="megajax.interop.huggingface.format:write",
        with_tokenizer=True,
        unknown_settings=True,
    ),
    "megatron": Format(
        title="a checkpoint of Megatron-LM",
        files=("latest_checkpointed_iteration.txt",),
        reader="megajax.interop.megatron.checkpoints.format:read",
        writer="megajax.interop.megatron.checkpoints.format:write",
    ),
    "peft": Format(
        title="a PEFT folder",
        files=("adapter_config.json",),
        reader="megajax.interop.peft.format:read",
        writer="megajax.interop.peft.format:write",
        verifier="megajax.interop.peft.format:verify",
        adapters="only",
        unknown_settings=True,
    ),
}
"""Prefix -> format; "" is the path of a run, or of a step."""


def split_name(name: str | Path) -> tuple[str, Path]:
    """FORMAT:DIR -> (FORMAT, DIR); ("", path) for a run."""
    prefix = format_prefix(name)
    return (prefix, Path(str(name).partition(":")[2])) if prefix in FORMATS and prefix else ("", Path(name))


def named(folder: Path) -> str:
    """FORMAT:folder, by the files in it; the path of a run."""
    prefix = next((prefix for prefix in FORMATS if has_files_of(folder, prefix)), "")
    return f"{prefix}:{folder}" if prefix else str(folder)


def has_files_of(folder: Path, prefix: str) -> bool:
    """Whether a folder has files of a format, perhaps beside those of others: an adapter may lie beside a model."""
    return any((folder / name).exists() for name in FORMATS[prefix].files)


def local_name(name: str | Path) -> str:
    """The name; of FORMAT:URL of a folder in an object store, that of a local copy of its files.

    Raises UserError for a URL without such files, or a copy that can't be written; StoreError.
    """
    prefix, folder = split_name(name)
    if not prefix or store_url(folder) is None:
        return str(name)
    return f"{prefix}:{resolve('megajax.storage.local_copies:local_folder')(folder)}"


def format_of(name: str | Path) -> Format:
    """The format of FORMAT:DIR or of a run."""
    return FORMATS[split_name(name)[0]]


def open_stored(name: str | Path, reading: Reading | None = None) -> Any:
    """The `StoredModel` of FORMAT:DIR, of a run or of a step, with its adapter.

    Raises UserError if it does not exist or can't be read, and for an adapter of another model.
    """
    reading = reading or Reading()
    stored = resolve(format_of(name).reader)(local_name(name), reading)
    if reading.adapter is None:
        return stored
    return resolve("megajax.interop.peft.format:with_adapter")(stored, reading.adapter, reading)
