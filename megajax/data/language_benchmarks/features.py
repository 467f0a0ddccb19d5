"""Rows of one or two texts for classifiers, made from the examples of benchmarks."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.config.read_limits import utf8_text
from megajax.data.language_benchmarks.config import BenchmarkConfig
from megajax.data.rows.row_source import data_seed
from megajax.data.rows.shuffled_items import ItemRows, ShuffledOrder, splits_from_items
from megajax.data.rows.splits import Rows, Splits
from megajax.tokenizers.base import Tokenizer

SHORTEST = 8
"""Minimum number of tokens of a row."""

type ExampleRow = dict[str, np.ndarray]


class Example(Protocol):
    """An example of a benchmark."""

    @property
    def location(self) -> str:
        """File and line."""
        ...


@dataclass(frozen=True)
class Examples[E: Example]:
    """The examples of a file or split, in order; as a sequence, their rows."""

    items: Sequence[E]
    row: Callable[[E], ExampleRow]
    """The row of an example."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> number of skipped examples."""
    paths: Sequence[Path] = ()
    """The files of the examples."""

    def files(self) -> Sequence[Path]:
        """The files that are read."""
        return self.paths

    def __len__(self) -> int:
        return len(self.items)

    def name(self, item: int) -> str:
        """File and line."""
        return self.items[item].location

    def __getitem__(self, item: int) -> ExampleRow:
        return self.row(self.items[item])


class ExampleRows(ItemRows[Examples[Any]]):
    """Rows of examples, in a different order in each pass."""

    def __init__(self, items: Examples[Any], order: ShuffledOrder):
        super().__init__(items, order)
        self.skipped.update(items.skipped)

    def make(self, item: int, generator: np.random.Generator) -> ExampleRow:
        del generator
        return self.items[item]


def example_splits(
    config: BenchmarkConfig, examples: Callable[[str], Examples[Any] | None], rows: Rows, seed: int
) -> Splits:
    """Row sources of the splits that a run requests. examples: train, valid or test -> its examples or None."""
    order_seed = data_seed(config.seed, seed)

    def make(items: Examples[Any], position: int, row_count: int | None) -> ExampleRows:
        return ExampleRows(items, ShuffledOrder(row_count, order_seed, position))

    return splits_from_items(examples, rows, make)


class SequenceBuilder:
    """Makes sequences of texts: [CLS] first [SEP] second [SEP], padded to the model's length.

    If the vocabulary lacks [CLS] or [SEP], its tokens for the beginning and end of a sequence or document are used.

    Args:
        tokenizer: of the run.
        schema: of the model; the length of its tokens is that of the sequences.

    Raises:
        UserError: the model reads no tokens, or too few.
    """

    def __init__(self, tokenizer: Tokenizer, schema: Schema):
        if "tokens" not in schema or schema["tokens"].shape[-1] < SHORTEST:
            reads = schema["tokens"].shape[-1] if "tokens" in schema else 0
            raise UserError(f"this data makes sequences of {SHORTEST} tokens or more, the model reads {reads}.")
        roles = tokenizer.specials
        self.tokenizer, self.length = tokenizer, schema["tokens"].shape[-1]
        self._begin = roles.get("cls", roles.get("bos", tokenizer.eod))
        self._end = roles.get("sep", roles.get("eos", tokenizer.eod))
        self._pad = tokenizer.eod if tokenizer.pad is None else tokenizer.pad

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text after `clean_text`."""
        return self.tokenizer.encode(clean_text(text))

    def __call__(self, first: np.ndarray, second: np.ndarray | None = None) -> ExampleRow:
        """tokens, token_types and segment_ids, each int32 [S]; texts that are too long are truncated."""
        first, second = truncate_pair(self.length - (2 if second is None else 3), first, second)
        first_part = [[self._begin], first, [self._end]]
        second_part = [] if second is None else [second, [self._end]]
        tokens = np.full(self.length, self._pad, np.int32)
        ids = np.concatenate([*first_part, *second_part])
        tokens[: len(ids)] = ids
        places, begin = np.arange(self.length), 2 + len(first)
        segments = places < len(ids)
        return {
            "tokens": tokens,
            "token_types": (segments & (places >= begin)).astype(np.int32),
            "segment_ids": segments.astype(np.int32),
        }


def truncate_pair(room: int, first: np.ndarray, second: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Truncates two texts to `room` tokens in total, by removing the last token of the longer one (BERT's rule).

    If both are equally long, the second is truncated.
    """
    if second is None:
        return first[:room], None
    shorter = min(len(first), len(second))
    if len(first) + len(second) <= room:
        return first, second
    if shorter <= room // 2:  # the shorter one stays
        keep = room - shorter
        return (first[:keep], second) if len(first) > len(second) else (first, second[:keep])
    return first[: room - room // 2], second[: room // 2]


def clean_text(text: str) -> str:
    """Megatron-LM's cleaning of task texts: single blanks, and none before a period within the text."""
    text = re.sub(r"\s+", " ", text)
    for _ in range(3):
        text = text.replace(" . ", ". ")
    return text


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line) of a file of UTF-8 text. Raises UserError."""
    try:
        text = utf8_text(path.read_bytes(), path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}. Give the folder in data.path.") from error
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1] if not lines[-1] else lines, start=1):
        yield number, line.removesuffix("\r")
