"""Settings of the tokenizers."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from megajax.config.builds import Builds
from megajax.config.errors import Problem


class TokenizerBuilder(Protocol):
    """A tokenizer config of your own."""

    def build(self) -> Any:
        """A `megajax.tokenizers.base.Tokenizer`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteTokenizerConfig(Builds):
    """One token per byte: ids 0 to 255 are the bytes, 256 ends a document. Needs no files."""

    target: ClassVar[str] = "megajax.tokenizers.byte:ByteTokenizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class GPT2TokenizerConfig(Builds):
    """GPT-2's byte-level BPE, from vocab.json and merges.txt (extra `tokenizers`)."""

    target: ClassVar[str] = "megajax.tokenizers.gpt2:GPT2Tokenizer"

    vocabulary: str
    """Path of vocab.json, which maps tokens to ids."""
    merges: str
    """Path of merges.txt, with one merge per line in order of rank."""
    eod: str = "<|endoftext|>"
    """Token that ends a document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceTokenizerConfig(Builds):
    """A Hugging Face tokenizer.json (extra `tokenizers`)."""

    target: ClassVar[str] = "megajax.tokenizers.huggingface:HuggingFaceTokenizer"

    path: str
    """Path of tokenizer.json or of its folder."""
    eod: str | None = None
    """Token that ends a document; none: the first of the usual names in the vocabulary."""
    special_tokens_in_text: bool = True
    """Encode special tokens that appear in the text, such as </s>, as those tokens, as Hugging Face does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NullTokenizerConfig(Builds):
    """Text that already consists of token ids, separated by spaces; the last id of the vocabulary ends a document."""

    target: ClassVar[str] = "megajax.tokenizers.null:NullTokenizer"

    vocabulary_size: int
    """Number of ids, including the one that ends a document, vocabulary_size - 1."""

    def problems(self) -> list[Problem]:
        hint = "give at least 1: the last id ends a document"
        return [] if self.vocabulary_size > 0 else [Problem("vocabulary_size", f"is {self.vocabulary_size}", hint)]


@dataclass(frozen=True, kw_only=True, slots=True)
class WordPieceTokenizerConfig(Builds):
    """BERT's WordPiece, from vocab.txt (extra `tokenizers`), with the tokens that masked data needs."""

    target: ClassVar[str] = "megajax.tokenizers.wordpiece:WordPieceTokenizer"

    vocabulary: str
    """Path of vocab.txt, with one token in each line."""
    lower: bool = True
    """Lower-case the text and strip accents; false for a cased vocabulary."""
    extra_ids: int = 0
    """Sentinels <extra_id_0>, … added after the vocabulary: T5 needs one for each masked span, usually 100."""

    def problems(self) -> list[Problem]:
        return [] if self.extra_ids >= 0 else [Problem("extra_ids", f"is {self.extra_ids}", "give 0 or more")]


TokenizerConfig = (
    ByteTokenizerConfig
    | GPT2TokenizerConfig
    | HuggingFaceTokenizerConfig
    | NullTokenizerConfig
    | WordPieceTokenizerConfig
)
"""Every tokenizer a run can name."""
