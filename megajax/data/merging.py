"""Joins token files."""

from collections.abc import Sequence
from pathlib import Path

from megajax.config.errors import UserError
from megajax.data.indexed import IndexedTokens, IndexedWriter, has_modes, index_path, tokens_path


def merge(inputs: Sequence[str | Path], output: str | Path, *, overwrite: bool = False) -> IndexedTokens:
    """Writes the documents of all inputs, prefixes or folders, to `output` and opens it.

    Raises:
        UserError: no or damaged input, inputs of different dtypes, some with modes and some without, or output that
            exists.
    """
    prefixes = [prefix for given in inputs for prefix in _prefixes(Path(given))]
    for path in (tokens_path(output), index_path(output)):
        if path.exists() and not overwrite:
            raise UserError(f"{path}: exists already. Choose another --output-prefix, or give --overwrite.")
        if any(path.absolute() == made(prefix).absolute() for prefix in prefixes for made in (tokens_path, index_path)):
            raise UserError(f"{path}: is one of the inputs, too. Choose another --output-prefix.")
    files = [_opened(prefix) for prefix in prefixes]
    with IndexedWriter(output, files[0].dtype) as writer:
        for prefix in prefixes:
            writer.append_index(prefix)
    return _opened(Path(output))


def _prefixes(given: Path) -> list[Path]:
    """The prefix, or those of all token files of a folder, by name."""
    if not given.is_dir():
        return [given]
    prefixes = sorted({path.with_suffix("") for path in given.iterdir() if path.suffix in (".bin", ".idx")})
    if not prefixes:
        raise UserError(f"--input {given}: the folder has no token files (.bin and .idx).")
    return prefixes


def _opened(prefix: Path) -> IndexedTokens:
    return IndexedTokens(prefix, multimodal=has_modes(prefix) if index_path(prefix).is_file() else False)
