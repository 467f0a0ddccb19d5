"""Rows of conversations, for supervised fine-tuning."""

import warnings
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.data.chat.choose_template import template_of
from megajax.data.chat.config import ChatConfig, PreferencesConfig
from megajax.data.chat.tokenized_conversations import ConversationReader, Conversations
from megajax.data.rows.packing import Packing, balanced_fit, best_fit, padding_lengths
from megajax.data.rows.row_source import ORDER_SAMPLE, check_row, data_seed
from megajax.data.rows.splits import Rows, Splits, config_paths, parse_split, split_bounds
from megajax.storage.index_cache import index_folder
from megajax.tokenizers.base import Tokenizer, token_id

TOO_LONG = "longer than a row"
NO_WEIGHT = "nothing to learn"
"""A line without a label of nonzero weight: a batch of such lines would have no loss."""


class ChatRows:
    """Row i of a split as a dict of arrays, a pure function of i.

    `rows[i]` has these arrays of length S:

        tokens: int32, concatenated conversations, then padding.
        labels: int32, the token after each input.
        loss_mask: float32, weight of the label in the loss: for answers 1 or the weight of the message, else 0.
        positions: int32, from 0 in each conversation; the padding continues the last one.
        segment_ids: int32, index of the conversation in the row; see `document_lengths` for padding.
        padding: bool, whether the position has no token of a conversation.

    A row that is cut to S tokens has no label at its end.

    Args:
        conversations: all conversations of the files.
        packs: the lines of each row.
        config: padding and order.
        sequence_length: S.
        rows: number of rows; after one pass they repeat.
        pad: padding token.
        seed: of the order.
        skipped: reason -> number of skipped lines.
        paths: the files of the conversations.

    Attributes:
        packing: fill and balance of the rows; None for rows of one line each.
    """

    def __init__(
        self,
        conversations: Conversations,
        packs: Sequence[Sequence[int]],
        *,
        config: ChatConfig | PreferencesConfig,
        sequence_length: int,
        rows: int | None,
        pad: int,
        seed: int,
        skipped: Mapping[str, int],
        packing: Packing | None = None,
        paths: Sequence[str] = (),
    ):
        self.config, self.sequence_length, self.skipped, self.packing = config, sequence_length, skipped, packing
        self.conversations, self._packs, self._pad, self._paths = conversations, packs, pad, paths
        self.index_files = conversations.files
        self._multiple, self._mask_pad = config.pad_multiple, config.mask_pad
        self._shuffled, self._seed, self._apart = config.packing != "lines", seed, config.isolate_padding
        self._rows = len(packs) if rows is None else rows
        self.passes = -(-self._rows // len(packs))
        self._order = lru_cache(1)(self._permutation)

    def __len__(self) -> int:
        return self._rows

    def order(self) -> str:
        """Identifier of the order of the rows; unchanged if rows are appended."""
        packs = repr([list(pack) for pack in self._packs[:ORDER_SAMPLE]]).encode()
        return f"{zlib.crc32(packs, self._seed if self._shuffled else 0):08x}"

    def files(self) -> Sequence[str]:
        """The files that are read."""
        return self._paths

    def pack(self, row: int) -> int:
        """The pack of a row. Each pass over the packs has a different order."""
        check_row(self, row)
        epoch, place = divmod(row, len(self._packs))
        return int(self._order(epoch)[place]) if self._shuffled else place

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.RandomState([self._seed, epoch]).permutation(len(self._packs))

    def packed(self, pieces: Sequence[tuple[int, int]], values: np.ndarray, padding: float) -> np.ndarray:
        """Numbers of tokens [T] -> those of a row [S + 1], which has one position more for the last label.

        pieces: the conversations of the row, see `_pieces`.
        """
        length, filled = self.sequence_length, 0
        packed = np.full(length + 1, padding, values.dtype)
        for first, last in pieces:
            if filled >= length:
                break
            room = min(length - filled, last - first)
            packed[filled : filled + room] = values[first : first + room]
            filled += -(-(last - first) // self._multiple) * self._multiple
        return packed

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        length, pieces = self.sequence_length, self._pieces(self.pack(row))
        tokens = self.packed(pieces, self.conversations.tokens, self._pad)
        weights = self.packed(pieces, self.conversations.weights, 0)
        # Only conversations begin at position 0, not the documents of padding.
        lengths, conversations = self._lengths(pieces)
        starts = np.cumsum(lengths) - lengths
        labels = tokens[1:]
        weights = weights[1:] * (labels != self._pad) if self._mask_pad else weights[1:]
        index = np.arange(length, dtype=np.int32)
        return {
            "tokens": tokens[:-1],
            "labels": labels,
            "loss_mask": weights.astype(np.float32),
            "positions": index - np.repeat(np.minimum(starts, starts[conversations - 1]), lengths).astype(np.int32),
            "segment_ids": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
            "padding": self.packed(pieces, np.broadcast_to(False, len(self.conversations.tokens)), True)[:-1],
        }

    def document_lengths(self, row: int) -> np.ndarray:
        """Tokens of each document of a row, int64 [D]: its conversations, then its padding.

        Padding is divided into short documents, because a single one would have about as many scores as a conversation
        of that length, and as a part of the last conversation it would have more.
        """
        return self._lengths(self._pieces(self.pack(row)))[0]

    def _lengths(self, pieces: Sequence[tuple[int, int]]) -> tuple[np.ndarray, int]:
        """(Tokens of each document of a row, int64 [D]; number of conversations among them)."""
        length, multiple = self.sequence_length, self._multiple
        piece_ends = np.cumsum([-(-(last - first) // multiple) * multiple for first, last in pieces])
        count = int(np.searchsorted(piece_ends, length)) + 1
        lengths = np.diff(np.minimum(piece_ends[:count], length), prepend=0)
        padding = length - int(lengths.sum())
        if not padding:
            return lengths, len(lengths)
        if not self._apart:
            lengths[-1] += padding
            return lengths, len(lengths)
        return np.concatenate([lengths, padding_lengths(padding, len(lengths))]), len(lengths)

    def _pieces(self, pack: int) -> list[tuple[int, int]]:
        """First token and one past the last of each conversation of a pack."""
        conversations = self.conversations
        spans = (range(*conversations.lines[line : line + 2].tolist()) for line in self._packs[pack])
        return [tuple(conversations.starts[number : number + 2].tolist()) for span in spans for number in span]


class ChatBuilder:
    """Builds the splits of files of conversations.

    Attributes:
        config, length, seed, pad: of all rows.
        reader: reads the files.
        cutting: advice for long lines, part of a message.
    """

    reader_class: type[ConversationReader] = ConversationReader
    rows_class: type[ChatRows] = ChatRows
    cutting = "cut such lines with data.cut_long=true, "

    def __init__(
        self, config: ChatConfig | PreferencesConfig, *, tokenizer: Tokenizer, sequence_length: int, seed: int
    ):
        self.config, self.length = config, sequence_length
        self.seed = data_seed(config.seed, seed)
        self.pad = tokenizer.eod if tokenizer.pad is None else tokenizer.pad
        if config.pad_token is not None:
            self.pad = token_id(tokenizer, config.pad_token, "data.pad_token")
        template, as_written = template_of(config), config.end_token == "template"
        if config.loss == "answers" and (header := template.learned_header()):
            warnings.warn(
                f"data.template: the model learns {header!r} before each answer, because the template writes no header "
                "of an answer after a prompt: write it {% if add_generation_prompt %}, or mark answers with "
                "{% generation %} … {% endgeneration %}.",
                stacklevel=2,
            )
        self.reader = self.reader_class(
            template,
            tokenizer,
            loss=config.loss,
            end_token=config.end_token,
            on_error=config.on_error,
            folder=index_folder(config.cache_dir),
            names_are_text=(config.special_tokens or ("tokens" if as_written else "text")) == "text",
            next_marker=not as_written if config.learn_next_marker is None else config.learn_next_marker,
            cut_at_system=isinstance(config, ChatConfig) and config.packing == "lines",
        )

    def splits(self, requested: Rows) -> Splits:
        """Row sources for the splits that a run requests; None for the others.

        Raises:
            UserError: as `ConversationReader.read`; a requested split without a line; a line that is longer than a row
                or has no label of nonzero weight.
        """
        config = self.config
        conversations, shares = self.reader.read(config.paths) if config.paths else None, parse_split(config.split)
        shared_skipped = Counter(self.reader.skipped_lines(conversations)) if conversations else Counter()

        def source(position: int, name: str, rows: int | None) -> ChatRows | None:
            if conversations is None:
                if not (paths := config_paths(config, name)):
                    return None
                separate = self.reader.read(paths)
                skipped = self.reader.skipped_lines(separate)
                return self._rows(separate, paths, (0, len(separate.places)), rows, name, skipped)
            if shares[position] is None and name != "train":
                return None
            bounds = split_bounds(shares[position], len(conversations.places))
            skipped = dict(shared_skipped)
            shared_skipped.clear()  # lines that belong to no split are counted once, in the first
            return self._rows(conversations, config.paths, bounds, rows, name, skipped)

        return Splits.build(requested, source)

    def line_lengths(self, conversations: Conversations) -> np.ndarray:
        """Tokens that each line needs in a row, int64 [L]."""
        return conversations.line_lengths(self.config.pad_multiple)

    def _refusal(self, size: int, long: bool) -> str:
        """The message for a line that is too long, or has no label of nonzero weight."""
        if long:
            return (
                f"{size} tokens, but a row has {self.length}. Raise model.sequence_length, {self.cutting}or skip them "
                "with data.on_error=skip."
            )
        limit = f" in its first {self.length} tokens, to which it is cut" if size > self.length else ""
        return (
            f"{NO_WEIGHT}: no token of an answer has a weight above 0{limit}. Fix the line, or skip such lines "
            "with data.on_error=skip."
        )

    def _rows(
        self,
        conversations: Conversations,
        paths: Sequence[str],
        bounds: tuple[int, int],
        rows: int | None,
        name: str,
        skipped_before: Mapping[str, int],
    ) -> ChatRows:
        config, (first, last), length = self.config, bounds, self.length
        if first == last:
            raise UserError(
                f"the {name} split has none of the {len(conversations.places)} conversations: give it a larger share "
                f"in data.split={config.split}"
            )
        lengths, skipped = self.line_lengths(conversations)[first:last], Counter(skipped_before)
        masked = self.pad if config.mask_pad else None
        weighs = conversations.line_weighs(config.pad_multiple, length, masked)[first:last]
        long = (lengths > length) & (not config.cut_long)
        if config.on_error == "stop" and not (weighs & ~long).all():
            worst = int(np.argmax(np.where(long, lengths, 0))) if long.any() else int(np.argmin(weighs))
            file, line = conversations.places[first + worst].tolist()
            raise UserError(f"{paths[file]}, line {line}: {self._refusal(int(lengths[worst]), bool(long[worst]))}")
        lines = np.arange(first, last)[weighs & ~long]
        lengths = lengths[weighs & ~long]
        out = {TOO_LONG: int(long.sum()), NO_WEIGHT: int((~weighs & ~long).sum())}
        skipped.update({reason: count for reason, count in out.items() if count})
        if not len(lines):
            reasons = f"{TOO_LONG} of {length} tokens, or have {NO_WEIGHT}"
            raise UserError(f"the {name} split: all of its lines are {reasons}.")
        packs, packing = lines[:, None].tolist(), None
        if config.packing != "lines":
            lengths = np.minimum(lengths, length)
            rooms = (balanced_fit if config.packing == "balanced" else best_fit)(lengths, length)
            packs, packing = [lines[pack].tolist() for pack in rooms], Packing.of(lengths, rooms, length)
        return self.rows_class(
            conversations, packs, config=config, sequence_length=self.length, rows=rows, pad=self.pad, seed=self.seed,
            skipped=skipped, packing=packing, paths=paths,
        )  # fmt: skip


def build_splits(config: ChatConfig, *, tokenizer: Tokenizer, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of conversations for the splits that a run requests; see `ChatBuilder.splits`."""
    length = schema["tokens"].positions()
    return ChatBuilder(config, tokenizer=tokenizer, sequence_length=length, seed=seed).splits(rows)
