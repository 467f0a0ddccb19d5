"""Configs of English text from Python's standard library, for BERT and T5, and of a vocabulary for it."""

from dataclasses import dataclass, field
from typing import ClassVar

from megajax.config.builds import Builds
from megajax.config.errors import Problem
from megajax.config.paths import PathText
from megajax.data.config import LoaderConfig, at_least, between, split_problems
from megajax.data.masked.config import MaskedSentencesConfig, MaskedSpansConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryTextConfig(Builds):
    """The common settings of both kinds of rows: sentences of docstrings and comments of Python's standard library."""

    target: ClassVar[str] = "megajax.data.text.library:build_splits"

    megabytes: float = 16.0
    """Size of the source files, in 10^6 bytes; each file is a document. About 4 % of it is English text."""
    split: str = "90,9,1"
    """Shares of training, validation and test, by number of files."""
    cache_dir: PathText | None = None
    """Folder for the token file and its index; none: the user's cache folder."""
    seed: int | None = None
    """Seed for the choice of files and the order of rows; none: the run's seed."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How rows are read ahead."""

    def masked(self, prefix: str) -> MaskedSentencesConfig | MaskedSpansConfig:
        """The config of rows of this token file."""
        raise NotImplementedError

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return self.masked("").leaves()

    def problems(self) -> list[Problem]:
        return split_problems(self.split) + between("megabytes", self.megabytes, 0.01, 1e6)


@dataclass(frozen=True, kw_only=True, slots=True)
class LibrarySentencesConfig(LibraryTextConfig):
    """Masked sentences for BERT from the documentation in Python's standard library. Needs no download.

    Example: `mj.LibrarySentencesConfig(megabytes=4)`
    """

    next_sentence: bool = True
    """Cut a sample into two parts, swapped in half of the samples, for BERT's second task. False: one part."""

    def masked(self, prefix: str) -> MaskedSentencesConfig:
        """The config of rows of this token file."""
        return MaskedSentencesConfig(
            paths=(prefix,), split=self.split, cache_dir=self.cache_dir, next_sentence=self.next_sentence
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LibrarySpansConfig(LibraryTextConfig):
    """Text with masked spans for T5 from the documentation in Python's standard library. Needs no download.

    Example: `mj.LibrarySpansConfig(megabytes=4)`
    """

    def masked(self, prefix: str) -> MaskedSpansConfig:
        """The config of rows of this token file."""
        return MaskedSpansConfig(paths=(prefix,), split=self.split, cache_dir=self.cache_dir)


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryWordPieceConfig(Builds):
    """WordPiece with a vocabulary trained, at the first start, on the documentation in Python's standard library.

    Needs the extra `tokenizers`, but no file.

    Example: `mj.LibraryWordPieceConfig(size=8192)`
    """

    target: ClassVar[str] = "megajax.data.text.library:build_tokenizer"

    size: int = 2000
    """Tokens of the vocabulary; [BOS], [EOS] and sentinels follow them."""
    extra_ids: int = 0
    """Sentinels <extra_id_0>, …: T5 needs one for each masked span."""
    megabytes: float = 16.0
    """Size of the source files, in 10^6 bytes."""
    cache_dir: PathText | None = None
    """Folder for the vocabulary; none: the user's cache folder."""

    def problems(self) -> list[Problem]:
        problems = at_least("size", self.size, 200) + at_least("extra_ids", self.extra_ids, 0)
        return problems + between("megabytes", self.megabytes, 0.01, 1e6)
