"""Rows made from items: their order over several passes, and the handling of unreadable items."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from megajax.config.errors import UserError
from megajax.data.rows.row_source import check_row, data_seed, files_of, index_files_of, order_checksum
from megajax.data.rows.splits import Range, Rows, Splits, config_paths, parse_split, split_bounds

TRIES = 1000
"""Items that are tried for a row before an error is raised."""
KEPT_ORDERS = 2
SPLIT_SEED = 0
"""The items of a split do not depend on the run's seed, so that test items are the same for all runs."""


class UnreadableItem(Exception):
    """An item that cannot be made into a row. reason: a short category, by which such items are counted."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{detail} ({reason})" if detail else reason)
        self.reason = reason


class Items(Protocol):
    """The items of rows, by number."""

    def __len__(self) -> int: ...

    def name(self, item: int) -> str:
        """Location of the item, for messages."""
        ...


class DivisibleItems(Items, Protocol):
    """Items that can be divided into splits."""

    def groups(self) -> Sequence[np.ndarray]:
        """Groups of items; a split gets the same share of each."""
        ...

    def subset(self, items: np.ndarray) -> Items:
        """Only these items, in this order."""
        ...


class OrderConfig(Protocol):
    """The settings of a config that an order needs."""

    @property
    def seed(self) -> int | None: ...
    @property
    def on_error(self) -> Literal["stop", "skip"]: ...


class ShuffledOrder(NamedTuple):
    """Number, order and randomness of the rows of a split, and the handling of unreadable items."""

    rows: int | None
    """Number of rows; None: one pass over the items."""
    seed: int
    """Seed of the order and of the randomness within rows."""
    split: int
    """Position of the split; each split has different random numbers."""
    on_error: Literal["stop", "skip"] = "stop"

    @classmethod
    def of(cls, config: OrderConfig, rows: int | None, seed: int, split: int) -> "ShuffledOrder":
        """The order that a config asks for. seed: the run's."""
        return cls(rows, data_seed(config.seed, seed), split, config.on_error)


type MakeRows = Callable[[Any, int, int | None], Any]


class ItemRows[Data: Items]:
    """Rows 0 to `rows` - 1 as mappings of arrays, pure functions of (seed, split, row).

    A pass reads every item once, in a different order. Subclasses make a row from an item.

    Attributes:
        passes: passes over the items; the last may be incomplete.
        skipped: reason -> number of rows so far for which another item was used.
    """

    def __init__(self, items: Data, order: ShuffledOrder):
        self.items, self.split, self._seed, self._on_error = items, order.split, order.seed, order.on_error
        self._rows = len(items) if order.rows is None else order.rows
        self.passes = max(1, -(-self._rows // max(len(items), 1)))
        self.skipped: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._order = lru_cache(KEPT_ORDERS)(self._permutation)

    def make(self, item: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
        """A row of the item. Raises UnreadableItem."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self._rows

    def order(self) -> str:
        """Identifier of the order of the rows; unchanged if rows are appended."""
        return f"{len(self.items)}-{order_checksum(self._order(0))}"

    def files(self) -> list[str]:
        """The files that are read."""
        return files_of(self.items)

    @property
    def index_files(self) -> tuple[Path, ...]:
        """The cache files of the items."""
        return index_files_of(self.items)

    def item(self, row: int, attempt: int = 0) -> int:
        """The item of a row, or of the row `attempt` places later in the same pass."""
        number, place = divmod(row, len(self.items))
        return int(self._order(number)[(place + attempt) % len(self.items)])

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        check_row(self, row)
        for attempt in range(min(TRIES, len(self.items))):
            item = self.item(row, attempt)
            try:
                return self.make(item, np.random.default_rng((self._seed, self.split, row, attempt)))
            except UnreadableItem as error:
                if self._on_error == "stop":
                    raise UserError(
                        f"{self.items.name(item)}, row {row}: {error}. Repair or remove it, or set data.on_error=skip"
                    ) from error
                if not attempt:
                    with self._lock:
                        self.skipped[error.reason] += 1
        raise UserError(
            f"row {row}: none of {min(TRIES, len(self.items))} items can be read, the last one is "
            f"{self.items.name(self.item(row, attempt))}; skipped so far: {dict(self.skipped)}"
        )

    def _permutation(self, number: int) -> np.ndarray:
        """The order of the items in a pass."""
        count = len(self.items)
        return np.random.default_rng((self._seed, self.split, number, count)).permutation(count)


def split_items(share: Range | None, groups: Sequence[np.ndarray]) -> np.ndarray:
    """The items of a split, int64: a random share of each group, independent of the run's seed."""
    parts = [np.zeros(0, np.int64)]
    for number, group in enumerate(groups):
        first, last = split_bounds(share, len(group))
        parts.append(np.random.default_rng((SPLIT_SEED, number)).permutation(group)[first:last])
    return np.concatenate(parts)


def items_by_label(labels: np.ndarray) -> list[np.ndarray]:
    """The items of each label, in the order of the labels."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)


def splits_from_shares(items: DivisibleItems, split: str, rows: Rows, make: MakeRows, source: str) -> Splits:
    """Row sources for the splits that a run requests, each from a share of the items.

    make: (items, position of the split, rows) -> row source. source: location of the data, for messages.

    Raises:
        UserError: a requested split has no items.
    """
    shares, groups = parse_split(split), items.groups()

    def share(position: int, name: str, row_count: int | None) -> Any:
        if shares[position] is None and name != "train":
            return None
        indices = split_items(shares[position], groups)
        if not len(indices):
            raise UserError(f"{source}: no item of {len(items)} falls into the {name} split: change data.split={split}")
        return make(items.subset(indices), position, row_count)

    return Splits.build(rows, share)


def splits_from_items(items: Callable[[str], Items | None], rows: Rows, make: MakeRows) -> Splits:
    """Row sources for the splits that a run requests, each from separate items. items: split -> its items or None."""

    def source(position: int, name: str, row_count: int | None) -> Any:
        separate_items = items(name)
        return None if separate_items is None else make(separate_items, position, row_count)

    return Splits.build(rows, source)


def splits_from_paths(config: Any, read: Callable[[Sequence[str]], Any], rows: Rows, make: MakeRows) -> Splits:
    """Row sources of the files of a config: shares of `paths`, or separate `train_paths`, `valid_paths`, `test_paths`.

    read: paths -> their items. Raises UserError: a requested split has no items.
    """
    if config.paths:
        return splits_from_shares(read(config.paths), config.split, rows, make, config.paths[0])

    def separate(name: str) -> Any:
        paths = config_paths(config, name)
        return read(paths) if paths else None

    return splits_from_items(separate, rows, make)
