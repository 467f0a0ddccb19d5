"""Rows of preferences: a chosen and a rejected answer, or answers judged good or bad, each after its prompt.

A line of a file is a group of documents that stay in one row: of a pair the chosen and the rejected answer; of judged
answers three, a good answer or nothing, a bad one or nothing, and the prompt with the answer of an earlier line. So the
number of a document in its row says what it is, as in the leaves `pairs` and `judged` of a model.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from megajax.batch import Schema
from megajax.data.chat.config import MockPreferencesConfig, PreferencesConfig
from megajax.data.chat.rows import ChatBuilder, ChatRows
from megajax.data.chat.tokenized_conversations import REASONS as CHAT_REASONS
from megajax.data.chat.tokenized_conversations import (
    BadLine,
    ConversationReader,
    Conversations,
    Document,
    Message,
    normalized_message,
)
from megajax.data.rows.packing import best_fit
from megajax.data.rows.row_source import data_seed
from megajax.data.rows.splits import Rows, Splits
from megajax.storage.index_cache import Arrays, atomic_write, index_folder
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.chat_template import TextPiece

NO_REJECTED, EQUAL = "no rejected answer", "equal answers"
REASONS = (*CHAT_REASONS, NO_REJECTED, EQUAL)
"""Reasons to skip a line with preferences."""
UNREADABLE, _, NO_ANSWER, _ = CHAT_REASONS
PAIR, TRIPLE = 2, 3
"""Documents of a pair, and of a judged answer."""
REFERENCE_FOLDER = "reference"
"""Name of the folder of the reference model's log-probabilities, beside the data."""

type Text = str | list[Message]

NOTHING: Document = (np.empty(0, np.int32), np.empty(0, np.float32))


class Judged(NamedTuple):
    """A prompt and an answer to it: both texts or both messages."""

    prompt: Text
    answer: Text
    good: bool


class PairReader(ConversationReader):
    """Reads pairs of answers; see `ConversationReader`."""

    kind, reasons = "pairs of answers with other tokens", REASONS
    example = '{"prompt": "…", "chosen": "…", "rejected": "…"}'

    def documents(self, record: Mapping[str, Any]) -> list[Document]:
        """The chosen and the rejected answer, each after the prompt."""
        pair = [self.document(item.prompt, item.answer, record.get("tools")) for item in pair_of(record)]
        if np.array_equal(pair[0][0], pair[1][0]):  # of texts that differ in what the template or the tokenizer drops
            raise BadLine(EQUAL, "the chosen and the rejected answer have equal tokens")
        return pair

    def document(self, prompt: Text, answer: Text, tools: object) -> Document:
        """A prompt and an answer, whose tokens alone have a weight. Raises BadLine for an answer without tokens."""
        if isinstance(prompt, str) or isinstance(answer, str):
            ids, weights = self.ended([TextPiece(str(prompt), 0), TextPiece(str(answer), 1)], 1)
        else:
            before, after = ([{**m, "weight": w} for m in part] for part, w in ((prompt, 0), (answer, 1)))
            ids, weights = self.conversation([*before, *after], tools)
        if not weights[1:].any():
            raise BadLine(NO_ANSWER, "an answer without tokens of its own after the prompt")
        return ids, weights


class JudgedReader(PairReader):
    """Reads answers that are good or bad."""

    kind, example = "judged answers beside others", '{"prompt": "…", "completion": "…", "label": true}'
    _earlier: Sequence[Judged] = ()
    """Answers of earlier lines, the nearest first: those that an answer may be paired with."""

    def _build(self, paths: Sequence[str]) -> Arrays:
        self._earlier = ()
        return super()._build(paths)

    def documents(self, record: Mapping[str, Any]) -> list[Document]:
        """Three documents for each answer of the line: as a good one, as a bad one, and its prompt with the answer of
        the nearest earlier line that has another prompt and another answer; nothing if there is none."""
        items = pair_of(record) if "rejected" in record else (judged_of(record),)
        tools, documents = record.get("tools"), []
        for item in items:
            document = self.document(item.prompt, item.answer, tools)
            others = (self.document(item.prompt, e.answer, tools) for e in self._earlier if mismatched(item, e))
            other = next((other for other in others if not np.array_equal(other[0], document[0])), NOTHING)
            documents += [document if item.good else NOTHING, NOTHING if item.good else document, other]
        self._earlier = nearest((*reversed(items), *self._earlier))
        return documents


def mismatched(item: Judged, other: Judged) -> bool:
    """Whether an answer was given to another prompt and differs, and can follow the prompt of `item`."""
    pairs = zip(_compared(item), _compared(other), strict=True)
    return isinstance(item.prompt, str) == isinstance(other.prompt, str) and all(x != y for x, y in pairs)


def nearest(answers: Sequence[Judged]) -> list[Judged]:
    """Those of `answers` that are the first mismatched one of some prompt and answer: a few, whatever their number."""
    candidates = list[Judged]()
    for item in answers:
        is_text = isinstance(item.prompt, str)
        before = [_compared(other) for other in candidates if isinstance(other.prompt, str) == is_text]
        prompts, replies = zip((None, None), *before, strict=True)  # None: any other one
        # A prompt and a reply for which none of those before is mismatched, and this one is.
        item_prompt, item_reply = _compared(item)
        if any(
            prompt != item_prompt and reply != item_reply and all(prompt == p or reply == r for p, r in before)
            for prompt in prompts
            for reply in replies
        ):
            candidates.append(item)
    return candidates


def _compared(item: Judged) -> tuple[Any, Any]:
    """What counts in comparisons of prompts and answers: texts, or messages without the weights of the loss."""
    prompt, answer = (
        text if isinstance(text, str) else [{key: m[key] for key in m if key != "weight"} for m in text]
        for text in item[:2]
    )
    return prompt, answer


def pair_of(record: Mapping[str, Any]) -> tuple[Judged, Judged]:
    """The answers of a line. Raises BadLine."""
    for name, reason in (("chosen", NO_ANSWER), ("rejected", NO_REJECTED)):
        if not record.get(name):
            keys = ", ".join(map(repr, record)) or "none"
            raise BadLine(reason, f"{reason} under {name!r}; the keys are {keys}")
    chosen, rejected = record["chosen"], record["rejected"]
    if isinstance(chosen, list) and isinstance(rejected, list) and not isinstance(record.get("prompt"), list):
        pair = conversations_that_fork(messages_of(chosen, "chosen"), messages_of(rejected, "rejected"))
    else:
        pair = judged(record, "chosen", True), judged(record, "rejected", False)
    if pair[0].answer == pair[1].answer:
        raise BadLine(EQUAL, "the chosen and the rejected answer are equal")
    return pair


def conversations_that_fork(chosen: list[Message], rejected: list[Message]) -> tuple[Judged, Judged]:
    """Two conversations, whose prompt is what they begin with in common. Raises BadLine."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shared = next((n for n, (left, right) in pairs if left != right), min(len(chosen), len(rejected)))
    if not shared:
        raise BadLine(UNREADABLE, "chosen and rejected begin with different messages, and there is no list as 'prompt'")
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        if len(messages) == shared and chosen != rejected:
            raise BadLine(NO_ANSWER, f"{name} is the beginning of the other conversation, without an answer of its own")
    return Judged(chosen[:shared], chosen[shared:], True), Judged(rejected[:shared], rejected[shared:], False)


def judged_of(record: Mapping[str, Any]) -> Judged:
    """The answer of a line and its label. Raises BadLine."""
    label = record.get("label")
    if not record.get("completion"):
        keys = ", ".join(map(repr, record)) or "none"
        raise BadLine(NO_ANSWER, f"no answer under 'completion', nor a pair under 'chosen' and 'rejected': {keys}")
    if not isinstance(label, bool):
        raise BadLine(UNREADABLE, f"the label is {label!r}, not true or false")
    return judged(record, "completion", label)


def judged(record: Mapping[str, Any], name: str, good: bool) -> Judged:
    """The answer under `name` and its prompt. Raises BadLine."""
    prompt, answer = record.get("prompt"), record[name]
    if isinstance(prompt, list):
        answer = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        return Judged(messages_of(prompt, "prompt"), messages_of(answer, name), good)
    for part, text in (("prompt", prompt), (name, answer)):
        if not isinstance(text, str):
            kind = "missing" if text is None else f"a {type(text).__name__}"
            raise BadLine(UNREADABLE, f"{part} is {kind}; prompt and answers must be texts, or lists of messages")
    if not prompt:
        raise BadLine(UNREADABLE, "the prompt is empty")
    return Judged(str(prompt), answer, good)


def messages_of(value: object, name: str) -> list[Message]:
    """A list of messages. Raises BadLine for something else, and for an answer without a message of the assistant."""
    if not isinstance(value, list) or not value:
        raise BadLine(UNREADABLE, f"{name} is a {type(value).__name__}, not a list of messages")
    messages = [normalized_message(message, number) for number, message in enumerate(value, 1)]
    if name != "prompt" and not any(message["role"] == "assistant" for message in messages):
        raise BadLine(NO_ANSWER, f"{name} has no message of the assistant")
    return messages


class PreferenceRows(ChatRows):
    """Rows of preferences: those of `ChatRows`, with loss_mask 1 for the labels in answers, and these arrays.

        pairs, or judged: int32, 1 plus the number of the label's document in the row, 0 outside answers.
        reference: float32, log-probability of the label under the reference model, 0 outside answers.

    Attributes:
        leaf: pairs or judged.
        reads_reference, reference, reference_folder, identity: see `megajax.training.reference.ReferencedRows`.
    """

    leaf: str
    reads_reference = False
    reference: np.ndarray | None = None
    reference_folder: Path

    @property
    def note(self) -> str:
        """For the banner: the number of judged answers beside which no answer to another prompt stands."""
        if self.leaf != "judged":
            return ""
        lines, sizes = self.conversations.lines // TRIPLE, np.diff(self.conversations.starts)
        lacking = sizes[TRIPLE - 1 :: TRIPLE] == 0
        count = sum(int(lacking[lines[line] : lines[line + 1]].sum()) for pack in self._packs for line in pack)
        return f", {count:,} answers without another one for the KL baseline" if count else ""

    @property
    def identity(self) -> str:
        """Digest of the data and the tokenizer."""
        return self.conversations.identity

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        arrays = super().__getitem__(row)
        inside = arrays["loss_mask"] > 0
        arrays[self.leaf] = np.where(inside, arrays["segment_ids"] + 1, 0).astype(np.int32)
        if self.reads_reference:
            if self.reference is None:
                raise RuntimeError("rows are read before the reference model has scored them")
            arrays["reference"] = self.packed(self._pieces(self.pack(row)), self.reference, 0)[1:] * inside
        return arrays

    def whole(self) -> "PreferenceRows":
        """Rows of all lines that fit, in an order that depends on the data alone, without reference."""
        lengths = self.conversations.line_lengths(1)
        lines = np.flatnonzero(lengths <= self.sequence_length)
        packs = [lines[pack].tolist() for pack in best_fit(lengths[lines], self.sequence_length)]
        rows = PreferenceRows(
            self.conversations, packs, config=self.config, sequence_length=self.sequence_length, rows=None, pad=0,
            seed=0, skipped={},
        )  # fmt: skip
        rows.leaf, rows._shuffled = self.leaf, False
        return rows

    def unpacked(self, scores: np.ndarray) -> np.ndarray:
        """Log-probabilities of labels of the rows of `whole`, [rows, S] -> those of all tokens, float32 [T]."""
        tokens, rows = np.zeros(len(self.conversations.tokens), np.float32), self.whole()
        for row, values in enumerate(scores):
            filled = 0
            for first, last in rows._pieces(row):
                labels = max(last - first - 1, 0)  # a group may lack a document
                tokens[last - labels : last] = values[filled : filled + labels]
                filled += last - first
        return tokens


class PairBuilder(ChatBuilder):
    """Builds the splits of files of preferences."""

    reader_class, rows_class, cutting = PairReader, PreferenceRows, ""


class JudgedBuilder(PairBuilder):
    """Builds the splits of files of judged answers."""

    reader_class = JudgedReader


class ChoiceRows(PreferenceRows):
    """Rows of pairs as two sequences: tokens and segment_ids (1 for tokens, 0 for padding) int32 [2, S], and labels 0,
    the place of the chosen one."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self._shuffled = True

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        tokens = np.full((PAIR, self.sequence_length), self._pad, np.int32)
        segments = np.zeros_like(tokens)
        for place, (first, last) in enumerate(self._pieces(self.pack(row))):
            tokens[place, : last - first] = self.conversations.tokens[first:last]
            segments[place, : last - first] = 1
        return {"tokens": tokens, "segment_ids": segments, "labels": np.zeros((), np.int32)}

    def document_lengths(self, row: int) -> np.ndarray:
        """Tokens of each sequence with its padding."""
        return np.full(PAIR, self.sequence_length)


class ChoiceBuilder(PairBuilder):
    """Builds the splits of files of pairs whose answers are sequences of their own."""

    rows_class = ChoiceRows

    def __init__(self, config: PreferencesConfig, **settings: Any):
        super().__init__(replace(config, packing="lines"), **settings)

    def line_lengths(self, conversations: Conversations) -> np.ndarray:
        """Tokens of the longer one of the two answers with its prompt."""
        return np.diff(conversations.starts).reshape(-1, PAIR).max(1)


BUILDERS = MappingProxyType({"pairs": PairBuilder, "judged": JudgedBuilder, "choices": ChoiceBuilder})
"""`PreferencesConfig.answers` -> its builder."""


def build_splits(config: PreferencesConfig, *, tokenizer: Tokenizer, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of preferences for the splits that a run requests; see `ChatBuilder.splits`."""
    length = schema["tokens"].positions()
    splits = BUILDERS[config.answers](config, tokenizer=tokenizer, sequence_length=length, seed=seed).splits(rows)
    first, *_ = (*config.paths, *config.train_paths, *config.valid_paths, *config.test_paths)
    folder = Path(config.reference_dir) if config.reference_dir else Path(first).parent / REFERENCE_FOLDER
    for part in splits:
        if part is not None:
            part.leaf, part.reads_reference, part.reference_folder = config.answers, "reference" in schema, folder
    return splits


def build_mock_splits(
    config: MockPreferencesConfig, *, tokenizer: Tokenizer, schema: Schema, rows: Rows, seed: int
) -> Splits:
    """Rows of synthetic preferences; writes their file into the cache."""
    seed = data_seed(config.seed, seed)
    name = f"{config.answers}_{config.lines}_{seed}.jsonl"
    file = index_folder(config.cache_dir) / "mock_preferences" / name
    if not file.exists():
        with atomic_write(file) as stream:
            stream.writelines(f"{json.dumps(line)}\n".encode() for line in mock_lines(config, seed))
    shared = {name: getattr(config, name) for name in ("answers", "split", "reference_dir", "cache_dir", "loader")}
    preferences = PreferencesConfig(paths=(str(file),), seed=seed, **shared)
    return build_splits(preferences, tokenizer=tokenizer, schema=schema, rows=rows, seed=seed)


def mock_lines(config: MockPreferencesConfig, seed: int) -> Iterator[dict[str, Any]]:
    """The lines of a file of synthetic preferences."""
    draw = random.Random(seed)
    for _ in range(config.lines):
        digits = draw.sample("0123456789", draw.randint(4, 8))
        prompt, ascending = f"sort {''.join(digits)}: ", "".join(sorted(digits))
        other = ascending
        while other == ascending:
            other = "".join(draw.sample(digits, len(digits)))
        if config.answers != "judged":
            yield {"prompt": prompt, "chosen": ascending, "rejected": other}
        else:
            label = draw.random() < 0.5
            yield {"prompt": prompt, "completion": ascending if label else other, "label": label}
