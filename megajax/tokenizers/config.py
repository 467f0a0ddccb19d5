"""Which tokenizer a run uses: four small configs, each of which builds its own kind."""

from dataclasses import dataclass
from typing import ClassVar

from megajax.config.builds import Builds
from megajax.config.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteTokenizerConfig(Builds):
    """One token per byte: ids 0 to 255 are the bytes, 256 ends a document; vocabulary 257. Needs no files."""

    target: ClassVar[str] = "megajax.tokenizers.byte:ByteTokenizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class GPT2TokenizerConfig(Builds):
    """Byte-level byte-pair encoding from a GPT-2 style pair of files (extra `tokenizers`)."""

    target: ClassVar[str] = "megajax.tokenizers.gpt2:GPT2Tokenizer"

    vocabulary: str
    """Path of vocab.json: token in printable form -> id."""
    merges: str
    """Path of merges.txt: one merge a line, in order of rank."""
    eod: str = "<|endoftext|>"
    """Token that ends a document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceTokenizerConfig(Builds):
    """Any tokenizer that Hugging Face saves as one tokenizer.json (extra `tokenizers`)."""

    target: ClassVar[str] = "megajax.tokenizers.huggingface:HuggingFaceTokenizer"

    path: str
    """Path of tokenizer.json, or of the folder that holds it."""
    eod: str | None = None
    """Token that ends a document; none: the first of the usual names that the vocabulary holds."""
    special_tokens_in_text: bool = True
    """Read special tokens written out in the text, such as </s>, as those tokens (what Hugging Face does)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NullTokenizerConfig(Builds):
    """Text that is token ids already: numbers with blanks between; the last id ends a document."""

    target: ClassVar[str] = "megajax.tokenizers.null:NullTokenizer"

    vocabulary_size: int
    """Number of ids, the one that ends a document (vocabulary_size - 1) included."""

    def problems(self) -> list[Problem]:
        if self.vocabulary_size < 1:
            return [
                Problem("vocabulary_size", f"is {self.vocabulary_size}", "give at least 1: the last id ends a document")
            ]
        return []


TokenizerConfig = ByteTokenizerConfig | GPT2TokenizerConfig | HuggingFaceTokenizerConfig | NullTokenizerConfig
"""Every tokenizer a run can name."""
