"""The config of texts in pairs."""

from dataclasses import dataclass
from typing import ClassVar

from megajax.data.config.base import TokenFilesConfig
from megajax.data.config.masked import two_sided_leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class PairsConfig(TokenFilesConfig):
    """Texts in pairs, such as translations, for models with an encoder and a decoder: a row is a pair.

    A path is the output prefix of `megajax.preprocess --target` or `--pairs`, which writes two token files.
    """

    target: ClassVar[str] = "megajax.data.pairs:build_splits"

    keys: tuple[str, str] = ("source", "target")
    """Keys of the text that the encoder reads and of the one that the decoder writes: the token files are
    PREFIX_source_document and PREFIX_target_document."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return two_sided_leaves()

    def token_files(self, path: str) -> tuple[str, ...]:
        """The prefixes of the token files of a path."""
        return tuple(f"{path}_{key}_document" for key in self.keys)
