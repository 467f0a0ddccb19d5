"""A step of the scheduler, and the texts that an encoder reads, as arrays of fixed shapes."""

from collections import abc
from typing import Any, NamedTuple

import jax
import numpy as np

from megajax.inference.loaded_model import LoadedModel
from megajax.inference.request import Sequence, Step


class Bucket(NamedTuple):
    """Shapes of a compiled step, for one replica.

    Prompts are cut into tiles. The tiles of a prompt are rows of a group with the blocks of that prompt, so that a step
    computes several prompts, each padded to whole tiles.
    """

    rows: int
    """Number of rows that may get a token: decoding rows, then one for each prompt."""
    tiles: int = 0
    """Number of tiles of prompts; 0: no prompts."""
    tile: int = 0
    """Tokens of a tile."""
    drafts: int = 0
    """Maximum number of tokens of a decoding row's draft."""

    def groups(self) -> tuple[tuple[int, int], ...]:
        """(rows, tokens of a row) of each group, as in `megajax.layers.decoding.StepRows`."""
        decoding = self.rows, self.width
        return (decoding, (self.tiles, self.tile)) if self.tiles else (decoding,)

    @property
    def width(self) -> int:
        """Tokens of a decoding row."""
        return 1 + self.drafts

    @property
    def choices(self) -> int:
        """Number of tokens after which one is chosen."""
        return self.rows * self.width

    def without_prompts(self) -> "Bucket":
        """The bucket with the same decoding rows."""
        return Bucket(self.rows, drafts=self.drafts)

    @property
    def chunk(self) -> int:
        """Number of prompt tokens."""
        return self.tiles * self.tile

    @property
    def tokens(self) -> int:
        return self.choices + self.chunk

    def __str__(self) -> str:
        rows = f"{self.rows} rows" + (f" of {self.width} tokens" if self.drafts else "")
        return rows + (f" + {self.chunk} tokens of prompts" if self.tiles else "")


class StepArrays[T](NamedTuple):
    """The input of a compiled step; replicas are concatenated along the first dimension of each array."""

    tokens: T
    """int32 [T, 1]; -1 for the token that the previous step chose for the row's slot."""
    positions: T
    """int32 [T, 1]."""
    slots: T
    """int32 [T]; see `megajax.layers.decoding.StepRows` for this and the following arrays."""
    tables: tuple[T, ...]
    counts: tuple[T, ...]
    states: tuple[T, ...]
    last: T
    """int32 [choices]: indices, within the replica, of the tokens whose logits are computed."""
    adapters: Any = None
    """int32 [T]: slot of each token's adapter, -1 for none; None for a model without slots."""
    images: T | None = None
    """int32 [T]: index, within the replica, of the image state in place of each token; -1: the token itself. None in
    steps without prompts, and for a model without images."""
    rotary: T | None = None
    """int32 [T, 1, 3]: rotary positions along time, rows and columns; None but for a model with images of any size."""


AWAITED = -1
"""In place of a token that the host does not know."""
NOWHERE = 2**30
"""A slot past every pool: writes to it are dropped."""


COPIES = 2
"""Slots of states that a program copies in each replica, of which a step needs one: XLA turns a scatter of one row into
a dynamic-update-slice, which may copy the whole array."""


def slot_pairs(copies: abc.Sequence[abc.Sequence[tuple[int, int]]]) -> tuple[np.ndarray, np.ndarray]:
    """The slots of each replica's copies, source and target, int32 [replicas * COPIES]; past the pool for none."""
    pairs = np.full((len(copies), COPIES, 2), NOWHERE, np.int32) + np.arange(COPIES, dtype=np.int32)[:, None]
    for replica, of_replica in enumerate(copies):
        pairs[replica, : len(of_replica)] = np.asarray(of_replica, np.int32).reshape(-1, 2)
    return pairs[..., 0].reshape(-1), pairs[..., 1].reshape(-1)


def bucket_for(work: abc.Sequence[Step | None], buckets: abc.Sequence[Bucket]) -> Bucket:
    """The smallest bucket that fits the steps of all replicas. Raises ValueError if there is none."""
    steps = [step for step in work if step is not None]
    rows = max((len(step.decode) + len(step.prompts) for step in steps), default=0)
    drafts = max((len(row.draft) for step in steps for row, _ in step.decode), default=0)

    def fits(bucket: Bucket) -> bool:
        if bucket.rows < rows or bucket.drafts < drafts:
            return False
        if not bucket.tiles:
            return not any(step.prompts for step in steps)
        return bucket.tiles >= max(len(prompt_tiles(step, bucket.tile)) for step in steps)

    fitting = [bucket for bucket in buckets if fits(bucket)]
    if not fitting:
        tokens = max((sum(count for _, _, count in step.prompts) for step in steps), default=0)
        needed = f"{rows} rows, drafts of {drafts} tokens and prompts of {tokens}"
        raise ValueError(f"no compiled step has {needed}: there are {list(buckets)}")
    return min(fitting, key=lambda bucket: (bucket.tokens, bucket.rows))


def prompt_tiles(step: Step, tile: int) -> list[tuple[int, int, int]]:
    """The tiles of a step's prompts: index of the prompt, first position, and number of tokens."""
    return [
        (number, first, min(tile, start + count - first))
        for number, (_, start, count) in enumerate(step.prompts)
        for first in range(start, start + count, tile)
    ]


def first_tokens(step: Step, tile: int) -> list[int]:
    """For each prompt of a step, the index of its first token among the tokens of all tiles."""
    sizes = [-(-count // tile) * tile for _, _, count in step.prompts]
    return [sum(sizes[:number]) for number in range(len(sizes))]


def pack(step: Step | None, bucket: Bucket, *, block: int, width: int) -> StepArrays:
    """Arrays of a replica's step. block: tokens of a block; width: maximum blocks of a row, the width of the tables.

    The rows of the logits are in the order of `Step.decode`, then of `Step.prompts`; each has `bucket.width` logits, of
    which a prompt uses the first.
    """
    groups, total, wide = bucket.groups(), bucket.tokens, bucket.width
    tokens, positions = np.zeros((total, 1), np.int32), np.zeros((total, 1), np.int32)
    # Slots and states must be unique, also past the pool.
    slots, last = NOWHERE + np.arange(total, dtype=np.int32), np.arange(bucket.choices, dtype=np.int32)
    tables = tuple(np.zeros((rows, width), np.int32) for rows, _ in groups)
    counts = tuple(np.zeros(rows, np.int32) for rows, _ in groups)
    nowhere = NOWHERE + np.arange(bucket.rows + bucket.tiles, dtype=np.int32)
    states = (nowhere[: bucket.rows], nowhere[bucket.rows :])[: len(groups)]
    decode, prompts = ([], []) if step is None else (step.decode, step.prompts)
    # Vectorized over rows, because the device waits for this.
    span = [number * wide + ahead for number, (row, _) in enumerate(decode) for ahead in range(1 + len(row.draft))]
    spots = [(row, at + ahead) for row, at in decode for ahead in range(1 + len(row.draft))]
    tokens[span, 0] = [token for row, at in decode for token in (_token(row, at), *row.draft)]
    positions[span, 0] = [at for _, at in spots]
    slots[span] = [row.blocks[at // block] * block + at % block for row, at in spots]
    counts[0][: len(decode)] = [1 + len(row.draft) for row, _ in decode]
    states[0][: len(decode)] = [row.slot for row, _ in decode]
    for number, row in enumerate([*(row for row, _ in decode), *(row for row, _, _ in prompts)]):
        tables[0][number, : len(row.blocks)] = row.blocks
    # Any block will do for places that were freed: none of their keys is seen.
    np.maximum(tables[0], 0, out=tables[0])
    for place, (number, first, count) in enumerate(prompt_tiles(step, bucket.tile) if step and prompts else []):
        row, begin = prompts[number][0], bucket.choices + place * bucket.tile
        at, span = np.arange(first, first + count), slice(begin, begin + count)
        tokens[span, 0], positions[span, 0] = row.tokens[first : first + count], at
        slots[span] = np.asarray(row.blocks, np.int32)[at // block] * block + at % block
        tables[1][place] = tables[0][len(decode) + number]
        counts[1][place], states[1][place] = count, row.slot
        last[(len(decode) + number) * wide] = begin + count - 1
    return StepArrays(tokens, positions, slots, tables, counts, states, last)


def like_arrays(loaded: LoadedModel, bucket: Bucket, width: int) -> StepArrays:
    """Shapes and shardings of the arrays of a step without adapters and images. width: as in `pack`."""
    like, groups = loaded.like, [rows for rows, _ in bucket.groups()]
    column, counts = like(bucket.tokens, 1), tuple(like(rows) for rows in groups)
    tables = tuple(like(rows, width) for rows in groups)
    return StepArrays(column, column, like(bucket.tokens), tables, counts, counts, like(bucket.choices))


def _token(row: Sequence, at: int) -> int:
    return row.tokens[at] if at < len(row.tokens) else AWAITED


def chosen_slots(step: Step | None, bucket: Bucket) -> np.ndarray:
    """int32 [rows]: the slots of a replica's rows, in the order of `Step.parts`."""
    slots = NOWHERE + np.arange(bucket.rows, dtype=np.int32)
    parts = [] if step is None else step.parts()
    slots[: len(parts)] = [row.slot for row, _ in parts]
    return slots


def adapter_slots(step: Step | None, bucket: Bucket) -> np.ndarray:
    """`StepArrays.adapters` of a replica's step."""
    slots = np.full(bucket.tokens, -1, np.int32)
    if step is not None:
        slots[: len(step.decode) * bucket.width] = np.repeat([_slot(row) for row, _ in step.decode], bucket.width)
        for place, (number, _, _) in enumerate(prompt_tiles(step, bucket.tile)):
            begin = bucket.choices + place * bucket.tile
            slots[begin : begin + bucket.tile] = _slot(step.prompts[number][0])
    return slots


def _slot(row: Sequence) -> int:
    return -1 if row.adapter is None else row.adapter.slot


def joined(replicas: abc.Sequence[StepArrays]) -> StepArrays:
    """The arrays of several replicas, concatenated."""
    return replicas[0] if len(replicas) == 1 else jax.tree.map(lambda *parts: np.concatenate(parts), *replicas)


SHORTEST = 64
"""Encoder texts are padded to this length, its doubles, or the maximum length."""


class Texts[T](NamedTuple):
    """The input of the encoder: a text of each replica."""

    tokens: T
    """int32 [replicas, L]."""
    counts: T
    """int32 [replicas]: tokens of each text."""
    states: T
    """int32 [replicas]: slots of the rows; past the last slot for replicas without a text."""


def lengths_up_to(longest: int) -> tuple[int, ...]:
    """The padded lengths of texts; empty for 0."""
    lengths = [SHORTEST] if longest else []
    while lengths and lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return tuple(min(length, longest) for length in lengths)


def starting_rows(work: abc.Sequence[Step | None]) -> list[Sequence | None] | None:
    """For each replica the row that starts in this step, or None; None if no row starts."""
    rows = [next((row for row, at, _ in step.prompts if at == 0), None) if step else None for step in work]
    return rows if any(row is not None for row in rows) else None


def texts_of(rows: abc.Sequence[Sequence | None], lengths: abc.Sequence[int]) -> Texts:
    """The texts of these rows. Raises ValueError for a text that is longer than all lengths."""
    longest = max(len(row.memory) for row in rows if row is not None)
    length = next((padded for padded in lengths if padded >= longest), None)
    if length is None:
        raise ValueError(f"the encoder reads at most {lengths[-1]} tokens, the text has {longest}")
    tokens, counts = np.zeros((len(rows), length), np.int32), np.zeros(len(rows), np.int32)
    states = np.full(len(rows), NOWHERE, np.int32)
    for number, row in enumerate(rows):
        if row is not None:
            tokens[number, : len(row.memory)] = row.memory
            counts[number], states[number] = len(row.memory), row.slot
    return Texts(tokens, counts, states)


FEWER = 4
"""Each bucket has this many times the rows, or the prompt tokens, of the next smaller one."""


def buckets_up_to(
    rows: int, chunk: int, tile: int, *, drafts: int = 0, invariant: bool = False, least: int = 2
) -> tuple[Bucket, ...]:
    """Buckets of `least` to `rows` rows, without prompts and with up to `chunk` prompt tokens in tiles of `tile`.

    Prompts go with the fewest rows or with all. drafts: tokens of a draft; steps without prompts and drafts have their
    own buckets. invariant: only the largest bucket, so that every token is computed in the same shapes.
    """
    tiles = -(-chunk // tile)
    if invariant:
        return (Bucket(rows, tiles, tile, drafts),)
    # A step of one token would copy the pool: XLA turns a scatter of one row into a dynamic-update-slice.
    row_counts = smaller_counts(rows, least=least)
    decoding = [Bucket(count, drafts=most) for most in dict.fromkeys((0, drafts)) for count in row_counts]
    few_or_all = dict.fromkeys((row_counts[0], rows))
    return (*decoding, *(Bucket(n, t, tile, drafts) for n in few_or_all for t in smaller_counts(tiles, least=1)))


def smaller_counts(count: int, *, least: int) -> list[int]:
    """`count` and fewer, ascending."""
    counts = [count]
    while counts[0] // FEWER >= least:
        counts.insert(0, counts[0] // FEWER)
    return counts
