"""Settings of the tokenizers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol

from megajax.config.bounds import Bounds, Index
from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.config.paths_and_store_urls import StoredText


class TokenizerBuilder(Protocol):
    """The interface of a tokenizer config."""

    def build(self) -> Any:
        """A `megajax.tokenizers.base.Tokenizer`."""
        ...


@dataclass(frozen=True, kw_only=True)
class ByteTokenizerConfig(Builds):
    """One token per byte: ids 0 to 255 are the bytes, 256 ends a document. Needs no files.

    Example: `mj.ByteTokenizerConfig()`
    """

    target: ClassVar[str] = "megajax.tokenizers.byte:ByteTokenizer"


@dataclass(frozen=True, kw_only=True)
class GPT2TokenizerConfig(Builds):
    """GPT-2's byte-level BPE, from vocab.json and merges.txt (extra `tokenizers`).

    Example: `mj.GPT2TokenizerConfig(vocabulary="data/vocab.json", merges="data/merges.txt")`
    """

    target: ClassVar[str] = "megajax.tokenizers.gpt2:GPT2Tokenizer"

    vocabulary: StoredText
    """Path of vocab.json, which maps tokens to ids."""
    merges: StoredText
    """Path of merges.txt, with one merge per line in order of rank."""
    eod: str = "<|endoftext|>"
    """Token that ends a document."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceTokenizerConfig(Builds):
    """A Hugging Face tokenizer.json (extra `tokenizers`).

    Example: `mj.HuggingFaceTokenizerConfig(path="data/tokenizer.json")`
    """

    target: ClassVar[str] = "megajax.tokenizers.huggingface:HuggingFaceTokenizer"

    path: StoredText
    """Path of tokenizer.json or of its folder. Here and in other tokenizers also in an object store, s3:// or gs://.
    Also tokenizer.model, spiece.model, vocab.json (with merges.txt) or vocab.txt, if it is read exactly."""
    eod: str | None = None
    """Token that ends a document; none: the first of the usual names in the vocabulary."""
    special_tokens_in_text: bool = True
    """Encode special tokens that appear in the text, such as </s>, as those tokens, as Hugging Face does."""
    ends: tuple[int, ...] = ()
    """Ids that end an answer besides `eod` and those of generation_config.json beside the file."""
    kind: str = ""
    """Class of transformers that reads the file, such as LlamaTokenizer; empty: that of tokenizer_config.json."""


@dataclass(frozen=True, kw_only=True)
class NullTokenizerConfig(Builds):
    """Text that already consists of token ids, separated by spaces; the last id of the vocabulary ends a document.

    Example: `mj.NullTokenizerConfig(vocabulary_size=50257)`
    """

    target: ClassVar[str] = "megajax.tokenizers.byte:NullTokenizer"

    vocabulary_size: Annotated[int, Bounds(at_least=1, hint="the last id ends a document")]
    """Number of ids, including the one that ends a document, vocabulary_size - 1."""


@dataclass(frozen=True, kw_only=True)
class SentencePieceTokenizerConfig(Builds):
    """A SentencePiece model (extra `tokenizers`).

    Example: `mj.SentencePieceTokenizerConfig(path="data/tokenizer.model")`
    """

    target: ClassVar[str] = "megajax.tokenizers.sentencepiece:SentencePieceTokenizer"

    path: StoredText
    """Path of the .model file."""
    eod: str | None = None
    """Token that ends a document; none: the model's end of a sentence."""
    special_tokens: tuple[str, ...] = ()
    """Tokens added after the model's pieces unless it has them. Their names in the text are encoded as these tokens."""
    extra_ids: Index = 0
    """Sentinels <extra_id_0>, … added after those: T5 needs one for each masked span, usually 100."""
    prepend_bos: bool = False
    """Begin every encoded text with the model's token for the beginning of a sentence."""

    def problems(self) -> list[Problem]:
        return _special_token_problems(self.special_tokens)


@dataclass(frozen=True, kw_only=True)
class TiktokenTokenizerConfig(Builds):
    """Ranks of byte pairs in a file of tiktoken's or of Megatron-LM's TikTokenizer (extra `tokenizers`).

    Example: `mj.TiktokenTokenizerConfig(path="data/cl100k_base.tiktoken")`
    """

    target: ClassVar[str] = "megajax.tokenizers.tiktoken:TiktokenTokenizer"

    path: StoredText
    """Path of a JSON list of rank and token_bytes, or of lines with a token in base64 and its rank."""
    pattern: str = "v2"
    """Pattern that splits the text before pairs are merged: v1 or v2 (Megatron-LM's), or a regular expression."""
    special_tokens: tuple[str, ...] = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
    """Names of the first ids."""
    special_ids: int = 1000
    """Ids reserved for special tokens before the first rank; those without a name are <SPECIAL_7> and so on."""
    vocabulary_size: int | None = None
    """Number of ids, including special ones; further ranks of the file are dropped; none: all ranks."""
    eod: str = "</s>"
    """Token that ends a document."""
    special_tokens_in_text: bool = True
    """Encode special tokens that appear in the text as those tokens, as Megatron-LM does."""

    def problems(self) -> list[Problem]:
        problems = _special_token_problems(self.special_tokens)
        if self.special_ids < len(self.special_tokens):
            problem = f"is {self.special_ids}, below the {len(self.special_tokens)} special_tokens"
            problems.append(Problem("special_ids", problem, "raise it"))
        if self.vocabulary_size is not None and self.vocabulary_size < self.special_ids + 256:
            least = f"{self.special_ids} special ids and 256 bytes"
            problems.append(Problem("vocabulary_size", f"is {self.vocabulary_size}, too small for {least}"))
        return problems


@dataclass(frozen=True, kw_only=True)
class WordPieceTokenizerConfig(Builds):
    """BERT's WordPiece, from vocab.txt (extra `tokenizers`), with the tokens that masked data needs.

    Example: `mj.WordPieceTokenizerConfig(vocabulary="data/vocab.txt")`
    """

    target: ClassVar[str] = "megajax.tokenizers.wordpiece:WordPieceTokenizer"

    vocabulary: StoredText
    """Path of vocab.txt, with one token in each line."""
    lower: bool = True
    """Lower-case the text and strip accents; false for a cased vocabulary."""
    extra_ids: Index = 0
    """Sentinels <extra_id_0>, … added after the vocabulary: T5 needs one for each masked span, usually 100."""


def _special_token_problems(tokens: tuple[str, ...]) -> list[Problem]:
    """Special tokens that are empty, contain a blank, or occur twice."""
    problems = []
    if invalid := [token for token in tokens if not token or len(token.split()) != 1 or token != token.strip()]:
        problems.append(Problem("special_tokens", f"{invalid[0]!r} is empty or contains a blank"))
    if twice := [token for token in tokens if tokens.count(token) > 1]:
        problems.append(Problem("special_tokens", f"{twice[0]!r} is given twice"))
    return problems


TextTokenizerConfig = (
    ByteTokenizerConfig
    | GPT2TokenizerConfig
    | HuggingFaceTokenizerConfig
    | NullTokenizerConfig
    | SentencePieceTokenizerConfig
    | TiktokenTokenizerConfig
    | WordPieceTokenizerConfig
)
"""Tokenizers of text alone."""


@dataclass(frozen=True, kw_only=True)
class MultimodalTokenizerConfig(Builds):
    """Any tokenizer with added tokens, as for images. Their names in the text are encoded as these tokens.

    Example: `mj.MultimodalTokenizerConfig(base=mj.ByteTokenizerConfig())`
    """

    target: ClassVar[str] = "megajax.tokenizers.multimodal:MultimodalTokenizer"

    base: TextTokenizerConfig | TokenizerBuilder
    """The tokenizer of the text."""
    image: str = "<image>"
    """Placeholder token of an image: `specials["image"]`. Added after the vocabulary unless it is in it."""
    added: Mapping[str, str] = field(default_factory=dict)
    """Role -> further token, such as image_start: "<img>". Added unless it is in the vocabulary."""

    def __hash__(self) -> int:  # the default would hash the mapping, which is not hashable
        return hash((self.base, self.image, tuple(sorted(self.added.items()))))

    def problems(self) -> list[Problem]:
        return _special_token_problems((self.image, *self.added.values()))


TokenizerConfig = TextTokenizerConfig | MultimodalTokenizerConfig
"""All built-in tokenizers."""
