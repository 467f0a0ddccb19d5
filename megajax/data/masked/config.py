"""Configs of masked text for BERT and T5, and of pairs of texts."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from megajax.config.bounds import Bounds, Count, Index, Share
from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.config.paths_and_store_urls import PathText
from megajax.data.rows.config import LoaderConfig, Split, TokenFilesConfig
from megajax.data.text.config import Megabytes


def two_sided_leaves() -> dict[str, str]:
    """The leaves of a row for an encoder and a decoder, name -> dtype."""
    names = ("encoder_tokens", "encoder_segment_ids", "tokens", "labels", "segment_ids")
    return {"loss_mask": "float32"} | dict.fromkeys(names, "int32")


@dataclass(frozen=True, kw_only=True)
class MaskedConfig(TokenFilesConfig):
    """The common settings of masked data. A document of the token files has a sequence for each sentence."""

    mask_probability: Annotated[float, Bounds(above=0, below=1)] = 0.15
    """Share of the tokens that are masked."""
    short_probability: Share = 0.1
    """Share of the samples with a random length below the row's."""
    largest_ngram: Count = 3
    """Words of the longest n-gram that is masked as a whole."""
    full_words: bool = True
    """Mask a word with all its pieces."""
    geometric: bool = False
    """Draw the lengths of n-grams from a geometric distribution (SpanBERT) instead of probabilities that fall with
    1/n."""
    longer_ngrams: bool = False
    """Swap the probabilities of short and long n-grams."""

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if self.geometric and self.longer_ngrams:
            problems.append(Problem("longer_ngrams", "has no effect with geometric lengths", "set one of the two"))
        return problems


@dataclass(frozen=True, kw_only=True)
class MaskedSentencesConfig(MaskedConfig):
    """Consecutive sentences with masked words, for BERT: the same samples as in Megatron-LM.

    Of the masked tokens, 80 % become the mask token, 10 % a random one, and 10 % stay.

    Example: `mj.MaskedSentencesConfig(paths=("data/wiki_text_sentence",), split="949,50,1")`
    """

    target: ClassVar[str] = "megajax.data.masked.sentences:build_splits"

    next_sentence: bool = True
    """Cut a sample into two parts, swapped in half of the samples, for BERT's second task. False: one part."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        names = ("tokens", "labels", "segment_ids", "token_types")
        leaves = {"loss_mask": "float32"} | dict.fromkeys(names, "int32")
        return leaves | {"is_random": "int32"} if self.next_sentence else leaves


@dataclass(frozen=True, kw_only=True)
class MaskedSpansConfig(MaskedConfig):
    """Text with masked spans, and the tokens of the spans, for T5: the same samples as in Megatron-LM.

    Example: `mj.MaskedSpansConfig(paths=("data/wiki_text_sentence",), split="949,50,1")`
    """

    target: ClassVar[str] = "megajax.data.masked.spans:build_splits"

    largest_ngram: Count = 10
    """Words of the longest span."""
    geometric: bool = True
    """Draw the lengths of spans from a geometric distribution (SpanBERT); false: with probabilities that fall with
    1/n."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return two_sided_leaves()


@dataclass(frozen=True, kw_only=True)
class PairsConfig(TokenFilesConfig):
    """Texts in pairs, such as translations, for models with an encoder and a decoder: a row is a pair.

    A path is the output prefix of `megajax.preprocess --target` or `--pairs`, which writes two token files.

    Example: `mj.PairsConfig(paths=("data/translations",), split="98,1,1")`
    """

    target: ClassVar[str] = "megajax.data.translation_pairs:build_splits"

    keys: tuple[str, str] = ("source", "target")
    """Keys of the texts of the encoder and the decoder: the token files are PREFIX_source_document and
    PREFIX_target_document."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return two_sided_leaves()

    def token_files(self, path: str) -> tuple[str, ...]:
        """The prefixes of the token files of a path."""
        return tuple(f"{path}_{key}_document" for key in self.keys)

    def preprocess_flags(self) -> tuple[str, ...]:
        """The flags of `megajax.preprocess` that write these files."""
        return ("--json-keys", *self.keys, "--pairs")


@dataclass(frozen=True, kw_only=True)
class LibraryTextConfig(Builds):
    """The common settings of both kinds of rows: lines of the source files of Python's standard library."""

    target: ClassVar[str] = "megajax.data.standard_library:build_masked_splits"

    megabytes: Megabytes = 2.0
    """Size of the source files, in 10^6 bytes; each file is a document, its lines of several words are sentences."""
    split: Split = "90,9,1"
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


@dataclass(frozen=True, kw_only=True)
class LibrarySentencesConfig(LibraryTextConfig):
    """Masked lines for BERT from the source of Python's standard library. Needs no download.

    Example: `mj.LibrarySentencesConfig(megabytes=4)`
    """

    next_sentence: bool = True
    """Cut a sample into two parts, swapped in half of the samples, for BERT's second task. False: one part."""

    def masked(self, prefix: str) -> MaskedSentencesConfig:
        """The config of rows of this token file."""
        return MaskedSentencesConfig(
            paths=(prefix,), split=self.split, cache_dir=self.cache_dir, next_sentence=self.next_sentence
        )


@dataclass(frozen=True, kw_only=True)
class LibrarySpansConfig(LibraryTextConfig):
    """Text with masked spans for T5 from the source of Python's standard library. Needs no download.

    Example: `mj.LibrarySpansConfig(megabytes=4)`
    """

    def masked(self, prefix: str) -> MaskedSpansConfig:
        """The config of rows of this token file."""
        return MaskedSpansConfig(paths=(prefix,), split=self.split, cache_dir=self.cache_dir)


@dataclass(frozen=True, kw_only=True)
class LibraryWordPieceConfig(Builds):
    """WordPiece with a vocabulary trained, at the first start, on the source of Python's standard library.

    Needs the extra `tokenizers`, but no file.

    Example: `mj.LibraryWordPieceConfig(size=8192)`
    """

    target: ClassVar[str] = "megajax.data.standard_library:build_tokenizer"

    size: Annotated[int, Bounds(at_least=200)] = 2000
    """Tokens of the vocabulary; [BOS], [EOS] and sentinels follow them."""
    extra_ids: Index = 0
    """Sentinels <extra_id_0>, …: T5 needs one for each masked span."""
    megabytes: Megabytes = 2.0
    """Size of the source files, in 10^6 bytes."""
    cache_dir: PathText | None = None
    """Folder for the vocabulary; none: the user's cache folder."""
