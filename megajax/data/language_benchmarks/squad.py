"""SQuAD (Rajpurkar et al. 2016, 2018) as windows of paragraphs, each with its question (Devlin et al. 2019)."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.data.language_benchmarks.config import SquadConfig
from megajax.data.language_benchmarks.features import ExampleRow, Examples, SequenceBuilder, example_splits
from megajax.data.rows.splits import Rows, Splits
from megajax.tokenizers.base import Tokenizer

FILES = {"train": "train", "valid": "dev", "validation": "dev"}
MARKS = 3
"""Special tokens of a row."""


class Paragraph(NamedTuple):
    """A text that questions are about."""

    text: str
    ids: np.ndarray
    """int32 [T]."""
    spans: np.ndarray
    """int64 [T, 2], the characters of each token."""


class SquadQuestion(NamedTuple):
    """A question."""

    location: str
    identifier: str
    ids: np.ndarray
    """int32 [n], tokens of the question."""
    paragraph: Paragraph
    answers: tuple[tuple[str, int], ...]
    """Text and first character of each; empty: the paragraph does not answer it."""

    def valid_answers(self) -> list[tuple[str, int]]:
        """The answers whose text is found at their stated position."""
        text = self.paragraph.text
        return [(answer, start) for answer, start in self.answers if text[start : start + len(answer)] == answer]


class ParagraphWindow(NamedTuple):
    """A question with a run of the tokens of its paragraph."""

    question: SquadQuestion
    first: int
    count: int

    @property
    def location(self) -> str:
        """File and question."""
        return self.question.location

    @property
    def offset(self) -> int:
        """Position in the row of the first token of the paragraph."""
        return len(self.question.ids) + 2


def build_splits(config: SquadConfig, *, tokenizer: Tokenizer, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of the splits that a run requests; the test split is not public.

    Raises UserError: a file that is missing or not SQuAD's.
    """

    def examples(split: str) -> Examples[ParagraphWindow] | None:
        return None if split == "test" else read_split(config, split, tokenizer, schema)

    return example_splits(config, examples, rows, seed)


def read_split(config: SquadConfig, split: str, tokenizer: Tokenizer, schema: Schema) -> Examples[ParagraphWindow]:
    """The windows of a split, in the order of the questions. Raises UserError, which names the question."""
    path, skipped = config.folder() / f"{FILES[split]}-v{config.version}.json", Counter[str]()
    sequences = SequenceBuilder(tokenizer, schema)
    most = sequences.length - MARKS - 1
    questions = list(_questions(config, path, tokenizer, min(config.longest_question, most)))
    if split == "train":
        fit = [question for question in questions if question.valid_answers() or not question.answers]
        questions, skipped["answer not at its place"] = fit, len(questions) - len(fit)
    if not questions:
        raise UserError(f"{path}: has no questions.")
    windows = [
        window
        for question in questions
        for window in paragraph_windows(question, sequences.length - MARKS - len(question.ids), config.stride)
    ]

    def row(window: ParagraphWindow) -> ExampleRow:
        ids = window.question.paragraph.ids[window.first : window.first + window.count]
        first, last = answer_span(window)
        labels = {"starts": np.array(first, np.int32), "ends": np.array(last, np.int32)}
        return {**sequences(window.question.ids, ids), **labels, "loss_mask": np.ones((), np.float32)}

    return Examples(windows, row, skipped, (path,))


def paragraph_windows(question: SquadQuestion, size: int, stride: int) -> Iterator[ParagraphWindow]:
    """Windows of at most `size` tokens; the starts of adjacent ones differ by `stride` or `size`, whichever is less."""
    first, total = 0, len(question.paragraph.ids)
    while True:
        count = min(size, total - first)
        yield ParagraphWindow(question, first, count)
        if first + count >= total:
            return
        first += min(count, stride)


def answer_span(window: ParagraphWindow) -> tuple[int, int]:
    """Positions in the row of the first answer's first and last token; (0, 0) unless the window has all of it."""
    if not (answers := window.question.valid_answers()):
        return 0, 0
    (text, start), spans = answers[0], window.question.paragraph.spans
    inside = np.flatnonzero((spans[:, 1] > start) & (spans[:, 0] < start + len(text)))
    if not len(inside) or inside[0] < window.first or inside[-1] >= window.first + window.count:
        return 0, 0
    shift = window.offset - window.first
    return int(inside[0]) + shift, int(inside[-1]) + shift


def _questions(config: SquadConfig, path: Path, tokenizer: Tokenizer, longest: int) -> Iterator[SquadQuestion]:
    identifiers: set[str] = set()
    for number, paragraph in enumerate(_paragraphs(path), start=1):
        location = f"{path}, paragraph {number}"
        context, questions = _field(location, paragraph, "context", str), _field(location, paragraph, "qas", list)
        encoded = Paragraph(context, *tokenizer.encode_spans(context))
        for place, question in enumerate(questions, start=1):
            name = f"{location}, question {place}"
            identifier, text = _field(name, question, "id", str), _field(name, question, "question", str)
            if identifier in identifiers:
                raise UserError(f"{name}: id {identifier} is given twice.")
            identifiers.add(identifier)
            name = f"{name} ({identifier})"
            ids = tokenizer.encode(text.strip())[:longest]
            yield SquadQuestion(name, identifier, ids, encoded, _answers(config, name, question))


def _paragraphs(path: Path) -> Iterator[Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}. Give the folder in data.path.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON: {error}.") from error
    for number, article in enumerate(_field(str(path), content, "data", list), start=1):
        yield from _field(f"{path}, article {number}", article, "paragraphs", list)


def _answers(config: SquadConfig, location: str, question: object) -> tuple[tuple[str, int], ...]:
    if config.version == "2.0" and _field(location, question, "is_impossible", bool):
        return ()
    answers = []
    for number, answer in enumerate(_field(location, question, "answers", list), start=1):
        name = f"{location}, answer {number}"
        answers.append((_field(name, answer, "text", str), _field(name, answer, "answer_start", int)))
    if not answers:
        raise UserError(f"{location}: has no answers; in version 2.0 such a question has is_impossible: true.")
    return tuple(answers)


def _field[T](location: str, value: object, name: str, kind: type[T]) -> T:
    """A member of an object. Raises UserError for one that is missing or of another type."""
    if not isinstance(value, dict) or name not in value:
        has = ", ".join(value) if isinstance(value, dict) else f"a {type(value).__name__}"
        raise UserError(f"{location}: lacks {name}; it has {has or 'nothing'}. This is not the format of SQuAD.")
    if not isinstance(value[name], kind) or (kind is int and isinstance(value[name], bool)):
        raise UserError(f"{location}: {name} is {json.dumps(value[name])[:60]}, expected a {kind.__name__}.")
    return value[name]
