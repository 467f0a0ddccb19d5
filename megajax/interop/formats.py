"""The formats of stored models: runs of MegaJAX, and FORMAT:DIR of other libraries. Imports neither jax nor numpy.

A new format is one file, with functions `read` and `write`, and one row in `FORMATS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megajax.config.class_references import resolve
from megajax.config.file_paths import format_prefix, store_url


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How a stored model is read."""

    base: str | None = None
    """The model that adapters belong to; None: the one that they name."""
    vocabulary: int | None = None
    """Number of tokens, for a checkpoint that does not record it."""
    trusted: bool = False
    """Whether the config of a run may name code that is not of MegaJAX."""
    ignore: Sequence[str] = ()
    """Patterns of unknown settings of a folder's model that are accepted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A format of models in folders. Functions are named, not imported, because they need jax."""

    title: str
    """A folder in this format, in words."""
    files: tuple[str, ...]
    """Patterns of files of which a folder in this format has at least one."""
    reader: str
    """(name, Reading) -> StoredModel."""
    writer: str
    """(StoredModel, folder, Options, advance) -> lines of a summary."""
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

    def detect(self, folder: Path) -> bool:
        """Whether a folder has files of this format."""
        return any(next(folder.glob(pattern), None) is not None for pattern in self.files)

    def read(self, name: str, reading: Reading) -> Any:
        """The `StoredModel` of a name. Tensors of another library are not compared with the model yet.

        Raises UserError if it does not exist or can't be read.
        """
        return resolve(self.reader)(name, reading)

    def write(self, stored: Any, folder: Path, options: Any, advance: Callable[[int], None]) -> list[str]:
        """Writes a `StoredModel` into a new folder. Returns a summary, line by line.

        Raises UserError for a folder that exists, can't be written, or can't hold the model.
        """
        return resolve(self.writer)(stored, folder, options, advance)

    def verify(self, stored: Any, name: str, options: Any, advance: Callable[[int], None]) -> str:
        """Reads what was written and compares it. Returns a summary; raises UserError if it differs."""
        return resolve(self.verifier)(stored, name, options, advance)


FORMATS = {
    "": Format(
        title="a run",
        files=("config.yaml", "checkpoints"),
        reader="megajax.interop.runs.format:read",
        writer="megajax.interop.runs.format:write",
        adapters="beside",
        quantized=True,
        steps=True,
    ),
    "hf": Format(
        title="a Hugging Face folder",
        files=("config.json", "*.safetensors"),
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
    """The `StoredModel` of FORMAT:DIR or of a run. Raises UserError if it does not exist or can't be read."""
    return format_of(name).read(local_name(name), reading or Reading())
