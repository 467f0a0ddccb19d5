"""The tasks of GLUE (Wang et al. 2019) in their .tsv files."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.config.hints import did_you_mean
from megajax.data.language_benchmarks.config import GLUE, TEST, VALIDATION, GlueConfig, GlueFormat
from megajax.data.language_benchmarks.features import ExampleRow, Examples, SequenceBuilder, example_splits, read_lines
from megajax.data.rows.splits import Rows, Splits
from megajax.tokenizers.base import Tokenizer

LARGEST_SCORE = 5.0
"""Maximum score of STS-B."""
NO_LABEL = "-"
"""Label of MultiNLI's examples without agreement among annotators."""


class Sentences(NamedTuple):
    """A line of a file."""

    location: str
    first: str
    second: str | None
    label: int | float | None
    """Number of the class or the score; None: the file has no labels."""


def build_splits(config: GlueConfig, *, tokenizer: Tokenizer, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of the splits that a run requests: train, the first of the validation files; test files have no labels.

    Raises UserError: a missing or malformed file, or a model with another number of classes.
    """
    classes, below = GLUE[config.task].classes, schema["labels"].below if "labels" in schema else None
    if below is not None and below != len(classes):
        raise UserError(f"{config.task} has {len(classes)} classes, {list(classes)}; model.head.classes is {below}.")

    def examples(split: str) -> Examples[Sentences] | None:
        if split == "test":
            return None
        files = [("", "train.tsv")] if split == "train" else GLUE[config.task].validation
        return read_file(config, files[0][1], tokenizer, schema, labelled=True)

    return example_splits(config, examples, rows, seed)


def read_split(config: GlueConfig, split: str, tokenizer: Tokenizer, schema: Schema) -> dict[str, Examples[Sentences]]:
    """Suffix of figures -> examples of each file of `validation` or `test`. Raises UserError."""
    files = {VALIDATION: GLUE[config.task].validation, TEST: GLUE[config.task].test}[split]
    labelled = split == VALIDATION
    return {suffix: read_file(config, name, tokenizer, schema, labelled=labelled) for suffix, name in files}


def read_file(
    config: GlueConfig, name: str, tokenizer: Tokenizer, schema: Schema, *, labelled: bool
) -> Examples[Sentences]:
    """The examples of a file. Raises UserError, which names file and line."""
    path, task, skipped = config.folder() / name, GLUE[config.task], Counter[str]()
    items = list(_sentences(path, task, skipped, labelled=labelled))
    if not items:
        raise UserError(f"{path}: has no examples of {config.task}.")
    sequences, kind = SequenceBuilder(tokenizer, schema), np.int32 if task.classes else np.float32

    def row(item: Sentences) -> ExampleRow:
        second = None if item.second is None else sequences.encode(item.second)
        weight = np.array(item.label is not None, np.float32)
        label = {"labels": np.array(item.label or 0, kind), "loss_mask": weight}
        return {**sequences(sequences.encode(item.first), second), **label}

    return Examples(items, row, skipped, (path,))


def _sentences(path: Path, task: GlueFormat, skipped: Counter[str], *, labelled: bool) -> Iterator[Sentences]:
    lines = read_lines(path)
    header = list(task.columns) if task.columns and labelled else next((line for _, line in lines), "").split("\t")
    columns = (task.first,) if task.second is None else (task.first, task.second)
    places = {column: _place(path, header, column) for column in (*columns, *[task.label] * labelled)}
    for number, line in lines:
        location, cells = f"{path}, line {number}", line.split("\t")
        fits = len(cells) == len(header)
        texts = [cells[places[column]].strip() for column in columns] if fits else [""]
        if not all(texts):
            if task.skips and labelled:
                skipped["malformed"] += 1
                continue
            columns_fault = f"has {len(cells)} columns between tabs, expected {len(header)}"
            raise UserError(f"{location}: {'a text is empty' if fits else columns_fault}: {line[:60]!r}.")
        if labelled and task.classes and cells[places[task.label]] == NO_LABEL:
            skipped["no label"] += 1
            continue
        label = _label(location, cells[places[task.label]], task.classes) if labelled else None
        yield Sentences(location, texts[0], texts[1] if len(texts) > 1 else None, label)


def _place(path: Path, header: Sequence[str], column: str) -> int:
    if column in header:
        return header.index(column)
    has = ", ".join(map(repr, header))
    raise UserError(
        f"{path}, line 1: no column {column!r}; the header has {has}. {did_you_mean(column, header)}".strip()
    )


def _label(location: str, text: str, classes: Sequence[str]) -> int | float:
    if classes:
        if text not in classes:
            raise UserError(f"{location}: label {text!r}, expected one of {', '.join(classes)}.")
        return classes.index(text)
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not 0 <= score <= LARGEST_SCORE:
        raise UserError(f"{location}: score {text!r}, expected a number from 0 to {LARGEST_SCORE:g}.")
    return score
