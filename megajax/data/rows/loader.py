"""From rows on the host to batches on the devices: each process reads the rows of its devices.

The global batch of a step is rows consumed .. consumed + G - 1, laid out as [M, B]: microbatch m is the m-th run of
B = G / M rows, and a data shard holds a run of each. So the batch is the same for every number of processes, and the
whole position in the data is one number. With `Balancing`, rows move to other places of the batch according to their
work: the batch has the same rows, each with its number.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, SupportsIndex

import absl.flags
import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from megajax.batch import SAMPLE, Batch, Leaf, Schema
from megajax.config.errors import UserError
from megajax.data.rows.balancing import BalancedSteps, Balancing, Imbalance
from megajax.data.rows.config import LoaderConfig
from megajax.data.rows.row_source import RowSource
from megajax.mesh.zigzag_order import UNSHARDED_ROWS, SequenceSharding
from megajax.storage.retried_reads import RETRIES, ChangedFile, ReadError, wait_for, with_retries

SAMPLE_BITS = 32

type Index = tuple[slice, ...]
type Block = dict[str, np.ndarray]


class LocalRows:
    """The rows of a global batch that a process reads, and the position of each device's block among them.

    Args:
        indices: for each of the process's devices its slices of [M, B, …].
        microbatches: M.
        micro_rows: B.

    Attributes:
        offsets: int64 [K], rows to read, counted from the first of the global batch, ascending.
    """

    def __init__(self, indices: Iterable[Index], microbatches: int, micro_rows: int):
        is_local = np.zeros((microbatches, micro_rows), bool)
        for index in indices:
            is_local[index[0], index[1]] = True
        self.offsets = np.flatnonzero(is_local)
        self._place = np.full((microbatches, micro_rows), -1)
        self._place[is_local] = np.arange(len(self.offsets))

    def block(self, values: np.ndarray, index: Index) -> np.ndarray:
        """Values [K, …] of the rows read -> those at `index`, [m, b, …]: the block of one device."""
        place = self._place[index[0], index[1]]
        first, count = int(place[0, 0]), place.size
        # A run of rows, the usual case, is a view; anything else is gathered.
        run = int(place[-1, -1]) - first + 1 == count
        block = values[first : first + count].reshape(*place.shape, *values.shape[1:]) if run else values[place]
        return block[(slice(None), slice(None), *index[2:])]


def read_rows(
    source: RowSource,
    schema: Schema,
    first: int,
    offsets: np.ndarray,
    sequence_sharding: SequenceSharding = UNSHARDED_ROWS,
    retries: int = RETRIES,
    wait: Callable[[float], None] = wait_for,
) -> Block:
    """Read rows first + offsets: each leaf [K, ...], `sample` uint32 [K]; in the order of `sequence_sharding`.

    If the disk or file server fails, a row is read again, up to `retries` times.

    Raises UserError for a row that lacks a leaf or cannot be read, and for arrays whose shape, kind of dtype or values
    do not match the schema.
    """
    numbers = first + offsets
    block = {name: np.empty((len(numbers), *leaf.shape), leaf.dtype) for name, leaf in schema.items() if name != SAMPLE}
    for place, number in enumerate(numbers.tolist()):
        row = _row(source, number, retries, wait)
        for name, values in block.items():
            values[place] = _array(row, name, schema[name], number)
    for name, values in block.items():
        below, ignored = schema[name].below, schema[name].ignored
        if below is not None and values.size and not 0 <= values.min() <= values.max() < below:
            is_invalid = ((values < 0) | (values >= below)) & (True if ignored is None else values != ignored)
            outside = np.any(is_invalid, axis=tuple(range(1, values.ndim)))
            if outside.any():
                first = values[outside][0]
                first = first if ignored is None else first[first != ignored]
                also = "" if ignored is None else f", and {ignored} for ignored values"
                raise UserError(
                    f"row {numbers[outside][0]} of the data has {name} from {first.min()} to {first.max()}, the model "
                    f"reads 0 to {below - 1}{also}: change the data, or the model's size"
                )
    block = {name: sequence_sharding.arranged(values, (None, *schema[name].axes)) for name, values in block.items()}
    block[SAMPLE] = (numbers % (1 << SAMPLE_BITS)).astype(np.uint32)
    return block


def _row(source: RowSource, number: int, retries: int, wait: Callable[[float], None]) -> Mapping[str, np.ndarray]:
    """Row `number`. Raises UserError that names the row if a file cannot be read."""
    try:
        return source[number]
    except ChangedFile as error:
        raise ChangedFile(f"row {number} of the data: {error}") from error
    except OSError as error:
        first: list[OSError] = [error]

    def retry() -> Mapping[str, np.ndarray]:
        if first:
            raise first.pop()
        return source[number]

    return with_retries(retry, f"row {number} of the data", retries, wait)


def _array(row: Mapping[str, np.ndarray], name: str, leaf: Leaf, number: int) -> np.ndarray:
    """One array of a row. Raises UserError unless it matches its leaf."""
    if not isinstance(row, Mapping) or name not in row:
        fields = ", ".join(row) if isinstance(row, Mapping) else f"a {type(row).__name__}, and must be a mapping"
        raise UserError(f"row {number} of the data has no {name}, which the model reads; it has {fields}")
    value = np.asarray(row[name])
    if value.shape != leaf.shape:
        raise UserError(f"row {number} of the data has {name} of shape {value.shape}, the model reads {leaf.shape}")
    integers = np.issubdtype(value.dtype, np.integer) and np.issubdtype(leaf.dtype, np.integer)
    if not integers and not np.can_cast(value.dtype, leaf.dtype, "same_kind"):
        raise UserError(f"row {number} of the data has {name} of dtype {value.dtype}, the model reads {leaf.dtype}")
    return value


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """Local rows of each step, for grain to read ahead."""

    source: RowSource
    schema: Schema
    first: int
    """First row of step 0."""
    size: int
    """Rows of a step."""
    offsets: np.ndarray
    sequence_sharding: SequenceSharding
    balanced: BalancedSteps | None
    retries: int
    closed: threading.Event = field(default_factory=threading.Event)
    """Set when the rows are no longer needed."""

    def __len__(self) -> int:
        return max(0, len(self.source) - self.first) // self.size

    def __getitem__(self, index: SupportsIndex) -> Block:
        first = self.first + int(index) * self.size
        rows = self.offsets if self.balanced is None else self.balanced.places(first)[self.offsets]
        return read_rows(self.source, self.schema, first, rows, self.sequence_sharding, self.retries, self._wait)

    def _wait(self, seconds: float) -> None:
        if self.closed.wait(seconds):
            raise ReadError("the loader was closed while a read waited to be retried")


class Loader:
    """Iterator over (batch, rows consumed after it).

    Args:
        source: rows; must be the same in every process.
        global_size: G, rows of a step; of the largest, if they grow.
        microbatches: M, which divides G.
        size_at: consumed rows -> rows of the next step, in whole microbatches; None: always G.
        schema: the leaves to read.
        shardings: of each leaf [M, B, ...] over the devices.
        consumed: rows consumed before; the first batch starts after them.
        config: threads and batches read ahead.
        sequence_sharding: how rows are cut over devices; does not affect values, losses or the order of rows.
        balancing: how rows of a step are balanced over data groups; None: rows stay in order. Needs `segment_ids`, and
            every process needs the document lengths of all rows of a step.

    Raises:
        UserError: G is not divisible by M; on iteration, the source has too few rows for the next batch, or a
            row does not match the schema.
    """

    def __init__(
        self,
        source: RowSource,
        *,
        global_size: int,
        microbatches: int,
        schema: Schema,
        shardings: Mapping[str, NamedSharding],
        consumed: int = 0,
        config: LoaderConfig | None = None,
        size_at: Callable[[int], int] | None = None,
        sequence_sharding: SequenceSharding = UNSHARDED_ROWS,
        balancing: Balancing | None = None,
    ):
        if global_size % microbatches:
            raise UserError(
                f"a global batch of {global_size} rows cannot be cut into {microbatches} equal microbatches: "
                "change batch.global_size or batch.micro_size."
            )
        self.consumed = consumed
        self._source, self._size, self._schema, self._shardings = source, global_size, schema, shardings
        self._micro_rows, self._size_at = global_size // microbatches, size_at
        self._config, self._sequence_sharding, self.balancing = config or LoaderConfig(), sequence_sharding, balancing
        self._blocks: grain.DatasetIterator[Block] | None = None

    def __repr__(self) -> str:
        return f"<Loader: batches of {self._size} rows, {self.consumed:,} of {len(self._source):,} rows consumed>"

    @property
    def _shape(self) -> tuple[int, int]:
        return self._size // self._micro_rows, self._micro_rows

    def _balanced_steps(self) -> BalancedSteps | None:
        """Steps of the current size."""
        if self.balancing is None:
            return None
        (microbatches, rows), sharding = self._shape, self._shardings[SAMPLE]
        groups = rows // sharding.shard_shape(self._shape)[1]
        return BalancedSteps(self.balancing, self._source, microbatches, rows, groups, self._sequence_sharding)

    def imbalance(self) -> tuple[Imbalance, Imbalance] | None:
        """Imbalance of the next step, with its rows in order and balanced; None without balancing or a next step."""
        steps = self._balanced_steps()
        if steps is None or len(self._source) < self.consumed + self._size:
            return None
        return steps.imbalance(self.consumed)

    def _start(self) -> grain.DatasetIterator[Block]:
        """Start reading, at the first batch, so that a finished run can be set up after the end of the data."""
        flags = absl.flags.FLAGS
        if not flags.is_parsed():
            flags.mark_as_parsed()  # grain reads its flags, which are parsed only in programs run by absl
        indices = self._shardings[SAMPLE].addressable_devices_indices_map(self._shape)
        self._local = LocalRows((index for index in indices.values() if index is not None), *self._shape)
        self._steps = _Steps(
            source=self._source, schema=self._schema, first=self.consumed, size=self._size,
            sequence_sharding=self._sequence_sharding, offsets=self._local.offsets,
            balanced=self._balanced_steps(), retries=self._config.retries,
        )  # fmt: skip
        ahead = grain.ReadOptions(num_threads=self._config.threads, prefetch_buffer_size=self._config.prefetch)
        return iter(grain.MapDataset.source(self._steps).to_iter_dataset(ahead))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Batch, int]:
        if self._size_at is not None and (size := self._size_at(self.consumed)) != self._size:
            self.close()  # and go on in steps of that size
            self._size = size
        after = self.consumed + self._size
        if after > len(self._source):
            raise UserError(
                f"the next batch needs rows {self.consumed} to {after - 1}, but the data has {len(self._source)}. "
                "Request as many rows as the run uses when building the data (None is a single pass)."
            )
        if self._blocks is None:
            self._blocks = self._start()
        block = next(self._blocks)
        self.consumed = after
        return self._on_devices(block), after

    def _on_devices(self, block: Block) -> Batch:
        """Local rows -> global arrays. Reads only the blocks of this process's devices."""

        def place(name: str, sharding: NamedSharding) -> jax.Array:
            values = block[name]

            def local_block(index: Index | None) -> np.ndarray:
                assert index is not None  # jax asks for the blocks of this process's devices only
                return self._local.block(values, index)

            return jax.make_array_from_callback((*self._shape, *values.shape[1:]), sharding, local_block)

        return {name: place(name, self._shardings[name]) for name in block}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: nothing, since the next row follows from the rows consumed."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""

    def close(self) -> None:
        """Stop reading ahead. A closed loader can be used again and continues where it stopped."""
        blocks, self._blocks = self._blocks, None
        if blocks is not None:
            self._steps.closed.set()
            blocks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
