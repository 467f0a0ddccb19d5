"""RACE (Lai et al. 2017): questions about articles, each with four options, in the same rows as in Megatron-LM."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.config.read_limits import json_fault
from megajax.data.language_benchmarks.config import RaceConfig
from megajax.data.language_benchmarks.features import ExampleRow, Examples, SequenceBuilder, example_splits, read_lines
from megajax.data.rows.splits import Rows, Splits
from megajax.tokenizers.base import Tokenizer

LETTERS = "ABCD"
GROUPS = ("middle", "high")
"""Folders of examinations of middle schools and high schools."""
FOLDERS = {"train": "train", "valid": "dev", "validation": "dev", "test": "test"}
FIELDS = ("article", "questions", "options", "answers")


class RaceQuestion(NamedTuple):
    """A question about an article."""

    location: str
    identifier: str
    """File, and the line number if it has several articles."""
    group: str
    """middle, high, or empty."""
    article: str
    options: tuple[str, ...]
    """The question with each option: in place of "_", or appended."""
    label: int


def build_splits(config: RaceConfig, *, tokenizer: Tokenizer, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of the splits that a run requests. Raises UserError: folders or files that are missing or not RACE's."""
    return example_splits(config, lambda split: read_split(config, split, tokenizer, schema), rows, seed)


def read_split(config: RaceConfig, split: str, tokenizer: Tokenizer, schema: Schema) -> Examples[RaceQuestion]:
    """The questions of a split, by file names. Raises UserError, which names file and line."""
    shape = schema["tokens"].shape if "tokens" in schema else ()
    if len(shape) != 2 or shape[0] != len(LETTERS):
        raise UserError(f"RACE has {len(LETTERS)} sequences in a row; the model's tokens have the shape {shape}.")
    folder, sequences = config.folder() / FOLDERS[split], SequenceBuilder(tokenizer, schema)
    places = {group: folder / group for group in GROUPS if (folder / group).is_dir()} or {"": folder}
    files = [(group, path) for group, place in places.items() for path in sorted(place.glob("*.txt"))]
    if not files:
        raise UserError(f"{folder}: no files NAME.txt in it or in its folders middle/ and high/. Check data.path.")
    items = [question for group, path in files for question in _questions(group, path)]

    def row(item: RaceQuestion) -> ExampleRow:
        article = sequences.encode(item.article)
        options = [sequences.encode(option)[: config.longest_question] for option in item.options]
        row_sequences = [sequences(ids, article) for ids in options]
        stacked = {name: np.stack([sequence[name] for sequence in row_sequences]) for name in row_sequences[0]}
        return {**stacked, "labels": np.array(item.label, np.int32), "loss_mask": np.ones((), np.float32)}

    return Examples(items, row, paths=tuple(path for _, path in files))


def _questions(group: str, path: Path) -> Iterator[RaceQuestion]:
    lines = [(number, line) for number, line in read_lines(path) if line.strip()]
    for number, line in lines:
        location = f"{path}, line {number}"
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{location}: is not JSON: {json_fault(error)}. A line of RACE is an object.") from error
        _demand_article(location, data)
        identifier = f"{group}/{path.name}".lstrip("/") + (f":{number}" if len(lines) > 1 else "")
        for place, (question, options, answer) in enumerate(
            zip(data["questions"], data["options"], data["answers"], strict=True)
        ):
            merged = tuple(
                question.replace("_", option) if "_" in question else f"{question} {option}" for option in options
            )
            name = f"{location}, question {place + 1}"
            yield RaceQuestion(name, identifier, group, data["article"], merged, LETTERS.index(answer))


def _demand_article(location: str, data: object) -> None:
    """Raises UserError for an object that is not an article with its questions."""
    if not isinstance(data, dict) or (missing := [name for name in FIELDS if name not in data]):
        lacks = f"lacks {', '.join(missing)}" if isinstance(data, dict) else f"is a {type(data).__name__}"
        raise UserError(f"{location}: {lacks}; an article of RACE is an object with {', '.join(FIELDS)}.")
    if not isinstance(data["article"], str):
        raise UserError(f"{location}: article is not a string.")
    counts = {name: len(data[name]) if isinstance(data[name], list) else None for name in FIELDS[1:]}
    if None in counts.values() or len(set(counts.values())) > 1:
        sizes = ", ".join(
            f"{count} {name}" if count is not None else f"{name} no list" for name, count in counts.items()
        )
        raise UserError(f"{location}: has {sizes}; expected lists of the same length.")
    for place, (question, options, answer) in enumerate(
        zip(data["questions"], data["options"], data["answers"], strict=True), start=1
    ):
        texts = isinstance(options, list) and all(isinstance(text, str) for text in [question, *options])
        if not texts or len(options) != len(LETTERS):
            raise UserError(
                f"{location}: question {place} must be a text with {len(LETTERS)} options, got {options!r}."
            )
        if not isinstance(answer, str) or len(answer) != 1 or answer not in LETTERS:
            raise UserError(f"{location}: question {place} has answer {answer!r}, expected {', '.join(LETTERS)}.")
