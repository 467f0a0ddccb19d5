"""Settings of data: where rows come from, how they are cut and masked, and how they are read ahead.

Each config says which leaves its rows have (`leaves()`) and builds its row sources:
`cfg.build(tokenizer=, schema=, rows=Rows(...), seed=) -> Splits`; schema: the leaves that the model reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from megajax.batch import Schema
from megajax.config.builds import Builds
from megajax.config.errors import Problem, UserError
from megajax.data.splits import NAMES, Rows, Splits, parse_paths, parse_split

__all__ = [
    "BlendConfig",
    "DataConfig",
    "LoaderConfig",
    "MaskedSentencesConfig",
    "MaskedSpansConfig",
    "MockConfig",
    "Rows",
    "RowsConfig",
    "Splits",
    "StandardLibraryConfig",
]


def _split_problems(split: str) -> list[Problem]:
    try:
        parse_split(split)
    except UserError as error:
        return [Problem("split", str(error))]
    return []


def _between(where: str, value: float, least: float, most: float) -> list[Problem]:
    return [] if least <= value <= most else [Problem(where, f"expected {least:g} to {most:g}, found {value:g}")]


def _at_least(where: str, value: float, least: float) -> list[Problem]:
    return [] if value >= least else [Problem(where, f"expected {least} or more, found {value}")]


def text_leaves(isolated: bool) -> dict[str, str]:
    """The leaves of a row of text, name -> dtype; isolated: documents in a row do not attend to each other."""
    leaves = {"tokens": "int32", "labels": "int32", "loss_mask": "float32", "positions": "int32"}
    return leaves | {"segment_ids": "int32"} if isolated else leaves


class RowsConfig(Protocol):
    """A data config of your own."""

    loader: "LoaderConfig"
    """A field of the config."""

    def leaves(self) -> Mapping[str, str]:
        """The leaves of a row, name -> dtype."""
        ...

    def build(self, *, tokenizer: Any, schema: Schema, rows: Rows, seed: int) -> Splits:
        """Row sources (`len`, `[i]` -> mapping of arrays) for training, validation and test; pure functions of i.

        schema: the leaves that the model reads; rows: how many rows of each split the run reads.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """Reading of rows ahead of the step that uses them."""

    threads: int = 1
    """Threads that read batches. One is fastest: token files are memory-mapped, and more threads compete."""
    prefetch: int = 4
    """Batches read ahead and kept in host memory."""

    def problems(self) -> list[Problem]:
        return _at_least("threads", self.threads, 1) + _at_least("prefetch", self.prefetch, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFilesConfig(Builds):
    """Token files, one or a weighted blend of several, and how they are split."""

    paths: tuple[str, ...] = ()
    """Prefixes of .bin/.idx pairs, each split into train, validation and test: "a,b", or with weights "0.3,a,0.7,b"."""
    train_paths: tuple[str, ...] = ()
    """Prefixes, with or without weights, of training data only; in place of `paths`."""
    valid_paths: tuple[str, ...] = ()
    """The same for validation."""
    test_paths: tuple[str, ...] = ()
    """The same for the test split."""
    split: str = "969,30,1"
    """Shares of training, validation and test in each of `paths`, by number of sequences, or by number of documents for
    masked data; scaled to a sum of 1."""
    cache_dir: str | None = None
    """Folder for index files; none: the user's cache folder. It need not be shared between hosts."""
    surplus: float = 0.005
    """Additional share of rows built for each dataset of a blend, beyond what its weight needs."""
    seed: int | None = None
    """Seed for the order of documents and rows; none: the run's seed."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How rows are read ahead."""

    def problems(self) -> list[Problem]:
        problems = _split_problems(self.split) + _at_least("surplus", self.surplus, 0)
        lists = {f"{name}_paths": getattr(self, f"{name}_paths") for name in NAMES}
        given = [name for name, items in lists.items() if items]
        if self.paths and given:
            problems.append(Problem("paths", f"set together with {', '.join(given)}", "use one of the two ways"))
        if not self.paths and not given:
            problems.append(Problem("paths", "no data path given", "set data.paths=PREFIX (without .bin and .idx)"))
        for name, items in {"paths": self.paths, **lists}.items():
            try:
                parse_paths(items or ("unset",))
            except UserError as error:
                problems.append(Problem(name, str(error)))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendConfig(TokenFilesConfig):
    """One token file or a weighted blend of several, cut into the same rows as by Megatron-LM."""

    target: ClassVar[str] = "megajax.data.blend:build_splits"

    reset_positions: bool = False
    """Restart positions at 0 after each end-of-document token."""
    reset_attention_mask: bool = False
    """Tokens do not attend past the end-of-document token before them."""
    eod_mask_loss: bool = False
    """Mask the loss where the input is the end-of-document token."""
    isolate_documents: bool = False
    """Mask attention between documents of one row and restart positions at each. Documents are the stored sequences,
    with or without an end-of-document token."""
    extra_token: bool = True
    """Read one token more than a row holds, as the label of the last one."""
    drop_last: bool = True
    """Drop the incomplete last row of the validation split; false pads it. Other splits always drop it."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return text_leaves(self.isolate_documents or self.reset_attention_mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedConfig(TokenFilesConfig):
    """What masked data share. A document of the token files has a sequence for each sentence."""

    mask_probability: float = 0.15
    """Share of the tokens that are masked."""
    short_probability: float = 0.1
    """Share of the samples that have a random length in place of the row's."""
    largest_ngram: int = 3
    """Words of the longest n-gram that is masked as a whole."""
    full_words: bool = True
    """Mask a word with all its pieces."""
    geometric: bool = False
    """Draw the lengths of n-grams from a geometric distribution (SpanBERT) in place of probabilities that fall with
    1/n."""
    longer_ngrams: bool = False
    """Exchange the probabilities of short and long n-grams."""

    def problems(self) -> list[Problem]:
        problems = TokenFilesConfig.problems(self)
        if not 0 < self.mask_probability < 1:
            problems.append(Problem("mask_probability", f"expected more than 0, less than 1: {self.mask_probability}"))
        problems += _between("short_probability", self.short_probability, 0, 1)
        problems += _at_least("largest_ngram", self.largest_ngram, 1)
        if self.geometric and self.longer_ngrams:
            problems.append(Problem("longer_ngrams", "has no effect with geometric lengths", "set one of the two"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedSentencesConfig(MaskedConfig):
    """Runs of sentences with masked words, for BERT: the same samples as by Megatron-LM.

    Of the masked tokens, 80 % become the mask token, 10 % a random one, and 10 % stay.
    """

    target: ClassVar[str] = "megajax.data.masked_sentences:build_splits"

    next_sentence: bool = True
    """Cut a sample into two parts, in half of the samples exchanged: BERT's second task. False: one part."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        names = ("tokens", "labels", "segment_ids", "token_types")
        leaves = {"loss_mask": "float32"} | dict.fromkeys(names, "int32")
        return leaves | {"is_random": "int32"} if self.next_sentence else leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedSpansConfig(MaskedConfig):
    """Text with blanks and what belongs in them, for T5: the same samples as by Megatron-LM."""

    target: ClassVar[str] = "megajax.data.masked_spans:build_splits"

    largest_ngram: int = 10
    """Words of the longest span."""
    geometric: bool = True
    """Draw the lengths of spans from a geometric distribution (SpanBERT); false: with probabilities that fall with
    1/n."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        names = ("encoder_tokens", "encoder_segment_ids", "tokens", "labels", "segment_ids")
        return {"loss_mask": "float32"} | dict.fromkeys(names, "int32")


@dataclass(frozen=True, kw_only=True, slots=True)
class MockConfig(Builds):
    """Synthetic documents with the tokens 1, 2, 3, …, to measure speed: 100,000 of random length, a third per split."""

    target: ClassVar[str] = "megajax.data.mock:build_splits"

    isolate_documents: bool = False
    """Mask attention between documents of one row and restart positions at each."""
    seed: int | None = None
    """Seed for the order of documents and rows; none: the run's seed."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How rows are read ahead."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return text_leaves(self.isolate_documents)


@dataclass(frozen=True, kw_only=True, slots=True)
class StandardLibraryConfig(Builds):
    """The source files of Python's standard library as text, for the byte tokenizer. Needs no download."""

    target: ClassVar[str] = "megajax.data.standard_library:build_splits"

    megabytes: float = 8.0
    """Size of the text in 10^6 bytes: whole files, one document each, up to this limit."""
    split: str = "90,9,1"
    """Shares of training, validation and test, by number of files."""
    cache_dir: str | None = None
    """Folder for the token file and its index; none: the user's cache folder."""
    isolate_documents: bool = False
    """Mask attention between files of one row and restart positions at each."""
    seed: int | None = None
    """Seed for the choice of files and the order of rows; none: the run's seed."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How rows are read ahead."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return text_leaves(self.isolate_documents)

    def problems(self) -> list[Problem]:
        return _split_problems(self.split) + _between("megabytes", self.megabytes, 0.01, 1e6)


DataConfig = BlendConfig | MaskedSentencesConfig | MaskedSpansConfig | MockConfig | StandardLibraryConfig
